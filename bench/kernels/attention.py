"""Causal attention on one GPU, forward and backward.

    python -m bench.kernels.attention [--tokens 16384] [--json FILE]

tflop_per_s: the visible half of two products forward and four backward, without what is computed
again. bench.kernels.check compares the results with float64, and `python -m bench.step --device
cuda` compares whole steps with PyTorch and its own attention.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.kernels.gpu import Gpu
from bench.program import Outcome, Program
from mpipar.ops import make

SHAPES = ((12, 64), (6, 128))  # heads, and the width of each
LENGTHS = (1024, 4096, 16384)


def parts(packed: Any) -> tuple:
    """Return the views (B, T, H, d) of a packed (B, T, 3, H, d) array."""
    return tuple(packed[:, :, i] for i in range(3))


def passes(gpu: Gpu, qkv: Any, dy: Any) -> dict[str, partial]:
    """Return {pass: call} of attention."""
    ops, places = make("cuda", "bfloat16"), gpu.xp.arange(qkv.shape[1])
    forward = partial(ops.attention_forward, *parts(qkv), places, places)
    _, saved = forward()
    out = parts(gpu.xp.empty_like(qkv))
    given = (dy, *parts(qkv), saved, places, places)
    return {
        "forward": forward,
        "backward": partial(ops.attention_backward_input, *given, out=out),
    }


def measure(args: Any, session: Any) -> Outcome:
    """Measure all."""
    gpu, rows = Gpu(args.repeats), []
    for heads, width in SHAPES:
        for length in sorted({min(length, args.tokens) for length in LENGTHS}):
            batch = args.tokens // length
            qkv = gpu.random(batch, length, 3, heads, width, dtype="bfloat16")
            dy = gpu.random(batch, length, heads, width, dtype="bfloat16")
            for number, (name, call) in enumerate(passes(gpu, qkv, dy).items(), 1):
                device, host = gpu.timed(call)
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
