"""Which kernels NumPy's BLAS runs: those of an architecture, named before NumPy is loaded.

OpenBLAS has kernels for many processors, and picks them by the processor's maker and model. One
that it does not know gets old kernels, at half the rate that its vector units could reach. So the
vector units decide here, and the variable OPENBLAS_CORETYPE tells OpenBLAS, which reads it once,
when it is loaded. `python -m bench.blas_kernels` measures whether the choice is the fastest.
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
# OpenBLAS's name of an architecture -> the vector units that its kernels need, as Linux calls them.
ARCHITECTURES = {
    "Haswell": AVX2, "Zen": AVX2, "SkylakeX": AVX512, "Cooperlake": (*AVX512, "avx512_bf16"),
    "SapphireRapids": (*AVX512, "avx512_bf16"),
}
# The fastest first; those left out run the same kernels for float32 and float64, or slower ones.
CHOICES = ("SkylakeX", "Haswell")
UNITS = tuple(dict.fromkeys(unit for units in ARCHITECTURES.values() for unit in units))
CPUINFO = Path("/proc/cpuinfo")
ROWS, INNER, COLUMNS = 256, 384, 1536  # of a trial's product, as in a small decoder: 0.3 GFLOP
ROUNDS, PRODUCTS_OF_ROUND = 6, 2
ENOUGH_SECONDS = 0.1  # where products wait for a core, one round tells as much


def processor() -> tuple[str, tuple[str, ...]]:
    """(name, vector units of UNITS) of this host's first processor; empty where nobody says."""
    text = ""
    with suppress(OSError), open(CPUINFO, encoding="utf-8", errors="replace") as file:
        text = file.read(1 << 14)
    name, flags = (re.search(rf"^{word}\s*: (.*)$", text, re.MULTILINE)
                   for word in ("model name", "flags"))
    has = set(flags[1].split()) if flags else ()
    return name[1] if name else "", tuple(unit for unit in UNITS if unit in has)


def lacking(architecture: str, units: Collection[str]) -> list[str]:
    """Return the vector units that an architecture's kernels need, and that are not among these."""
    return [unit for unit in ARCHITECTURES.get(architecture, ()) if unit not in units]


def spelled(name: str) -> str:
    """Return a name of ARCHITECTURES as it stands there; OpenBLAS takes capital and small letters.
    """
    return next((one for one in ARCHITECTURES if one.lower() == name.lower()), name)


def choice(units: Collection[str]) -> str | None:
    """Return the architecture with the fastest kernels for these vector units.

    None: they are of another kind of processor, and OpenBLAS chooses.
    """
    return next((name for name in CHOICES if not lacking(name, units)), None)


def wider(architecture: str, units: Collection[str]) -> str | None:
    """Return the choice for these units if its vectors are wider than those of an architecture."""
    best = choice(units)
    narrow = set(ARCHITECTURES.get(architecture, ())) < set(ARCHITECTURES.get(best, ()))
    return best if narrow else None


def pools() -> Sequence[dict]:
    """Return the BLAS libraries that this process has loaded, as threadpoolctl describes them."""
    from threadpoolctl import threadpool_info

    return [pool for pool in threadpool_info() if pool["user_api"] == "blas"]


def shown(pool: Mapping) -> str:
    """Return a library with its version, and the architecture of its kernels, where it says."""
    version = ".".join(str(pool["version"]).split(".")[:3])
    kernels = pool.get("architecture")
    return f"{pool['internal_api']} {version}" + (f", kernels for {kernels}" if kernels else "")


def product_seconds(count: int) -> float:
    """Return the seconds of so many equal products."""
    import numpy as np

    x, w = np.ones((ROWS, INNER), np.float32), np.ones((INNER, COLUMNS), np.float32)
    y = np.empty((ROWS, COLUMNS), np.float32)
    start = time.perf_counter()
    for _ in range(count):
        np.matmul(x, w, out=y)
    return time.perf_counter() - start


def slowdown(threads: int) -> float:
    """Return how many times as long products take with so many threads as with one, at this moment.

    Both take turns. A product that must wait for a core counts, so the sums are compared.
    """
    from threadpoolctl import ThreadpoolController

    controller = ThreadpoolController().select(user_api="blas")
    product_seconds(1)  # it makes BLAS's buffers
    seconds = dict.fromkeys((1, threads), 0.0)
    for _ in range(ROUNDS):
        if sum(seconds.values()) > ENOUGH_SECONDS:
            break
        for count in seconds:
            with controller.limit(limits=count):
                seconds[count] += product_seconds(PRODUCTS_OF_ROUND)
    return seconds[threads] / seconds[1]


def one_thread() -> None:
    """Let BLAS use one thread from now on."""
    from threadpoolctl import threadpool_limits

    threadpool_limits(1, "blas")
