"""The upper level of tiling: one product or attention split over a group of ranks, a file per cut.

contracts.py says what a cut is and what it is given.
"""

from typing import NoReturn

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
from mpipar.partition.contracts import Cut, Here, LayerCut, Mesh, Sizes

__all__ = ["CUTS", "MESH_CUTS", "Here", "Sizes"]


class Cuts(dict[str, LayerCut]):
    """Cuts by name; looking up a name that does not exist is a usage error."""

    def __missing__(self, name: str) -> NoReturn:
        close = suggestion(str(name), list(self))
        raise UsageError(f"cut {shown(name)} does not exist{close}; use one of {', '.join(self)}")


# The cuts of a layer, over one group.
CUTS = Cuts(
    {
        "column": column,
        "row": row,
        "gather": gather,
        "reduce": reduce,
        "column_sp": column_sp,
        "row_sp": row_sp,
        "column_ring": column_ring,
        "row_ring": row_ring,
    }
)
# Cuts of a matrix product over a grid of ranks; no layer uses them.
MESH_CUTS: dict[str, Cut[Mesh]] = {"2d": summa, "2.5d": depth}
