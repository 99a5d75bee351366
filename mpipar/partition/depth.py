"""Cut over d grids of q x q ranks (2.5d, "depth"): less traffic for more memory.

The d grids split the rows of x and y, and each runs SUMMA on its rows with its own copy of w's
blocks. A rank thus sends 1/d as much of x, and as much of w as in a single q x q grid. The weight
gradient is then summed over the grids, which is one more barrier. Sources: Solomonik and Demmel,
2011; Tesseract, arXiv 2105.14500.
"""

from __future__ import annotations

from mpipar.ops.signature import Array
from mpipar.partition import summa
from mpipar.partition.contracts import HereOnMesh

# Each grid runs these on its 1/d of the rows. Comm: that of summa.
forward, backward_input = summa.forward, summa.backward_input


def backward_weight(here: HereOnMesh, x: Array, dy: Array, dw: Array) -> None:
    """Add x^T dy to dw (K/q, N/q).

    Comm: that of summa.backward_weight, and one all_reduce over depth.
    """
    part = here.ops.zeros(dw.shape)
    summa.backward_weight(here, x, dy, part)
    here.ops.accumulate(dw, here.comm.depth.all_reduce(part, here.name))
