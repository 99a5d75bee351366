"""The kernels of one GPU: products beside cuBLAS, a sweep of tile sizes, and what moves memory.

    python -m bench.tiles_gpu [--json FOLDER]

Every product is compared with cuBLAS's before it is timed, on random data (zeros run faster: they
draw less power). Times are medians of what CUDA events measure, after a warm-up.

Columns: tflop_per_s: 2 M N K / time. of_cublas: cuBLAS's time for the same types / this one's.
of_roof: share of the device's published dense peak for the instruction that is used, where this
file knows it. host_us: the time that Python needs to queue the call. flop_per_byte: of a block's
step, global memory only. of_copy: bytes per second beside those of a copy on the device, counting
each array that the function has to read or write once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from bench import results
from mpipar.errors import EXIT_CHECK_FAILED, EnvironmentProblem
from mpipar.ops import make
from mpipar.ops.cuda import ladder
from mpipar.ops.cuda.gemm import BlasGemm, TileGemm
from mpipar.ops.cuda.loader import Loader

# Dense peaks in TFLOP/s and memory in GB/s, from the makers' data sheets.
ROOFS = {
    "H100": {"float32": 67, "tf32": 495, "bfloat16": 989, "memory": 3350},
    "H200": {"float32": 67, "tf32": 495, "bfloat16": 989, "memory": 4800},
}
SIZES = ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 768, 768), (8192, 3072, 768),
         (8192, 768, 3072), (4095, 4097, 1023))
# Largest relative norm of the difference from cuBLAS: both round, in another order.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-7}
SWEEPS = {  # from starved to full: few multiplications per value read, few threads, few blocks
    "warp": ((32, 16, 8, 32, 16), (64, 32, 8, 32, 16), (64, 64, 4, 32, 32), (64, 64, 8, 32, 32),
             (128, 64, 8, 64, 32), (128, 128, 8, 64, 32), (128, 128, 16, 64, 32)),
    "mma": ((32, 32, 16, 16, 16, 2), (64, 32, 32, 32, 16, 2), (64, 64, 32, 32, 32, 2),
            (64, 64, 32, 32, 32, 3), (128, 64, 32, 64, 32, 3), (128, 128, 32, 64, 32, 2),
            (128, 128, 32, 64, 32, 3), (128, 128, 32, 64, 32, 4)),
}
SWEEP_SIZE = (4096, 4096, 4096)
TOKENS, WIDTH, VOCABULARY = 8192, 768, 50304
SECONDS = 2.0  # at most, for one row


class Wrong(Exception):
    """A product that is not cuBLAS's."""


def timed(call, repeats: int) -> tuple[float, float]:
    """Return the median seconds of a call on the device and on the host."""
    from cupyx.profiler import benchmark

    found = benchmark(call, n_repeat=repeats, name="", n_warmup=3, max_duration=SECONDS)
    return statistics.median(found.gpu_times.ravel()), statistics.median(found.cpu_times)


class Bench:
    """One device, its roofs, and random arrays on it."""

    def __init__(self, repeats: int):
        self.ops = make("cuda", "float32")
        self.xp, self.repeats = self.ops.xp, repeats
        self.loader = Loader(self.xp)
        self.name = self.xp.cuda.runtime.getDeviceProperties(0)["name"].decode()
        self.roofs = next((roofs for word, roofs in ROOFS.items() if word in self.name), {})
        self.rng = np.random.default_rng(0)

    def random(self, *shape, dtype="float32"):
        """An array of normal deviates."""
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        return self.xp.asarray(self.rng.standard_normal(shape, np.float32)).astype(kind)

    def share(self, value: float, roof: str):
        """value / the roof's, or "-" where it is not known."""
        return value / self.roofs[roof] if roof in self.roofs else "-"

    def rung(self, rung, tiles=None):
        """The product by one rung with fixed tiles."""
        return TileGemm(self.loader, lambda layout, dtype, out_dtype, rows, columns:
                        ladder.gemm(rung, layout, dtype, out_dtype, tiles))

    def product(self, gemm, a, b, expected) -> tuple[float, float]:
        """Seconds on device and host of gemm(a, b), which must be what is expected."""
        out = self.xp.full(expected.shape, np.nan, np.float32).astype(expected.dtype)
        gemm(a, b, out)
        difference = (out.astype(np.float32) - expected.astype(np.float32)).ravel()
        scale = self.ops.square_sum(expected.astype(np.float32)) ** 0.5
        error = self.ops.square_sum(difference) ** 0.5 / scale
        if not error <= TOLERANCE[a.dtype.name]:
            raise Wrong(f"{a.shape} x {b.shape} {a.dtype.name}: off by {error:.1e}")
        return timed(partial(gemm, a, b, out), self.repeats)

    def operands(self, m, n, k, dtype):
        """Random a (m, k), b (k, n), cuBLAS's product, and its seconds on device and host."""
        a, b = self.random(m, k, dtype=dtype), self.random(k, n, dtype=dtype)
        expected, blas = self.xp.empty((m, n), a.dtype), BlasGemm(self.xp)
        blas(a, b, expected)
        return a, b, expected, timed(partial(blas, a, b, self.xp.empty((m, n), a.dtype)),
                                     self.repeats)


def product_rows(bench: Bench, sizes=SIZES) -> list[dict]:
    """cuBLAS, TF32, and every rung of the ladder at every size."""
    rows = []
    for m, n, k in sizes:
        for dtype in ("float32", "bfloat16"):
            a, b, expected, blas = bench.operands(m, n, k, dtype)
            found = [("cuBLAS", dtype, blas)]
            if dtype == "float32":
                tf32 = partial(BlasGemm(bench.xp, tf32=True), a, b, bench.xp.empty_like(expected))
                found.append(("cuBLAS TF32", "tf32", timed(tf32, bench.repeats)))
            names = [rung for rung in ladder.RUNGS if (rung == "mma") == (dtype == "bfloat16")]
            found += [(rung, dtype, bench.product(bench.rung(rung), a, b, expected))
                      for rung in names]
            for name, roof, (device, host) in found:
                speed = 2 * m * n * k / device * 1e-12
                rows.append({
                    "kernel": name, "dtype": dtype, "M": m, "N": n, "K": k,
                    "device_us": device * 1e6, "host_us": host * 1e6, "tflop_per_s": speed,
                    "of_cublas": blas[0] / device, "of_roof": bench.share(speed, roof)})
    return rows


def sweep_rows(bench: Bench, size=SWEEP_SIZE) -> list[dict]:
    """The two highest rungs with tiles from starved to full."""
    rows, (m, n, k) = [], size
    for rung, sweep in SWEEPS.items():
        dtype = "float32" if rung == "warp" else "bfloat16"
        a, b, expected, blas = bench.operands(m, n, k, dtype)
        for tiles in sweep:
            kernel = ladder.gemm(rung, "NN", dtype, None, tiles)
            device, _ = bench.product(bench.rung(rung, tiles), a, b, expected)
            speed = 2 * m * n * k / device * 1e-12
            rows.append({
                "kernel": rung, "tiles": " ".join(map(str, tiles)), "threads": kernel.block[0],
                "flop_per_byte": ladder.flop_per_byte(kernel, a.itemsize),
                "tflop_per_s": speed, "of_cublas": blas[0] / device,
                "of_roof": bench.share(speed, dtype)})
    return rows


def memory_rows(bench: Bench, tokens=TOKENS, width=WIDTH, vocabulary=VOCABULARY) -> list[dict]:
    """What surrounds the products, beside a copy of the same number of bytes."""
    ops, x, dy = bench.ops, bench.random(tokens, width), bench.random(tokens, width)
    w, b, targets = bench.random(width), bench.random(width), bench.xp.zeros(tokens, np.int64)
    logits = bench.random(tokens, vocabulary)
    flat = [abs(bench.random(vocabulary * width)) for _ in range(4)]
    _, mean, rstd = ops.layernorm_forward(x, w, b, 1e-5)
    one, whole, table = x.nbytes, logits.nbytes, flat[0].nbytes
    calls = {  # function: (call, bytes that have to be read and written)
        "gelu_forward": (lambda: ops.gelu_forward(x), 2 * one),
        "gelu_backward_input": (lambda: ops.gelu_backward_input(dy, x), 3 * one),
        "layernorm_forward": (lambda: ops.layernorm_forward(x, w, b, 1e-5), 2 * one),
        "layernorm_backward_input": (
            lambda: ops.layernorm_backward_input(dy, x, w, mean, rstd), 3 * one),
        "cross_entropy_forward": (
            lambda: ops.cross_entropy_forward(logits, targets, 0, vocabulary), whole),
        "cross_entropy_backward_input": (
            lambda: ops.cross_entropy_backward_input(logits, targets, mean, 0, vocabulary, 1e-4),
            2 * whole),
        "adamw_step": (
            lambda: ops.adamw_step(*flat, 1e-9, 0.9, 0.95, 1e-8, 0.1, 1), 7 * table),
    }
    rows = []
    for name, (call, count) in calls.items():
        source = bench.xp.zeros(count // 8, np.float32)
        copied, _ = timed(partial(ops.copy, bench.xp.empty_like(source), source), bench.repeats)
        device, host = timed(call, bench.repeats)
        speed = count / device * 1e-9
        rows.append({"function": name, "MB": count * 1e-6, "device_us": device * 1e6,
                     "host_us": host * 1e6, "gb_per_s": speed, "of_copy": copied / device,
                     "of_roof": bench.share(speed, "memory")})
    return rows


def run(repeats: int = 20, folder: str | None = None) -> int:
    """Measure and print the three tables; write them to `folder`; return the exit code."""
    bench = Bench(repeats)
    for name, measure in (("products", product_rows), ("tiles", sweep_rows),
                          ("memory", memory_rows)):
        try:
            rows = measure(bench)
        except Wrong as error:
            print(f"{name}: {error}", file=sys.stderr)
            return EXIT_CHECK_FAILED
        print(f"\n{name} on {bench.name}\n\n{results.table(rows)}")
        if folder is not None:
            results.write(str(Path(folder) / f"gpu_{name}.json"), "bench.tiles_gpu", rows,
                          gpu=bench.name, cupy=bench.xp.__version__, repeats=repeats)
    return 0


def main(argv=None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.tiles_gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="timed calls per row (20)")
    parser.add_argument("--json", metavar="FOLDER", help="write gpu_*.json into this folder")
    args = parser.parse_args(argv)
    try:
        return run(args.repeats, args.json)
    except EnvironmentProblem as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
