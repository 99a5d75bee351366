"""Part of bench.tiles: the kernels between the products, beside a copy on the same device.

The results of each are compared with the plain formulas in float64 before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from bench.kernels.gpu import Gpu
from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.cuda.fused import Fused
from mpipar.ops.llama_ops import rope_table

EPS = 1e-5
VOCABULARY = 50304
UNITS = 12  # whose weights AdamW updates in one launch
HALF = 32  # points of a head that are turned
ADAMW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}


@dataclass(frozen=True)
class Kernel:
    """A kernel and its plain formulas: functions of arrays that return arrays.

    bytes: every large array that has to be read or written, once. Of causal scores only the visible
    half is read.
    """

    call: Callable
    plain: Callable
    arrays: tuple
    bytes: float


def returned(function, *numbers):
    """Fix the numbers that follow the arrays; the new function returns its results as a tuple."""
    def call(*arrays):
        result = function(*arrays, *numbers)
        return result if isinstance(result, tuple) else (result,)
    return call


def changed(function, *which, numbers=()):
    """Fix the numbers that follow the arrays; the new function returns the arrays it changes."""
    def call(*arrays):
        function(*arrays, *numbers)
        return tuple(arrays[i] for i in which)
    return call


def of_name(name: str, fused, plain, arrays, size: float, *, which=(), numbers=()) -> dict:
    """{name: the kernel that both sides call so}. which: arrays it changes, if it returns none."""
    def fixed(function):
        return changed(function, *which, numbers=numbers) if which else returned(
            function, *numbers)

    return {name: Kernel(fixed(getattr(fused, name)), fixed(getattr(plain, name)), arrays, size)}


def chains(gpu: Gpu, fused, plain, rows, width, dtype) -> dict[str, Kernel]:
    """GELU, LayerNorm, RMSNorm and sums over rows: kernels over (rows, width)."""
    x, dy = (gpu.random(rows, width, dtype=dtype) for _ in range(2))
    w, b = (gpu.random(width, dtype=dtype) for _ in range(2))
    dw, db = gpu.random(width), gpu.random(width)
    _, mean, rstd = fused.layernorm_forward(x, w, b, EPS)
    root = fused.rmsnorm_forward(x, w, EPS)[1]
    one, both = x.nbytes, partial(of_name, fused=fused, plain=plain)
    return {
        **both("gelu_forward", arrays=(x,), size=2 * one),
        "bias_gelu_forward": Kernel(
            returned(fused.bias_gelu_forward),
            lambda x, b: (plain.gelu_forward(x + b),), (x.copy(), b), 3 * one),  # it changes x
        **both("gelu_backward_input", arrays=(dy, x), size=3 * one),
        "column_sums": Kernel(
            changed(fused.column_sums, 1), changed(plain.bias_backward_weight, 1), (dy, db), one),
        **both("layernorm_forward", arrays=(x, w, b), size=2 * one, numbers=(EPS,)),
        **both("layernorm_backward_input", arrays=(dy, x, w, mean, rstd), size=3 * one),
        **both("layernorm_backward_weight", arrays=(dy, x, mean, rstd, dw, db), size=2 * one,
               which=(4, 5)),
        **both("rmsnorm_forward", arrays=(x, w), size=2 * one, numbers=(EPS,)),
        **both("rmsnorm_backward_input", arrays=(dy, x, w, root), size=3 * one),
        **both("rmsnorm_backward_weight", arrays=(dy, x, root, dw), size=2 * one, which=(3,)),
    }


def llama(gpu: Gpu, fused, plain, args, dtype) -> dict[str, Kernel]:
    """SwiGLU over (rows, 2, width), and the rotation of heads of whole sequences."""
    h = gpu.random(args.rows, 2, args.width, dtype=dtype)
    dy = gpu.random(args.rows, args.width, dtype=dtype)
    batch, tokens = max(1, args.rows // args.seq_len), args.seq_len
    x = gpu.random(batch, tokens, args.heads, 2 * HALF, dtype=dtype)
    positions = gpu.xp.arange(tokens)
    table = gpu.xp.asarray(rope_table(tokens, 2 * HALF, 1e4, ()).astype(np.float32))
    both = partial(of_name, fused=fused, plain=plain)
    return {
        **both("swiglu_forward", arrays=(h,), size=1.5 * h.nbytes),
        **both("swiglu_backward_input", arrays=(dy, h), size=3 * h.nbytes),
        **both("rope_forward", arrays=(x.copy(), positions, table), size=2 * x.nbytes, which=(0,)),
        **both("rope_backward_input", arrays=(x.copy(), positions, table), size=2 * x.nbytes,
               which=(0,)),
    }


def softmaxes(gpu: Gpu, fused, plain, args, dtype) -> dict[str, Kernel]:
    """The loss over a quarter of the rows, and attention's softmax over whole sequences."""
    count = max(1, args.rows // 4)
    logits = gpu.random(count, VOCABULARY, dtype=dtype)
    targets = gpu.xp.asarray(gpu.rng.integers(0, VOCABULARY, count))
    lse = gpu.xp.asarray(gpu.rng.uniform(11.0, 12.0, count).astype(np.float32))
    shape = (max(1, args.rows // args.seq_len), args.heads, args.seq_len, args.seq_len)
    scores, dprobs = (gpu.random(*shape, dtype=dtype) for _ in range(2))
    positions, factor = gpu.xp.arange(args.seq_len), 0.125

    def causal_forward(scores, q_pos, k_pos):
        visible = k_pos[None, :] <= q_pos[:, None]
        powers = gpu.xp.exp(gpu.xp.where(visible, factor * scores, -np.inf))
        return (powers / powers.sum(axis=-1, keepdims=True),)

    def causal_backward(probs, dprobs):
        return (factor * probs * (dprobs - (probs * dprobs).sum(axis=-1, keepdims=True)),)

    probs = scores.copy()
    fused.causal_softmax_forward(probs, positions, positions, factor)
    return {
        "cross_entropy_stats": Kernel(
            lambda logits, targets: (
                fused.cross_entropy_stats(logits, VOCABULARY, targets, 0),),
            returned(plain.cross_entropy_forward, 0, VOCABULARY), (logits, targets),
            logits.nbytes),
        "cross_entropy_backward": Kernel(
            changed(lambda logits, targets, lse: fused.cross_entropy_backward(
                logits, VOCABULARY, targets, lse, 0, 1.0), 0),
            returned(plain.cross_entropy_backward_input, 0, VOCABULARY, 1.0),
            (logits, targets, lse), 2 * logits.nbytes),
        "causal_softmax_forward": Kernel(
            changed(fused.causal_softmax_forward, 0, numbers=(factor,)), causal_forward,
            (scores, positions, positions), 1.5 * scores.nbytes),
        "causal_softmax_backward": Kernel(
            changed(fused.causal_softmax_backward, 1, numbers=(factor,)), causal_backward,
            (probs, dprobs), 2 * scores.nbytes),
    }


def updates(gpu: Gpu, fused, plain, count, dtype) -> dict[str, Kernel]:
    """AdamW over flat buffers of units, of which ten parts of eleven decay; 16-bit parameters also
    need the copy.
    """
    edges = [count * (number // 2 * 11 + number % 2 * 10) // (11 * UNITS)
             for number in range(2 * UNITS + 1)]
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

    return {"adamw_runs": Kernel(changed(call, *written), changed(same, *written), arrays,
                                 (7 * 4 + (dtype != "float32") * 2) * count)}


def checked(gpu: Gpu, name: str, kernel: Kernel, dtype: str) -> None:
    """Raise ValueError where a kernel's results are not those of its plain formulas."""
    got = kernel.call(*(x.copy() for x in kernel.arrays))
    expected = kernel.plain(*(x.astype(np.int64 if x.dtype.kind == "i" else np.float64)
                              for x in kernel.arrays))
    for one, other in zip(got, expected, strict=True):
        gpu.check(name, one, other, dtype)


def rows(gpu: Gpu, args) -> list[dict]:
    """Every kernel in float32 and bfloat16, a row each."""
    fused, plain = Fused(gpu.xp, gpu.loader), ArrayOps(gpu.xp, "float64", "cuda")
    found = []
    for dtype in ("float32", "bfloat16"):
        for make in (partial(chains, gpu, fused, plain, args.rows, args.width),
                     partial(llama, gpu, fused, plain, args),
                     partial(softmaxes, gpu, fused, plain, args),
                     partial(updates, gpu, fused, plain, args.rows * args.width)):
            for name, kernel in make(dtype).items():
                checked(gpu, name, kernel, dtype)
                device, host = gpu.timed(partial(kernel.call, *kernel.arrays))
                speed = kernel.bytes / device * 1e-9
                found.append({
                    "kernel": name, "dtype": dtype, "MB": kernel.bytes * 1e-6,
                    "device_us": device * 1e6, "host_us": host * 1e6, "gb_per_s": speed,
                    "percent_of_copy": 100 * gpu.copy_seconds(int(kernel.bytes)) / device,
                    "percent_of_roof": gpu.percent(speed, "memory")})
    return found
