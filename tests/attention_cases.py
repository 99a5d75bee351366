"""Random arrays for attention in tiles, and what it makes of them in float64."""

import numpy as np
from cuda_fused import BOUNDS, DTYPES, place, relative
from ops_cases import plain

from mpipar.ops.cuda.attention import Attention

# (B, T, H, d) and the order of positions. Tiles are 16 to 128 tokens by 32, 64 or 128 of width: no
# shape fills them, some tiles are hidden, some have more tokens than there are.
CASES = {
    "increasing": (2, 150, 2, 40),
    "shuffled": (1, 71, 2, 33),  # no address of 16 bytes
    "zigzag": (1, 133, 1, 128),
    "ties": (1, 7, 3, 64),
    "narrow": (1, 201, 1, 16),
}
# Values of 16 bits are rounded: p or ds before the last product, the result, and y before delta is
# made of it. Independent, they add up in squares.
ROUNDINGS = {"y": 2, "dq": 3, "dk": 3, "dv": 2}


def positions_of(kind, tokens, rng):
    """Positions (T,); zigzag: two parts of a longer sequence, as a rank of a context group has."""
    increasing = np.arange(tokens) * 2 + 3
    return {"shuffled": rng.permutation(tokens), "ties": np.sort(rng.integers(0, 4, tokens)),
            "zigzag": np.concatenate([increasing[tokens // 3 :] + 900, increasing[: tokens // 3]]),
            }.get(kind, increasing)


def parts(packed):
    """The views (B, T, H, d) of a packed (B, T, 3, H, d) array."""
    return tuple(packed[:, :, i] for i in range(3))


class Case:
    """Random arrays of one type and shape, and the float64 results of the same values."""

    def __init__(self, rng, dtype, shape, kind="increasing"):
        batch, tokens, heads, width = shape
        self.dtype, self.bound, self.factor = DTYPES[dtype], BOUNDS[dtype], width**-0.5
        self.positions = positions_of(kind, tokens, rng)
        self.qkv, self.dy = (rng.standard_normal(size).astype(self.dtype) for size in
                             ((batch, tokens, 3, heads, width), shape))
        ops, qkv = plain("float64"), self.qkv.astype(np.float64)
        self.y, probs = ops.attention_forward(qkv, self.positions)
        self.dqkv = ops.attention_backward_input(self.dy.astype(np.float64), qkv, probs,
                                                 self.positions)
        q, k, _ = parts(qkv)
        own = np.einsum("bthd,bthd->bht", q, k) * self.factor  # of each token with itself
        self.lse = own - np.log(np.diagonal(probs, axis1=2, axis2=3))

    def run(self, where):
        """Return host arrays y, lse, dqkv, with gradients written to the packed one."""
        xp, loader, to_device, to_host = place(where)
        kernels = Attention(xp, loader)
        qkv, dy, positions = map(to_device, (self.qkv, self.dy, self.positions))
        dqkv = to_device(np.full(self.qkv.shape, np.nan, self.dtype))
        y, lse = kernels.forward(*parts(qkv), positions, self.factor)
        kernels.backward(dy, *parts(qkv), y, lse, positions, self.factor, parts(dqkv))
        return tuple(map(to_host, (y, lse, dqkv)))


def check_forward(case, y, lse):
    """Raise AssertionError unless y and lse are a case's."""
    assert (y.dtype, lse.dtype) == (case.dtype, np.float32)
    assert relative(y, case.y) <= case.bound * ROUNDINGS["y"] ** 0.5
    assert np.abs(lse - case.lse).max() <= 1e-5
