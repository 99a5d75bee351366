"""Part of bench.tiles, on one GPU: every rung beside cuBLAS, a sweep of tiles, other kernels.

Causal attention runs in tiles, and with whole scores and cuBLAS. Each result is compared with the
plain formulas in float64 before it is timed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from bench import results
from bench.kernels import gpu_memory
from bench.kernels.gpu import Gpu
from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.cuda import ladder
from mpipar.ops.cuda.gemm import BlasGemm, TileGemm
from mpipar.ops.cupy_fused import FusedOps

SIZES = (
    (1024, 1024, 1024),
    (4096, 4096, 4096),
    (8192, 768, 768),
    (8192, 3072, 768),
    (8192, 768, 3072),
    (4095, 4097, 1023),
)
SWEEPS = {  # from starved to full: few multiplications per value read, few threads, few blocks
    "warp": (
        (32, 16, 8, 32, 16),
        (64, 32, 8, 32, 16),
        (64, 64, 4, 32, 32),
        (64, 64, 8, 32, 32),
        (128, 64, 8, 64, 32),
        (128, 128, 8, 64, 32),
        (128, 128, 16, 64, 32),
    ),
    "mma": (
        (32, 32, 16, 16, 16, 2),
        (64, 32, 32, 32, 16, 2),
        (64, 64, 32, 32, 32, 2),
        (64, 64, 32, 32, 32, 3),
        (128, 64, 32, 64, 32, 3),
        (128, 128, 32, 64, 32, 2),
        (128, 128, 32, 64, 32, 3),
        (128, 128, 32, 64, 32, 4),
    ),
}
SWEEP_SIZE = (4096, 4096, 4096)
TABLES = ("attention", "memory", "products", "tiles")  # of bench.tiles --device cuda


class Products:
    """Products on one device, each compared with cuBLAS's before it is timed."""

    def __init__(self, gpu: Gpu):
        self.gpu, self.xp = gpu, gpu.xp

    def rung(self, rung, tiles=None):
        """Return the product by one rung with fixed tiles."""
        return TileGemm(
            self.gpu.loader,
            lambda layout, dtype, out_dtype, rows, columns: ladder.gemm(
                rung, layout, dtype, out_dtype, tiles
            ),
        )

    def timed(self, name, gemm, a, b, expected, precision=None) -> tuple[float, float]:
        """Return the seconds on device and host of gemm(a, b), whose result must equal `expected`.

        precision: given if it differs from the operands' type.
        """
        out = self.xp.full(expected.shape, np.nan, np.float32).astype(expected.dtype)
        gemm(a, b, out)
        self.gpu.check(f"{name} of {a.shape} x {b.shape}", out, expected, precision or a.dtype.name)
        return self.gpu.timed(partial(gemm, a, b, out))

    def operands(self, m, n, k, dtype):
        """Return random a (m, k), b (k, n), cuBLAS's product, and its seconds on device and host.

        cuBLAS's own result is compared with float64's.
        """
        a, b = self.gpu.random(m, k, dtype=dtype), self.gpu.random(k, n, dtype=dtype)
        exact = self.xp.empty((m, n), np.float64)
        BlasGemm(self.xp)(a.astype(np.float64), b.astype(np.float64), exact)
        blas = self.timed("cuBLAS", BlasGemm(self.xp), a, b, exact.astype(a.dtype))
        return a, b, exact.astype(a.dtype), blas


def product_rows(gpu: Gpu, sizes=SIZES) -> list[dict]:
    """Return cuBLAS, TF32, and every rung of the ladder at every size."""
    rows, products = [], Products(gpu)
    for m, n, k in sizes:
        for dtype in ("float32", "bfloat16"):
            a, b, expected, blas = products.operands(m, n, k, dtype)
            found = [("cuBLAS", dtype, blas)]
            if dtype == "float32":
                tf32 = products.timed(
                    "cuBLAS TF32", BlasGemm(gpu.xp, tf32=True), a, b, expected, "tf32"
                )
                found.append(("cuBLAS TF32", "tf32", tf32))
            names = [rung for rung in ladder.RUNGS if (rung == "mma") == (dtype == "bfloat16")]
            found += [
                (rung, dtype, products.timed(rung, products.rung(rung), a, b, expected))
                for rung in names
            ]
            for name, roof, (device, host) in found:
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
                        "percent_of_cublas": 100 * blas[0] / device,
                        "percent_of_roof": gpu.percent(speed, roof),
                    }
                )
    return rows


def sweep_rows(gpu: Gpu, size=SWEEP_SIZE) -> list[dict]:
    """Return the two highest rungs with tiles from starved to full."""
    rows, products, (m, n, k) = [], Products(gpu), size
    for rung, sweep in SWEEPS.items():
        dtype = "float32" if rung == "warp" else "bfloat16"
        a, b, expected, blas = products.operands(m, n, k, dtype)
        for tiles in sweep:
            kernel = ladder.gemm(rung, "NN", dtype, None, tiles)
            device, _ = products.timed(
                f"{rung} {tiles}", products.rung(rung, tiles), a, b, expected
            )
            speed = 2 * m * n * k / device * 1e-12
            rows.append(
                {
                    "kernel": rung,
                    "tiles": " ".join(map(str, tiles)),
                    "threads": kernel.block[0],
                    "flop_per_byte": ladder.flop_per_byte(kernel, a.itemsize),
                    "tflop_per_s": speed,
                    "percent_of_cublas": 100 * blas[0] / device,
                    "percent_of_roof": gpu.percent(speed, dtype),
                }
            )
    return rows


def cut_to(largest: int, sizes) -> tuple:
    """Return the sizes of products with no side above `largest`, each once."""
    return tuple(dict.fromkeys(tuple(min(side, largest) for side in one) for one in sizes))


def run(args) -> int:
    """Measure and print the tables of args.tables, each written at once to the folder args.folder.

    Raises ValueError if a result is wrong, EnvironmentProblem without a usable GPU, OutputError.
    """
    gpu = Gpu(args.repeats)
    if args.folder:
        results.check_writable(str(Path(args.folder) / "gpu_products.json"))
    sizes = {"tokens": args.rows, "width": args.width, "seq_len": args.seq_len, "heads": args.heads}
    products, (sweep,) = (cut_to(args.largest, of) for of in (SIZES, (SWEEP_SIZE,)))
    tables = {
        "attention": (partial(attention_rows, args=args), {}),
        "memory": (partial(gpu_memory.memory_rows, args=args), sizes),
        "products": (partial(product_rows, sizes=products), {}),
        "tiles": (partial(sweep_rows, size=sweep), {}),
    }
    for name in args.tables:
        measure, facts = tables[name]
        rows = measure(gpu)
        print(f"\n{name} on {gpu.name}\n\n{results.markdown_table(rows)}", flush=True)
        if args.folder:
            results.write(
                str(Path(args.folder) / f"gpu_{name}.json"),
                "bench.tiles",
                rows,
                **gpu.facts(),
                **facts,
            )
    return 0


HEAD_WIDTH = 64  # GPT-2's, in all its sizes; above MOST_WIDTH there are no tiles


def parts(packed):
    """Return the views (B, T, H, d) of a packed (B, T, 3, H, d) array."""
    return tuple(packed[:, :, i] for i in range(3))


def backward(ops, dy, qkv, saved, positions):
    """Return dqkv (B, T, 3, H, d) of attention, packed as the layer packs it."""
    dqkv = ops.empty(qkv.shape, qkv.dtype)
    ops.attention_backward_input(dy, *parts(qkv), saved, positions, positions, out=parts(dqkv))
    return dqkv


def ways() -> dict[str, FusedOps]:
    """Return {name: operations}."""
    whole = FusedOps()
    whole.tiled_head_width = 0
    return {"whole scores": whole, "tiles": FusedOps()}


def attention_rows(gpu: Gpu, args) -> list[dict]:
    """Return each way forward and backward in float32 and bfloat16, a row each.

    FLOPs count the visible half of two products forward and four backward, but not what tiles
    recompute. kept_MB: arrays that the forward pass leaves for the backward pass, besides qkv.
    """
    batch, width = max(1, args.rows // args.seq_len), HEAD_WIDTH
    shape = (batch, args.seq_len, args.heads, width)
    flops = 2 * batch * args.heads * args.seq_len**2 * width
    plain, positions = ArrayOps(gpu.xp, "float64", "cuda"), gpu.xp.arange(args.seq_len)
    found = []
    for dtype in ("float32", "bfloat16"):
        dy = gpu.random(*shape, dtype=dtype)
        qkv = gpu.random(batch, args.seq_len, 3, args.heads, width, dtype=dtype)
        wide_qkv, wide_dy = qkv.astype(np.float64), dy.astype(np.float64)
        y, probs = plain.attention_forward(*parts(wide_qkv), positions, positions)
        dqkv = backward(plain, wide_dy, wide_qkv, probs, positions)
        whole_seconds = {}
        for name, ops in ways().items():
            forward = partial(ops.attention_forward, *parts(qkv), positions, positions)
            got, saved = forward()
            again = partial(backward, ops, dy, qkv, saved, positions)
            passes = {
                "forward": (got, y, flops, forward),
                "backward": (again(), dqkv, 2 * flops, again),
            }
            kept = saved if isinstance(saved, tuple) else (saved,)
            for part, (result, expected, count, call) in passes.items():
                gpu.check(f"attention {part}, {name}", result, expected, dtype)
                device, host = gpu.timed(call)
                speed = count / device * 1e-12
                found.append(
                    {
                        "kernel": name,
                        "pass": part,
                        "dtype": dtype,
                        "B": batch,
                        "T": args.seq_len,
                        "H": args.heads,
                        "d": width,
                        "device_us": device * 1e6,
                        "host_us": host * 1e6,
                        "tflop_per_s": speed,
                        "times_whole_scores": whole_seconds.setdefault(part, device) / device,
                        "percent_of_roof": gpu.percent(speed, dtype),
                        "kept_MB": sum(x.nbytes for x in kept) * 1e-6,
                    }
                )
    return found
