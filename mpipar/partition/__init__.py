"""The upper tile level: one product `y = x @ w` cut over the ranks of a group, one file per cut.

Every cut has the same three functions. The barriers of products are visible lines in these files:

    forward(ops, x, w, comm, name, sizes)             -> y
    backward_input(ops, dy, w, comm, name, sizes)     -> dx, dy as backward_weight wants it
    backward_weight(ops, x, dy, dw, comm, name, sizes)        dw += x^T dy

w (K, N) is this rank's shard. Where a width does not divide, every shard has the size of the first
and the last ones are padded with zeros, which changes no product (see shares.py).

comm: the group; for 2d and 2.5d a `summa.Mesh` of groups. sizes: T, K and N of the uncut product,
for the cuts that put pieces together (gather, reduce, *_sp, *_ring); the others do not read it.
shard_axis: which axis of w is cut (None: both). bias_is_cut: whether a rank holds only its own
columns of y, and so of the bias. tokens_are_cut: whether a rank holds only its own tokens of x or
y; such a cut reads sizes.tokens. ops: what multiplies; a convolution gives its own product, whose w
has the rows of a patch for each channel, so x's last axis and not w's first one is what a cut goes
by.
"""

from typing import NamedTuple

from mpipar.partition import (
    column,
    column_ring,
    column_sp,
    depth,
    gather,
    reduce,
    row,
    row_ring,
    row_sp,
    summa,
)

CUTS = {
    "column": column, "row": row, "gather": gather, "reduce": reduce,
    "2d": summa, "2.5d": depth,
    "column_sp": column_sp, "row_sp": row_sp, "column_ring": column_ring, "row_ring": row_ring,
}


class Sizes(NamedTuple):
    """Of a product before it is cut: x (.., tokens, inner), w (inner, outer).

    tokens: None where the cut does not divide them.
    """

    tokens: int | None
    inner: int
    outer: int
