"""The upper tile level: one product or one attention cut over a group of ranks, a file per cut.

Every cut has the same three functions. The barriers of products are visible lines in these files:

    forward(ops, x, w, comm, name, sizes)             -> y
    backward_input(ops, dy, w, comm, name, sizes)     -> dx, dy as backward_weight wants it
    backward_weight(ops, x, dy, dw, comm, name, sizes)        dw += x^T dy

w (K, N) is this rank's shard. If the group does not divide a width, every shard has the size of the
first. The last ones are padded with zeros, which change no product (see shares.py).

ops: what multiplies. A convolution gives its own product, whose w has the rows of a patch for each
channel. So a cut goes by x's last axis and not by w's first one.
comm: the group; for 2d and 2.5d it is a `summa.Mesh` of groups.
sizes: T, K and N of the uncut product. Only the cuts that join pieces read it (gather, reduce,
*_sp, *_ring).

Each cut also states three facts:
shard_axis: which axis of w is cut (None: both).
bias_is_cut: whether a rank holds only its own columns of y, and so of the bias.
tokens_are_cut: whether a rank holds only its own tokens of x or y. Such a cut reads sizes.tokens.
"""

from typing import NamedTuple

from mpipar.errors import UsageError, suggestion
from mpipar.files.text import shown
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


class Cuts(dict):
    """Cuts by name; a name that is none of them is a user's mistake."""

    def __missing__(self, name):
        close = suggestion(str(name), list(self))
        raise UsageError(f"cut {shown(name)} does not exist{close}; use one of {', '.join(self)}")


CUTS = Cuts({
    "column": column, "row": row, "gather": gather, "reduce": reduce,
    "2d": summa, "2.5d": depth,
    "column_sp": column_sp, "row_sp": row_sp, "column_ring": column_ring, "row_ring": row_ring,
})


class Sizes(NamedTuple):
    """The sizes of a product before it is cut: x (.., tokens, inner), w (inner, outer).

    tokens: None if the cut does not divide the tokens.
    """

    tokens: int | None
    inner: int
    outer: int
