"""Calls every array function once on odd, unequal sizes, with any implementation."""

from collections import namedtuple
from itertools import pairwise

import numpy as np

from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.arrays import AdamWStep

Sizes = namedtuple("Sizes", "batch tokens width inner heads head rows")
SMALL = Sizes(batch=2, tokens=5, width=7, inner=9, heads=3, head=2, rows=11)
# Sizes of more than one tile: of queries, of rows, and of rows of a weight gradient.
LARGE = Sizes(batch=2, tokens=131, width=193, inner=301, heads=3, head=5, rows=307)
HALF_UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # largest relative error of one rounding
# These read rounded results of other functions: they have errors of two or three roundings.
FURTHER = {
    "attention_backward_input": 4,
    "matmul_bias": 2,  # a product, and a sum where no epilogue makes it
}
# Of the fused kernels: float32 results come from rounded operands, too.
OPERANDS = {
    "attention_forward y": 2,
    "attention_block_forward y": 1,
    "attention_merge y": 1,
    "attention_delta": 1,
    "attention_block_backward dq": 2,
    "attention_block_backward dk": 2,
    "attention_block_backward dv": 1,
}
ADAMW = AdamWStep(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)


def plain(dtype="float64"):
    """The readable implementation on NumPy: the oracle."""
    return ArrayOps(np, dtype, "cpu")


def parts(packed):
    """The views q, k, v (B, T, H, d) of a packed (B, T, 3, H, d) array."""
    return tuple(packed[:, :, i] for i in range(3))


def positions_of(kind, tokens, rng):
    """Global positions of the tokens of one rank; zigzag: two parts of a longer sequence."""
    if kind == "shuffled":
        return rng.permutation(tokens)
    if kind == "ties":
        return np.sort(rng.integers(0, max(2, tokens // 2), tokens))
    increasing = np.arange(tokens) * 2 + 3
    if kind == "zigzag":
        return np.concatenate([increasing[tokens // 3 :] + 900, increasing[: tokens // 3]])
    return increasing


class Inputs:
    """Makes arrays of one implementation from random host arrays of its types.

    rounded: weights and activations are numbers of this type, if it is not that of the ops.
    """

    def __init__(self, ops, seed, rounded=None):
        self.ops, self.rounded = ops, rounded or ops.dtype
        self.rng = np.random.default_rng(seed)

    def real(self, *shape):
        """Weights or activations."""
        host = self.rng.standard_normal(shape).astype(self.rounded)
        return self.ops.asarray(host.astype(self.ops.dtype))

    def sums(self, *shape):
        """Gradients of weights, or what the optimizer keeps."""
        return self.ops.asarray(self.rng.standard_normal(shape).astype(self.ops.accum_dtype))

    def positive(self, *shape):
        return self.ops.asarray(self.rng.uniform(0.5, 2.0, shape).astype(self.ops.accum_dtype))

    def ids(self, high, *shape):
        return self.ops.asarray(self.rng.integers(0, high, shape))


def call_every_op(ops, sizes=SMALL, kind="increasing", seed=5, rounded=None, only=None):
    """Return name -> result of every array function (in-place ones: what they changed).

    only: those of one of the functions below.
    """
    make, found = Inputs(ops, seed, rounded), {}
    for part in PARTS if only is None else [only]:
        found |= part(ops, make, sizes, kind) if part is attention else part(ops, make, sizes)
    return found


def relative(got, expected):
    """Norm of the error relative to the norm of the expected result; NaN counts as infinite."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    infinite = np.isinf(expected) & (got == expected)
    got, expected = (np.where(infinite, 0, x) for x in (got, expected))
    error = np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30)
    return np.inf if np.isnan(error) else error


def check_every_op(ops, sizes, close, further=(), **options):
    """Compare with float64 on the same numbers, within the roundings of each function.

    close(result, expected, tolerance beside the roundings, name) raises an error. further: name ->
    roundings of functions that have more than FURTHER says, or any in float32.
    """
    expected = call_every_op(plain("float64"), sizes, rounded=ops.dtype, **options)
    for name, value in call_every_op(ops, sizes, **options).items():
        is_narrow = getattr(value, "dtype", None) == ops.dtype
        roundings = (FURTHER | dict(further)).get(name, 1 if is_narrow else 0)
        unit = HALF_UNIT.get(ops.dtype.name, 0)
        on_host = value if isinstance(value, float) else ops.to_host(value).astype(np.float64)
        close(on_host, expected[name], roundings * unit, name)


def basics(ops, make, sizes):
    x, y = make.real(sizes.batch, sizes.width), make.real(sizes.batch, sizes.width)
    grad, larger = make.sums(sizes.batch, sizes.width), make.real(3, *x.shape)
    copied, filled = ops.zeros(larger.shape), ops.empty((sizes.inner,), label="buffers")
    out = {"sum": ops.sum(grad), "square_sum": ops.square_sum(grad)}
    ops.copy(copied, larger)
    ops.fill(filled, 2.5)
    ops.synchronize()
    out |= {"copy": copied, "fill": filled, "accumulate": ops.accumulate(x, y)}
    out["scale"] = ops.scale(grad, 0.3)
    return out | {"add_parts": ops.add_parts(larger)}


def products(ops, make, sizes):
    x = make.real(sizes.batch, sizes.tokens, sizes.width)
    dy = make.real(sizes.batch, sizes.tokens, sizes.inner)
    w, dw = make.real(sizes.width, sizes.inner), make.sums(sizes.width, sizes.inner)
    table, dtable = make.real(sizes.inner, sizes.width), make.sums(sizes.inner, sizes.width)
    b, db = make.real(sizes.inner), make.sums(sizes.inner)
    out = {
        "matmul": ops.matmul(x, w),
        "matmul_tied": ops.matmul(x, table.T),
        "matmul_nt": ops.matmul_nt(dy, w),
        "matmul_nt_tied": ops.matmul_nt(dy, table.T),
        "gelu_forward": ops.gelu_forward(x),
        "gelu_backward_input": ops.gelu_backward_input(make.real(*x.shape), x),
        "matmul_bias": ops.matmul_bias(x, w, b),
        "matmul_bias none": ops.matmul_bias(x, w, None),
    }
    weights, sums = make.sums(sizes.width, sizes.inner), make.sums(sizes.inner)
    ops.matmul_tn_add_sums(x, dy, weights, sums)
    out |= {"matmul_tn_add_sums out": weights, "matmul_tn_add_sums": sums}
    weights = make.sums(sizes.width, sizes.inner)
    ops.matmul_tn_add_sums(x, dy, weights, None)
    out["matmul_tn_add_sums none"] = weights
    ops.matmul_tn_add(x, dy, dw)
    ops.matmul_tn_add(x, dy, dtable.T)
    ops.bias_backward_weight(dy, db)
    out |= {"matmul_tn_add": dw, "matmul_tn_add_tied": dtable}
    return out | {"bias_backward_weight": db, "bias_forward": ops.bias_forward(dy, b)}


def norm(ops, make, sizes):
    x = make.real(sizes.batch, sizes.tokens, sizes.width)
    dy, dw, db = make.real(*x.shape), make.sums(sizes.width), make.sums(sizes.width)
    w, b = make.real(sizes.width), make.real(sizes.width)
    y, mean, rstd = ops.layernorm_forward(x, w, b, 1e-5)
    dx = ops.layernorm_backward_input(dy, x, w, mean, rstd)
    ops.layernorm_backward_weight(dy, x, mean, rstd, dw, db)
    rms_y, rms_rstd = ops.rmsnorm_forward(x, w, 1e-5)
    rms_dx, rms_dw = ops.rmsnorm_backward_input(dy, x, w, rms_rstd), make.sums(sizes.width)
    around = make.real(*x.shape)
    ops.rmsnorm_backward_weight(dy, x, rms_rstd, rms_dw)
    return {
        "rmsnorm_forward": rms_y,
        "rmsnorm_forward rstd": rms_rstd,
        "rmsnorm_backward_input": rms_dx,
        "rmsnorm_backward_input around": ops.rmsnorm_backward_input(dy, x, w, rms_rstd, around),
        "rmsnorm_backward_weight": rms_dw,
        "layernorm_forward": y,
        "layernorm_forward mean": mean,
        "layernorm_forward rstd": rstd,
        "layernorm_backward_input": dx,
        "layernorm_backward_input around": ops.layernorm_backward_input(
            dy, x, w, mean, rstd, around
        ),
        "layernorm_backward_weight dw": dw,
        "layernorm_backward_weight db": db,
    }


def attention(ops, make, sizes, kind):
    """Both forms of attention over one sequence; every token sees itself, as in training."""
    qkv = make.real(sizes.batch, sizes.tokens, 3, sizes.heads, sizes.head)
    q, k, v = parts(qkv)
    positions = ops.asarray(positions_of(kind, sizes.tokens, make.rng))
    y, saved = ops.attention_forward(q, k, v, positions, positions)
    dy, dqkv = make.real(*y.shape), ops.empty(qkv.shape, qkv.dtype)
    ops.attention_backward_input(dy, q, k, v, saved, positions, positions, out=parts(dqkv))
    kept = {} if isinstance(saved, tuple) else {"attention_forward probs": saved}
    return (
        {"attention_forward y": y, "attention_backward_input": dqkv}
        | kept
        | attention_in_blocks(ops, make, sizes)
    )


def attention_in_blocks(ops, make, sizes):
    """Attention with two query heads per key head, fewer queries than keys; query 0 sees none."""
    batch, keys, kv_heads, width = sizes.batch, sizes.tokens, sizes.heads, sizes.head
    queries = keys - 2
    q, dy = (make.real(batch, queries, 2 * kv_heads, width) for _ in range(2))
    k, v = (make.real(batch, keys, kv_heads, width) for _ in range(2))
    q_pos, k_pos = (ops.asarray(x) for x in (np.arange(queries) * 2 - 1, np.arange(keys)))
    y, stats = ops.attention_block_forward(q, k, v, q_pos, k_pos)
    delta = ops.attention_delta(dy, y)
    grads = ops.attention_block_backward(dy, q, k, v, stats, delta, q_pos=q_pos, k_pos=k_pos)
    merged, seen = make.sums(*y.shape), make.positive(*stats.shape)
    ops.attention_merge(merged, seen, y, stats)
    return {
        "attention_block_forward y": y,
        "attention_block_forward stats seen": stats[:, :, 1:],
        "attention_delta": delta,
        "attention_block_backward dq": grads[0],
        "attention_block_backward dk": grads[1],
        "attention_block_backward dv": grads[2],
        "attention_merge y": merged,
        "attention_merge stats": seen,
    }


def embeddings(ops, make, sizes):
    ids = make.ids(3 * sizes.rows, sizes.batch, sizes.tokens)  # some belong to other shards
    table, dtable = make.real(sizes.rows, sizes.width), make.sums(sizes.rows, sizes.width)
    places, dplaces = make.real(sizes.tokens, sizes.width), make.sums(sizes.tokens, sizes.width)
    positions = ops.asarray(make.rng.permutation(sizes.tokens))
    y = ops.embedding_forward(ids, table, sizes.rows)
    dy = make.real(*y.shape)
    ops.embedding_backward_weight(ids, dy, dtable, sizes.rows)
    ops.position_backward_weight(positions, dy, dplaces)
    return {
        "embedding_forward": y,
        "embedding_backward_weight": dtable,
        "position_forward": ops.position_forward(y, positions, places),
        "position_backward_weight": dplaces,
        "position_forward by row": ops.position_forward(
            y, make.ids(sizes.tokens, sizes.batch, sizes.tokens), places
        ),
    }


def loss(ops, make, sizes):
    count, start = sizes.batch * sizes.tokens, sizes.rows
    num_valid = start + sizes.rows - 2  # the last two columns are padding
    logits = make.real(count, sizes.rows)
    targets = make.ids(num_valid, count)
    best = ops.top_forward(logits, start, num_valid, 1)
    several = ops.top_forward(logits, start, num_valid, 3)
    stats = ops.cross_entropy_forward(logits, targets, start, num_valid)
    loss, sums = ops.cross_entropy_combine(stats.reshape(1, *stats.shape))
    dlogits = ops.cross_entropy_backward_input(logits, targets, sums, start, num_valid, 0.2)
    return {
        "top_forward": best,
        "top_forward several": several,
        "cross_entropy_forward": stats,
        "cross_entropy_combine loss": loss,
        "cross_entropy_combine sums": sums,
        "cross_entropy_backward_input": dlogits,
    }


def updates(ops, make, sizes):
    size = sizes.width * sizes.inner
    data, grad, m, v = make.sums(size), make.sums(size), make.sums(size), make.positive(size)
    plain_data, signed = make.sums(size), make.sums(size)
    ops.sgd_step(plain_data, grad, 0.1)
    ops.sign_step(signed, grad, 0.1)
    ops.adamw_step(data, grad, m, v, ADAMW)
    state = make.sums(size), make.sums(size), make.sums(size), make.positive(size)
    ops.adamw_runs(*state, runs_of(size), ADAMW)
    return {
        "sgd_step": plain_data,
        "sign_step": signed,
        "adamw data": data,
        "adamw m": m,
        "adamw v": v,
        **{f"adamw of runs {name}": x for name, x in zip("d-mv", state, strict=True)},
    }


def runs_of(size):
    """Long and short runs of a flat buffer as AdamW takes them, by turns with and without decay."""
    edges = [0, size // 2, size // 2 + 1, size - size // 5, size]
    return [(number % 2 == 0, slice(*pair)) for number, pair in enumerate(pairwise(edges))]


def llama(ops, make, sizes):
    """SwiGLU, and rotations of the first heads of an array, whose last head stays as it is."""
    h = make.real(sizes.batch, sizes.tokens, 2, sizes.inner)
    dh, again = ops.swiglu_backward_input(make.real(*h.shape[:2], sizes.inner), h)
    out = {
        "swiglu_forward": ops.swiglu_forward(h),
        "swiglu_backward_input dh": dh,
        "swiglu_backward_input y": again,
    }
    half = sizes.head
    table = make.sums(3 * sizes.tokens, 2, half)
    each, alike = (
        make.ids(3 * sizes.tokens, *shape)
        for shape in ((sizes.batch, sizes.tokens), (sizes.tokens,))
    )
    for positions, name in ((alike, ""), (each, " by row")):
        for function in ("rope_forward", "rope_backward_input"):
            x = make.real(sizes.batch, sizes.tokens, sizes.heads + 1, 2 * half)
            getattr(ops, function)(x[:, :, : sizes.heads], positions, table)
            out[function + name] = x
    return out


def experts(ops, make, sizes):
    """Five experts, one of which gets no row; many logits are equal."""
    tokens, rows, chosen = sizes.tokens, 3 * sizes.tokens, 3
    counts = [tokens, 0, 1, rows - tokens - 2, 1]
    x, w = make.real(rows, sizes.width), make.real(5, sizes.width, sizes.inner)
    dy, dw = make.real(rows, sizes.inner), make.sums(*w.shape)
    ops.grouped_matmul_tn_add(x, dy, dw, counts)
    logits = ops.asarray(make.rng.integers(-2, 3, (tokens, 5)).astype(ops.accum_dtype))
    ids, probs = ops.choice_forward(logits, chosen)
    biased, _ = ops.choice_forward(logits, chosen, make.sums(5))
    loads = ops.expert_loads(ids.reshape(1, -1), 5)
    order, of_tokens, places = ops.expert_order(ids)
    router, drouter, dlogits = (
        make.real(5, sizes.width),
        make.sums(5, sizes.width),
        make.sums(tokens, 5),
    )
    whole = make.real(tokens, sizes.width)
    ops.router_backward_weight(dlogits, whole, drouter)
    balanced, excess = make.sums(1, tokens, 5), make.sums(5)
    ops.balance_backward_input(balanced, logits.reshape(1, tokens, 5), loads, 0.3)
    ops.add_excess(loads, excess)
    each = make.real(tokens, chosen, sizes.width)
    by_expert, by_rank = ops.block_order([[2, 0, 3], [1, 4, 0]])
    none = make.real(0, 2, sizes.inner)
    return {
        "grouped_matmul": ops.grouped_matmul(x, w, counts),
        "grouped_matmul_nt": ops.grouped_matmul_nt(dy, w, counts),
        "grouped_matmul_tn_add": dw,
        "router_forward": ops.router_forward(whole, router),
        "router_backward_input": ops.router_backward_input(dlogits, router),
        "router_backward_weight": drouter,
        "choice_forward ids": ids,
        "choice_forward probs": probs,
        "choice_forward biased ids": biased,
        "choice_backward_input": ops.choice_backward_input(make.sums(*ids.shape), probs, ids, 5),
        "expert_loads": loads,
        "expert_order": order,
        "expert_order tokens": of_tokens,
        "expert_order places": places,
        "combine_rows": ops.combine_rows(each),
        "combine_rows probs": ops.combine_rows(each, probs),
        "balance_backward_input": balanced,
        "add_excess": excess,
        "block_order": by_expert,
        "block_order undone": by_rank,
        "row_dots": ops.row_dots(x, make.real(*x.shape)),
        "scale_rows": ops.scale_rows(make.real(*x.shape), make.sums(rows)),
        # A rank may get no row at all.
        "grouped_matmul of none": ops.grouped_matmul_nt(none[:, 0], w, [0] * 5),
        "swiglu_forward of none": ops.swiglu_forward(none),
        "swiglu_backward_input of none": ops.swiglu_backward_input(none[:, 0], none)[0],
        "gelu_forward of none": ops.gelu_forward(none),
        "gelu_backward_input of none": ops.gelu_backward_input(none, none),
        "row_dots of none": ops.row_dots(none, none),
        "scale_rows of none": ops.scale_rows(none, make.sums(0, 2)),
        "embedding_forward of none": ops.embedding_forward(make.ids(3, 0), whole, 0),
        "combine_rows of none": ops.combine_rows(none),
    }


PARTS = (basics, products, norm, attention, embeddings, loss, updates, llama, experts)


def numeric_gradient(function, x, step=3e-5):
    """Central differences of a scalar function by every element of x, which it reads in place."""
    gradient = np.empty_like(x)
    for place in np.ndindex(x.shape):
        kept = x[place]
        x[place] = kept + step
        above = function()
        x[place] = kept - step
        below = function()
        x[place] = kept
        gradient[place] = (above - below) / (2 * step)
    return gradient
