"""Selects the kernels of NumPy's BLAS: OPENBLAS_CORETYPE, set before NumPy is imported.

OpenBLAS ships kernels for many processors and picks one set by the processor's vendor and model. An
unknown model gets old kernels that reach half of what its vector units could deliver. Here the
vector units decide instead, through the variable OPENBLAS_CORETYPE, which OpenBLAS reads once, when
it is loaded. `python -m bench.blas_kernels` measures whether the choice is the fastest.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

VARIABLE = "OPENBLAS_CORETYPE"
AVX2 = ("avx2", "fma")
AVX512 = (*AVX2, "avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl")
# OpenBLAS's name of an architecture -> the vector units its kernels need, in Linux's spelling.
ARCHITECTURES = {
    "Haswell": AVX2,
    "Zen": AVX2,
    "SkylakeX": AVX512,
    "Cooperlake": (*AVX512, "avx512_bf16"),
    "SapphireRapids": (*AVX512, "avx512_bf16"),
}
# Fastest first; the others run the same kernels for float32 and float64, or slower ones.
CHOICES = ("SkylakeX", "Haswell")
UNITS = tuple(dict.fromkeys(unit for units in ARCHITECTURES.values() for unit in units))
CPUINFO = Path("/proc/cpuinfo")
ROWS, INNER, COLUMNS = 256, 384, 1536  # the trial product, as in a small decoder: 0.3 GFLOP
ROUNDS, PRODUCTS_OF_ROUND = 6, 2
ENOUGH_SECONDS = 0.1  # where products wait for a core, a single round is enough


def processor() -> tuple[str, tuple[str, ...]]:
    """Return (name, vector units of UNITS) of this host's first processor; empty if unknown."""
    text = ""
    with suppress(OSError), open(CPUINFO, encoding="utf-8", errors="replace") as file:
        text = file.read(1 << 14)
    name, flags = (
        re.search(rf"^{word}\s*: (.*)$", text, re.MULTILINE) for word in ("model name", "flags")
    )
    has = set(flags[1].split()) if flags else ()
    return name[1] if name else "", tuple(unit for unit in UNITS if unit in has)


def lacking(architecture: str, units: Collection[str]) -> list[str]:
    """Return the vector units that an architecture's kernels need but `units` lacks."""
    return [unit for unit in ARCHITECTURES.get(architecture, ()) if unit not in units]


def spelled(name: str) -> str:
    """Return a name as ARCHITECTURES spells it; OpenBLAS ignores case."""
    return next((one for one in ARCHITECTURES if one.lower() == name.lower()), name)


def choice(units: Collection[str]) -> str | None:
    """Return the architecture with the fastest kernels for these vector units.

    None: they belong to another kind of processor, so OpenBLAS chooses.
    """
    return next((name for name in CHOICES if not lacking(name, units)), None)


def wider(architecture: str, units: Collection[str]) -> str | None:
    """Return the choice for these units if its vectors are wider than the architecture's."""
    best = choice(units)
    narrow = set(ARCHITECTURES.get(architecture, ())) < set(ARCHITECTURES.get(best, ()))
    return best if narrow else None


def pools() -> Sequence[dict]:
    """Return the BLAS libraries that this process has loaded, as threadpoolctl describes them."""
    from threadpoolctl import threadpool_info

    return [pool for pool in threadpool_info() if pool["user_api"] == "blas"]


def shown(pool: Mapping) -> str:
    """Return a library with its version, and the architecture of its kernels where it is known."""
    version = ".".join(str(pool["version"]).split(".")[:3])
    kernels = pool.get("architecture")
    return f"{pool['internal_api']} {version}" + (f", kernels for {kernels}" if kernels else "")


def product_seconds(count: int) -> float:
    """Return how long `count` equal products take, in seconds."""
    import numpy as np

    x, w = np.ones((ROWS, INNER), np.float32), np.ones((INNER, COLUMNS), np.float32)
    y = np.empty((ROWS, COLUMNS), np.float32)
    start = time.perf_counter()
    for _ in range(count):
        np.matmul(x, w, out=y)
    return time.perf_counter() - start


def slowdown(threads: int) -> float:
    """Return how much longer products take with `threads` threads than with one, right now.

    The two alternate. Sums are compared, because a product that has to wait for a core counts too.
    """
    from threadpoolctl import ThreadpoolController

    controller = ThreadpoolController().select(user_api="blas")
    product_seconds(1)  # allocates BLAS's buffers
    seconds = dict.fromkeys((1, threads), 0.0)
    for _ in range(ROUNDS):
        if sum(seconds.values()) > ENOUGH_SECONDS:
            break
        for count in seconds:
            with controller.limit(limits=count):
                seconds[count] += product_seconds(PRODUCTS_OF_ROUND)
    return seconds[threads] / seconds[1]


def one_thread() -> None:
    """Limit BLAS to one thread from now on."""
    from threadpoolctl import threadpool_limits

    threadpool_limits(1, "blas")
