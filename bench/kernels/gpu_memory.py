"""Part of bench.tiles: the kernels between the products, compared with a copy on the same device.

The results of each are compared with the plain formulas in float64 before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from bench.kernels.gpu import Gpu
from mpipar.ops.array_ops import ArrayOps, rope_table
from mpipar.ops.cuda.fused import Fused

EPS = 1e-5
VOCABULARY = 50304
UNITS = 12  # whose weights AdamW updates in one launch
HALF = 32  # rotated points of a head
ADAMW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}


@dataclass(frozen=True)
class Kernel:
    """A kernel and its plain formulas, both called with the same arrays.

    bytes: every large array that has to be read or written, once. Only the visible half of causal
    scores is read. numbers: what follows the arrays in a call. changes: indices of the arrays that
    a call writes if it returns none. call, plain: what is called instead of the functions of this
    name.
    """

    name: str
    arrays: tuple
    bytes: float
    numbers: tuple = ()
    changes: tuple = ()
    call: Callable | None = None
    plain: Callable | None = None

    def run(self, function, arrays) -> tuple:
        """Return the results of a call with these arrays."""
        made = function(*arrays, *self.numbers)
        if made is None:
            return tuple(arrays[place] for place in self.changes)
        return made if isinstance(made, tuple) else (made,)


def chains(gpu: Gpu, fused, plain, rows, width, dtype) -> list[Kernel]:
    """Return GELU, LayerNorm, RMSNorm and sums over rows: kernels over (rows, width)."""
    x, dy, around = (gpu.random(rows, width, dtype=dtype) for _ in range(3))
    w, b = (gpu.random(width, dtype=dtype) for _ in range(2))
    dw, db = gpu.random(width), gpu.random(width)
    _, mean, rstd = fused.layernorm_forward(x, w, b, EPS)
    root, one = fused.rmsnorm_forward(x, w, EPS)[1], x.nbytes
    return [
        Kernel("gelu_forward", (x,), 2 * one),
        Kernel(
            "bias_gelu_forward",
            (x.copy(), b),
            3 * one,  # it changes x
            plain=lambda x, b: plain.gelu_forward(x + b),
        ),
        Kernel("bias_forward", (x.copy(), b, around), 3 * one),  # and that too
        Kernel("gelu_backward_input", (dy, x), 3 * one),
        Kernel("bias_backward_weight", (dy, db), one, changes=(1,)),
        Kernel("layernorm_forward", (x, w, b), 2 * one, (EPS,)),
        Kernel("layernorm_backward_input", (dy, x, w, mean, rstd), 3 * one),
        Kernel("layernorm_backward_input", (dy, x, w, mean, rstd, around), 4 * one),
        Kernel("layernorm_backward_weight", (dy, x, mean, rstd, dw, db), 2 * one, changes=(4, 5)),
        Kernel("rmsnorm_forward", (x, w), 2 * one, (EPS,)),
        Kernel("rmsnorm_backward_input", (dy, x, w, root), 3 * one),
        Kernel("rmsnorm_backward_input", (dy, x, w, root, around), 4 * one),
        Kernel("rmsnorm_backward_weight", (dy, x, root, dw), 2 * one, changes=(3,)),
    ]


def llama(gpu: Gpu, fused, plain, args, dtype) -> list[Kernel]:
    """Return SwiGLU over (rows, 2, width), and the rotation of heads of whole sequences."""
    h = gpu.random(args.rows, 2, args.width, dtype=dtype)
    dy = gpu.random(args.rows, args.width, dtype=dtype)
    batch, tokens = max(1, args.rows // args.seq_len), args.seq_len
    x = gpu.random(batch, tokens, args.heads, 2 * HALF, dtype=dtype)
    positions = gpu.xp.arange(tokens)
    table = gpu.xp.asarray(rope_table(tokens, 2 * HALF, 1e4, ()).astype(np.float32))
    return [
        Kernel("swiglu_forward", (h,), 1.5 * h.nbytes),
        Kernel("swiglu_backward_input", (dy, h), 3 * h.nbytes),
        *(
            Kernel(name, (x.copy(), positions, table), 2 * x.nbytes, changes=(0,))
            for name in ("rope_forward", "rope_backward_input")
        ),
    ]


def softmaxes(gpu: Gpu, fused, plain, args, dtype) -> list[Kernel]:
    """Return the loss over a quarter of the rows, and attention's softmax over whole sequences."""
    count = max(1, args.rows // 4)
    logits = gpu.random(count, VOCABULARY, dtype=dtype)
    targets = gpu.xp.asarray(gpu.rng.integers(0, VOCABULARY, count))
    sums = gpu.xp.asarray(gpu.rng.uniform(11.0, 12.0, (count, 2)).astype(np.float32))
    stats = fused.cross_entropy_forward(logits, targets, 0, VOCABULARY)[None]
    shape = (max(1, args.rows // args.seq_len), args.heads, args.seq_len, args.seq_len)
    scores, dprobs = (gpu.random(*shape, dtype=dtype) for _ in range(2))
    positions, factor = gpu.xp.arange(args.seq_len), 0.125

    def causal_forward(scores, q_pos, k_pos, factor):
        visible = k_pos[None, :] <= q_pos[:, None]
        powers = gpu.xp.exp(gpu.xp.where(visible, factor * scores, -np.inf))
        return powers / powers.sum(axis=-1, keepdims=True)

    def causal_backward(probs, dprobs, factor):
        return factor * probs * (dprobs - (probs * dprobs).sum(axis=-1, keepdims=True))

    probs = scores.copy()
    fused.causal_softmax_forward(probs, positions, positions, factor)
    return [
        Kernel("cross_entropy_forward", (logits, targets), logits.nbytes, (0, VOCABULARY)),
        Kernel(
            "cross_entropy_backward_input",
            (logits, targets, sums),
            2 * logits.nbytes,
            (0, VOCABULARY, 1.0),
        ),
        Kernel("cross_entropy_combine", (stats,), 2 * stats.nbytes),
        Kernel(
            "causal_softmax_forward",
            (scores, positions, positions),
            1.5 * scores.nbytes,
            (factor,),
            (0,),
            plain=causal_forward,
        ),
        Kernel(
            "causal_softmax_backward",
            (probs, dprobs),
            2 * scores.nbytes,
            (factor,),
            (1,),
            plain=causal_backward,
        ),
    ]


def updates(gpu: Gpu, fused, plain, count, dtype) -> list[Kernel]:
    """Return AdamW over flat buffers of units, of which ten parts of eleven decay.

    16-bit parameters also need the copy.
    """
    edges = [
        count * (number // 2 * 11 + number % 2 * 10) // (11 * UNITS)
        for number in range(2 * UNITS + 1)
    ]
    runs = [(number % 2 == 0, slice(*pair)) for number, pair in enumerate(pairwise(edges))]
    state = (*(gpu.random(count) for _ in range(3)), abs(gpu.random(count)))
    arrays = state if dtype == "float32" else (*state, gpu.random(count, dtype=dtype))
    written = (0, 2, 3) if dtype == "float32" else (0, 2, 3, 4)

    def call(data, grad, m, v, copy=None):
        fused.adamw_runs(data, grad, m, v, runs, **ADAMW, copy=copy)

    def same(data, grad, m, v, *copy):
        plain.adamw_runs(data, grad, m, v, runs, **ADAMW)
        for one in copy:
            one[...] = data

    return [
        Kernel(
            "adamw_runs",
            arrays,
            (7 * 4 + (dtype != "float32") * 2) * count,
            changes=written,
            call=call,
            plain=same,
        )
    ]


def checked(gpu: Gpu, kernel: Kernel, call, plain, dtype: str) -> None:
    """Raise ValueError if a kernel's results differ from those of its plain formulas."""
    got = kernel.run(call, [x.copy() for x in kernel.arrays])
    expected = kernel.run(
        plain, [x.astype(np.int64 if x.dtype.kind == "i" else np.float64) for x in kernel.arrays]
    )
    for one, other in zip(got, expected, strict=True):
        gpu.check(kernel.name, one, other, dtype)


def memory_rows(gpu: Gpu, args) -> list[dict]:
    """Return every kernel in float32 and bfloat16, a row each."""
    fused, plain = Fused(gpu.xp, gpu.loader), ArrayOps(gpu.xp, "float64", "cuda")
    found = []
    for dtype in ("float32", "bfloat16"):
        for make in (
            partial(chains, gpu, fused, plain, args.rows, args.width),
            partial(llama, gpu, fused, plain, args),
            partial(softmaxes, gpu, fused, plain, args),
            partial(updates, gpu, fused, plain, args.rows * args.width),
        ):
            for kernel in make(dtype):
                call = kernel.call or getattr(fused, kernel.name)
                checked(gpu, kernel, call, kernel.plain or getattr(plain, kernel.name), dtype)
                device, host = gpu.timed(partial(call, *kernel.arrays, *kernel.numbers))
                speed = kernel.bytes / device * 1e-9
                found.append(
                    {
                        "kernel": kernel.name,
                        "dtype": dtype,
                        "MB": kernel.bytes * 1e-6,
                        "device_us": device * 1e6,
                        "host_us": host * 1e6,
                        "gb_per_s": speed,
                        "percent_of_copy": 100 * gpu.copy_seconds(int(kernel.bytes)) / device,
                        "percent_of_roof": gpu.percent(speed, "memory"),
                    }
                )
    return found
