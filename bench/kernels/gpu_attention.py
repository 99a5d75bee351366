"""Part of bench.tiles: causal attention on one GPU, in tiles, and with whole scores and cuBLAS.

Each result is compared with the plain formulas in float64 before it is timed.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import numpy as np

from bench.kernels.gpu import Gpu
from mpipar.errors import EnvironmentProblem
from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.cupy_fused import FusedOps

HEAD_WIDTH = 64  # GPT-2's, in all its sizes; above MOST_WIDTH there are no tiles


def parts(packed):
    """The views (B, T, H, d) of a packed (B, T, 3, H, d) array."""
    return tuple(packed[:, :, i] for i in range(3))


def backward(ops, dy, qkv, saved, positions):
    """dqkv (B, T, 3, H, d) of attention, packed as the layer packs it."""
    dqkv = ops.empty(qkv.shape, qkv.dtype)
    ops.attention_backward_input(
        dy, *parts(qkv), saved, positions, positions, out=parts(dqkv))
    return dqkv


def ways() -> dict[str, FusedOps]:
    """Name -> operations; the tile model only where its package is installed."""
    whole = FusedOps()
    whole.tiled_head_width = 0
    found = {"whole scores": whole, "tiles": FusedOps()}
    with suppress(EnvironmentProblem):
        found["cuda-tile"] = FusedOps(gemm="cuda-tile")
    return found


def rows(gpu: Gpu, args) -> list[dict]:
    """Each way forward and backward in float32 and bfloat16, a row each.

    FLOPs count the visible half of two products forward and four backward, but not what tiles
    compute again. kept_MB: arrays that the forward pass leaves for the backward pass, beside qkv.
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
            passes = {"forward": (got, y, flops, forward),
                      "backward": (again(), dqkv, 2 * flops, again)}
            kept = saved if isinstance(saved, tuple) else (saved,)
            for part, (result, expected, count, call) in passes.items():
                gpu.check(f"attention {part}, {name}", result, expected, dtype)
                device, host = gpu.timed(call)
                speed = count / device * 1e-12
                found.append({
                    "kernel": name, "pass": part, "dtype": dtype, "B": batch, "T": args.seq_len,
                    "H": args.heads, "d": width, "device_us": device * 1e6, "host_us": host * 1e6,
                    "tflop_per_s": speed,
                    "times_whole_scores": whole_seconds.setdefault(part, device) / device,
                    "percent_of_roof": gpu.percent(speed, dtype),
                    "kept_MB": sum(x.nbytes for x in kept) * 1e-6})
    return found
