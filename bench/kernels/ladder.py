"""Products by the kernels of the ladder and by cuBLAS, on one GPU.

    python -m bench.kernels.ladder [--largest 8192] [--json FILE]

Each result, cuBLAS's too, is first compared with float64. Times are medians by CUDA events; the
operands start outside the device's cache. Columns: host_us: the time that Python needs to queue the
call. tflop_per_s: 2 M N K / time. percent_of_cublas: cuBLAS's time for the same types over this
time. percent_of_roof: percent of the device's published dense peak for the instruction used, if
bench/kernels/gpu.py knows it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from bench.kernels import rungs
from bench.kernels.gpu import Gpu
from bench.program import Outcome, Program
from mpipar.ops.cuda.gemm import BlasGemm, TileGemm
from mpipar.ops.cuda.kernels import Loader

SIZES = ((4096, 4096, 4096), (8192, 3072, 768))
LARGEST = 8192


class Products:
    """Products on one device, each compared with float64 before it is timed."""

    def __init__(self, gpu: Gpu):
        self.gpu, self.xp = gpu, gpu.xp
        self.loader = Loader(gpu.xp, folders=rungs.FOLDERS)

    def rung(self, rung: str) -> TileGemm:
        """Return the product by one rung with its default tiles."""
        return TileGemm(self.loader, partial(rungs.gemm, rung))

    def timed(self, name, gemm, a, b, expected) -> tuple[float, float]:
        """Return the seconds on device and host of gemm(a, b), whose result must be `expected`."""
        out = self.xp.full(expected.shape, np.nan, np.float32).astype(expected.dtype)
        gemm(a, b, out)
        self.gpu.check(f"{name} of {a.shape} x {b.shape}", out, expected, a.dtype.name)
        return self.gpu.timed(partial(gemm, a, b, out))

    def all_of(self, m: int, n: int, k: int, dtype: str) -> list[tuple]:
        """Return (name, seconds on device and host) of cuBLAS and of every rung."""
        a, b = self.gpu.random(m, k, dtype=dtype), self.gpu.random(k, n, dtype=dtype)
        exact = self.xp.empty((m, n), np.float64)
        BlasGemm(self.xp)(a.astype(np.float64), b.astype(np.float64), exact)
        wanted = exact.astype(a.dtype)
        found = [("cuBLAS", self.timed("cuBLAS", BlasGemm(self.xp), a, b, wanted))]
        names = [rung for rung in rungs.RUNGS if (rung == "mma") == (dtype == "bfloat16")]
        return found + [(one, self.timed(one, self.rung(one), a, b, wanted)) for one in names]


def measure(args: Any, session: Any) -> Outcome:
    """Measure all. Raises WrongResultError."""
    gpu, rows = Gpu(args.repeats), []
    for m, n, k in dict.fromkeys(tuple(min(side, args.largest) for side in one) for one in SIZES):
        for dtype in ("float32", "bfloat16"):
            found = Products(gpu).all_of(m, n, k, dtype)
            for name, (device, host) in found:
                speed = 2 * m * n * k / device * 1e-12
                rows.append(
                    {
                        "kernel": name,
                        "dtype": dtype,
                        "M": m,
                        "N": n,
                        "K": k,
                        "device_us": device * 1e6,
                        "host_us": host * 1e6,
                        "tflop_per_s": speed,
                        "percent_of_cublas": 100 * found[0][1][0] / device,
                        "percent_of_roof": gpu.percent(speed, dtype),
                    }
                )
    return Outcome(rows, gpu.facts())


main = Program(
    "kernels.ladder",
    __doc__,
    measure,
    counts={
        "--largest": (LARGEST, "longer sides are cut to it"),
        "--repeats": (20, "timed calls"),
    },
).started(__name__)
