"""Hostile inputs of attention, both forms and merged parts: see numeric_cases.py.

A BLAS may add up the products of a score in any order, and two columns of one matrix in different
orders. Scores that must stay equal are made of numbers of so few bits that every order gives the
exact sum, in heads of 16 numbers, whose factor is 1/4.
"""

import numpy as np
from numeric_cases import WIDE, Case, Family, beside, float32, spread

# B, Tq, Tk, H, Hkv, d.
SIZES = {
    "": (2, 7, 9, 4, 2, 8),
    " one token": (2, 1, 1, 4, 2, 8),
    " one new token": (2, 1, 9, 4, 2, 8),
    " long": (1, 70, 130, 2, 2, 8),
}
FORMS = ("saved", "block", "parts")
NAMES = ("y", "dq", "dk", "dv")


def attention_cases(rng):
    return {
        name + kind: case for kind, sizes in SIZES.items() for name, case in _cases_of(rng, *sizes)
    }


def _cases_of(rng, batch, queries, keys, heads, kv_heads, width):
    """Yield (name, Case) of one size. Scores are numbers of float32, if differences of -1e38."""
    of_q, of_k = (batch, queries, heads, width), (batch, keys, kv_heads, width)
    order = {"q_pos": np.arange(keys - queries, keys), "k_pos": np.arange(keys)}
    shuffled = {"q_pos": rng.permutation(queries) + keys // 2, "k_pos": rng.permutation(keys)}

    def make(q, k, v=1.0, positions=order):
        q, k = (
            x if isinstance(x, np.ndarray) else spread(rng, *shape, magnitude=x)
            for x, shape in ((q, of_q), (k, of_k))
        )
        v = v if isinstance(v, np.ndarray) else spread(rng, *k.shape, magnitude=v)
        return Case(q=q, k=k, v=v, dy=spread(rng, *q.shape), **positions)

    wide_q, wide_ones = np.ones((*of_q[:3], 16)), np.ones((*of_k[:3], 16), np.float32)
    for q, k in (
        (1e-30, 1.0),
        (1.0, 1.0),
        (5.0, 5.0),
        (1e2, 1e2),
        (1e4, 1e4),
        (1e10, 1e10),
        (1e18, 1e18),
        (1e18, 1e-18),
    ):
        yield f"q {q:g} k {k:g}", make(q, k)
    for size in (1.0, 2.0**13, 2.0**58):
        q = size * rng.integers(-7, 8, wide_q.shape)
        key = size * rng.integers(-7, 8, (batch, 1, kv_heads, 16))
        yield f"equal scores {size:g}", make(float32(q), float32(key) * wide_ones)
    for low in (2.0**13, 2.0**60, 2.0**103, 2.0**123):
        for name, positions in (("", order), ("shuffled ", shuffled)):
            yield (
                f"{name}scores of {-low:g}",
                make(float32(low * wide_q), -wide_ones, positions=positions),
            )
    for size in (1e-30, 1e8, 1e18):
        yield f"values {size:g}", make(1.0, 1.0, size)
    for size in (1e4, 1e18):
        yield f"values beside {size:g}", make(1.0, 1.0, beside(rng, *of_k, offset=size))
    yield "shuffled", make(1.0, 1.0, positions=shuffled)


def attention_exact(case):
    q, k, v, dy = case.wide("q k v dy")
    group, factor = q.shape[2] // k.shape[2], WIDE(q.shape[3]) ** -0.5
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    visible = case.k_pos[None, :] <= case.q_pos[:, None]
    scores = factor * np.einsum("bihd,bjhd->bhij", q, k)
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    p = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = p.sum(-1, keepdims=True)
    p /= np.where(total == 0, 1, total)
    # Differences of scores are rounded, too. Scores that are equal have none.
    apart = 1 + np.max(
        np.subtract(top, scores, where=p > 0, out=np.zeros_like(p)), -1, keepdims=True
    )
    dp = np.einsum("bihd,bjhd->bhij", dy, v)
    mean = (p * dp).sum(-1, keepdims=True)
    ds = factor * p * (dp - mean)
    terms = factor * apart * p * np.einsum("bihd,bjhd->bhij", np.abs(dy), np.abs(v))

    def of_keys(left, right):
        whole = np.einsum("bhij,bihd->bjhd", left, right)
        return whole.reshape(*whole.shape[:2], -1, group, whole.shape[3]).sum(3)

    def of_queries(left, right):
        return np.einsum("bhij,bjhd->bihd", left, right)

    made = (
        (of_queries(p, v), of_queries(apart * p, np.abs(v))),
        (of_queries(ds, k), of_queries(terms, np.abs(k))),
        (of_keys(ds, q), of_keys(terms, np.abs(q))),
        (of_keys(p, dy), of_keys(apart * p, np.abs(dy))),
    )
    return {f"{form} {name}": x for form in FORMS for name, x in zip(NAMES, made, strict=True)}


def attention_ours(ops, case):
    q, k, v, dy, q_pos, k_pos = case.on(ops, "q k v dy q_pos k_pos")
    y, saved = ops.attention_forward(q, k, v, q_pos, k_pos)
    half = len(case.k_pos) // 2
    parts = [slice(half, None), slice(0, half)] if half else [slice(None)]
    results = {
        "saved": (y, *ops.attention_backward_input(dy, q, k, v, saved, q_pos, k_pos)),
        "block": _in_parts(ops, (q, k, v), dy, (q_pos, k_pos), [slice(None)]),
        "parts": _in_parts(ops, (q, k, v), dy, (q_pos, k_pos), parts),
    }
    return {
        f"{form} {name}": x
        for form, made in results.items()
        for name, x in zip(NAMES, made, strict=True)
    }


def _in_parts(ops, qkv, dy, positions, parts):
    """(y, dq, dk, dv) of the block form; a ring visits the parts in an order of its own."""
    (q, k, v), (q_pos, k_pos) = qkv, positions
    (y, stats), *others = [
        ops.attention_block_forward(q, k[:, part], v[:, part], q_pos, k_pos[part]) for part in parts
    ]
    for other in others:
        ops.attention_merge(y, stats, *other)
    delta = ops.attention_delta(dy, y)
    dq, dk, dv = (ops.zeros(x.shape, ops.accum_dtype) for x in qkv)
    for part in parts:
        own_dq, *own = ops.attention_block_backward(
            dy, q, k[:, part], v[:, part], stats, delta, q_pos=q_pos, k_pos=k_pos[part]
        )
        ops.accumulate(dq, own_dq)
        for whole, one in zip((dk, dv), own, strict=True):
            ops.copy(whole[:, part], one)
    return y, dq, dk, dv


def attention_theirs(torch, case):
    """Beside the form that keeps probabilities their plain formula, beside blocks their flash."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    leaves = case.leaves(torch, "q k v")
    q, k, v = (x.transpose(1, 2) for x in leaves)
    (dy,), group = case.leaves(torch, "dy"), q.shape[1] // k.shape[1]
    visible, results = torch.tensor(case.k_pos[None, :] <= case.q_pos[:, None]), {}
    for form in FORMS:
        with sdpa_kernel(SDPBackend.MATH if form == "saved" else SDPBackend.FLASH_ATTENTION):
            y = torch.nn.functional.scaled_dot_product_attention(
                q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), attn_mask=visible
            ).transpose(1, 2)
        made = y, *torch.autograd.grad(y, leaves, dy)
        results |= {f"{form} {name}": x for name, x in zip(NAMES, made, strict=True)}
    return results


ATTENTION = Family(attention_cases, attention_exact, attention_ours, attention_theirs)
