"""Causal attention on one GPU, forward and backward, beside PyTorch's own where it is installed.

    python -m bench.kernels.attention [--tokens 16384] [--json FILE]

Both sides get the same random numbers in bfloat16, and must agree to TOLERANCE before they are
timed, by events on the same stream. tflop_per_s: the visible half of two products forward and four
backward, without what is computed again. over_torch: the time over PyTorch's
scaled_dot_product_attention, which chooses cuDNN's or FlashAttention's kernels by itself.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.kernels.gpu import Gpu
from bench.program import Outcome, Program
from mpipar.ops import make

SHAPES = ((12, 64), (6, 128))  # heads, and the width of each
LENGTHS = (1024, 4096, 16384)
Calls = dict[str, Callable[[], Any]]


def parts(packed: Any) -> tuple:
    """Return the views (B, T, H, d) of a packed (B, T, 3, H, d) array."""
    return tuple(packed[:, :, i] for i in range(3))


def ours(gpu: Gpu, qkv: Any, dy: Any) -> tuple[Calls, list]:
    """Return the passes of mpipar's attention, and their results y and dqkv (B, T, 3, H, d)."""
    ops, places = make("cuda", "bfloat16"), gpu.xp.arange(qkv.shape[1])
    forward = partial(ops.attention_forward, *parts(qkv), places, places)
    y, saved = forward()
    dqkv = gpu.xp.empty_like(qkv)
    backward = partial(
        ops.attention_backward_input,
        dy,
        *parts(qkv),
        saved,
        places,
        places,
        out=parts(dqkv),
    )
    backward()
    return {"forward": forward, "backward": backward}, [y, dqkv]


def theirs(gpu: Gpu, qkv: Any, dy: Any) -> tuple[Calls, list]:
    """Return the same of PyTorch."""
    import torch

    def tensor(x: Any) -> Any:
        wide = torch.from_dlpack(x.astype(np.float32))
        return wide.to(torch.bfloat16)

    q, k, v = (tensor(x).transpose(1, 2).detach().requires_grad_() for x in parts(qkv))
    grad = tensor(dy).transpose(1, 2)

    def forward() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    y = forward()
    backward = partial(torch.autograd.grad, y, (q, k, v), grad, retain_graph=True)
    found = [y.detach().transpose(1, 2), torch.stack([x.transpose(1, 2) for x in backward()], 2)]
    return {"forward": forward, "backward": backward}, [
        gpu.xp.from_dlpack(x.float().contiguous()) for x in found
    ]


def measure(args: Any, session: Any) -> Outcome:
    """Measure all. Raises WrongResultError if both sides differ."""
    gpu, rows = Gpu(args.repeats), []
    beside = importlib.util.find_spec("torch") is not None
    for heads, width in SHAPES:
        for length in sorted({min(length, args.tokens) for length in LENGTHS}):
            batch = args.tokens // length
            qkv = gpu.random(batch, length, 3, heads, width, dtype="bfloat16")
            dy = gpu.random(batch, length, heads, width, dtype="bfloat16")
            own, results = ours(gpu, qkv, dy)
            other, expected = theirs(gpu, qkv, dy) if beside else ({}, [])
            for got, wanted in zip(results, expected, strict=False):
                gpu.check(f"attention, d {width}, T {length}", got, wanted, "bfloat16")
            for number, name in enumerate(own, 1):
                device, host = gpu.timed(own[name])
                torch_s = gpu.timed(other[name])[0] if beside else None
                speed = number * 2 * batch * heads * length**2 * width / device * 1e-12
                rows.append(
                    {
                        "pass": name,
                        "B": batch,
                        "T": length,
                        "H": heads,
                        "d": width,
                        "device_us": device * 1e6,
                        "host_us": host * 1e6,
                        "tflop_per_s": speed,
                        "percent_of_roof": gpu.percent(speed, "bfloat16"),
                        "torch_us": torch_s * 1e6 if torch_s else "-",
                        "over_torch": device / torch_s if torch_s else "-",
                    }
                )
    return Outcome(rows, gpu.facts())


main = Program(
    "kernels.attention",
    __doc__,
    measure,
    counts={
        "--tokens": (LENGTHS[-1], "of all rows together; longer rows are cut to it"),
        "--repeats": (20, "timed calls"),
    },
).started(__name__)
