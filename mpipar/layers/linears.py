"""The linear layers by cut: a row of LINEARS is a class of layers/parallel.

Which one a product of the decoder has: `models.decoder.linears_of`, and FFN_CUTS for --ffn-cut.
"""

from __future__ import annotations

from typing import Any, NoReturn

from mpipar.errors import UsageError, suggestion
from mpipar.layers.parallel.column import ColumnLinear
from mpipar.layers.parallel.gather import GatherLinear, ReduceLinear
from mpipar.layers.parallel.linear import Linear
from mpipar.layers.parallel.ring_linears import ColumnRingLinear, RowRingLinear
from mpipar.layers.parallel.row import RowLinear
from mpipar.layers.parallel.sequence import ColumnSequenceLinear, RowSequenceLinear


class Linears(dict[str, type[Linear]]):
    """Linear layers by cut; looking up a name that does not exist is a usage error."""

    def __missing__(self, name: str) -> NoReturn:
        close = suggestion(str(name), list(self))
        raise UsageError(f"cut {name!a} does not exist{close}; use one of {', '.join(self)}")


LINEARS = Linears(
    column=ColumnLinear,
    row=RowLinear,
    gather=GatherLinear,
    reduce=ReduceLinear,
    column_sp=ColumnSequenceLinear,
    row_sp=RowSequenceLinear,
    column_ring=ColumnRingLinear,
    row_ring=RowRingLinear,
)
# By --ffn-cut, the cuts of a feed-forward network's two products; pair: those of `linears_of`.
FFN_CUTS = {"gather": ("gather", "gather"), "reduce": ("reduce", "reduce")}


def make_linear(*arguments: Any, cut: str, **named: Any) -> Linear:
    """Return the linear layer of this cut; the other arguments are those of `Linear`."""
    return LINEARS[cut](*arguments, **named)
