"""Selects the kernels of NumPy's BLAS: OPENBLAS_CORETYPE, set before NumPy is imported.

OpenBLAS ships kernels for many processors and picks one set by the processor's vendor and model. An
unknown model gets old kernels that reach half of what its vector units could deliver. Here the
vector units decide instead, through a variable that OpenBLAS reads once, when it is loaded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

VARIABLE = "OPENBLAS_CORETYPE"
# OpenBLAS's name of an architecture -> the vector units its kernels need, in Linux's spelling. The
# fastest is first; other names run the same kernels for float32 and float64, or slower ones.
KERNELS = {
    "SkylakeX": ("avx2", "fma", "avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"),
    "Haswell": ("avx2", "fma"),
}
CPUINFO = Path("/proc/cpuinfo")


def processor() -> tuple[str, frozenset[str]]:
    """Return (name, vector units and other flags) of this host's first processor, or empty ones."""
    text = ""
    with suppress(OSError), open(CPUINFO, encoding="utf-8", errors="replace") as file:
        text = file.read(1 << 14)
    name, flags = (
        re.search(rf"^{word}\s*: (.*)$", text, re.MULTILINE) for word in ("model name", "flags")
    )
    return name[1] if name else "", frozenset(flags[1].split()) if flags else frozenset()


def choice(units: Collection[str]) -> str | None:
    """Return the architecture with the fastest kernels for these units; None: OpenBLAS chooses."""
    return next((name for name, needed in KERNELS.items() if {*needed} <= {*units}), None)


def choose_kernels(environ: MutableMapping[str, str]) -> None:
    """Set VARIABLE for this processor, unless the user has set it or NumPy is already loaded."""
    given, chosen = environ.get(VARIABLE), choice(processor()[1])
    if not given and chosen and "numpy" not in sys.modules:
        environ[VARIABLE] = chosen


def pools() -> Sequence[dict]:
    """Return the BLAS libraries that this process has loaded, as threadpoolctl describes them."""
    from threadpoolctl import threadpool_info

    return [pool for pool in threadpool_info() if pool["user_api"] == "blas"]


def shown(pool: Mapping) -> str:
    """Return a library with its version, and the architecture of its kernels where it is known."""
    version = ".".join(str(pool["version"]).split(".")[:3])
    kernels = pool.get("architecture")
    return f"{pool['internal_api']} {version}" + (f", kernels for {kernels}" if kernels else "")
