"""Cut in both directions over a grid of q x q ranks (SUMMA): each holds a block of x, w and y.

Rank (i, j) holds x[i, j] (rows and K), w[i, j] (K and N) and y[i, j] (rows and N). Every product is
a sum of q products of blocks. One rank of each row or column of the grid after another broadcasts
its block, or collects the sum of all ranks' blocks:

    forward          x along the rows,  w along the columns   y[i, j] = sum_l x[i, l] w[l, j]
    backward_input   w along the columns, dx in the rows      dx[i, l] = sum_j dy[i, j] w[l, j]^T
    backward_weight  x along the rows,  dw in the columns     dw[l, j] = sum_i x[i, l]^T dy[i, j]

Two matrices travel in each function, and a rank holds its own block of each plus at most one more.
Per rank, every function sends (q-1)/q^2 of these two whole matrices. Source: van de Geijn and
Watts, SUMMA, 1997.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpipar.comm.group import Comm
from mpipar.ops.signature import Array
from mpipar.partition.contracts import HereOnMesh


def forward(here: HereOnMesh, x: Array, w: Array) -> Array:
    """Return y (.., N/q) of x (.., K/q).

    Comm: q broadcasts of x over row, q of w over column.
    """
    rows = x.reshape(-1, x.shape[-1])
    y = here.ops.zeros((rows.shape[0], w.shape[1]))
    x_blocks, w_blocks = _blocks(here, rows, here.comm.row), _blocks(here, w, here.comm.column)
    for x_block, w_block in zip(x_blocks, w_blocks, strict=True):
        # y += x w, where x is the transpose of x^T.
        here.ops.matmul_tn_add(x_block.T, w_block, y)
    return y.reshape(*x.shape[:-1], w.shape[1])


def backward_input(here: HereOnMesh, dy: Array, w: Array) -> tuple[Array, Array]:
    """Return dx (.., K/q) of dy (.., N/q).

    Comm: q broadcasts of w over column, q reduces over row.
    """
    dx, row = None, here.comm.row
    for root, w_block in enumerate(_blocks(here, w, here.comm.column)):
        part = row.reduce(here.ops.matmul_nt(dy, w_block), root, here.name)
        dx = part if row.index == root else dx
    return dx, dy


def backward_weight(here: HereOnMesh, x: Array, dy: Array, dw: Array) -> None:
    """Add x^T dy to dw (K/q, N/q). Comm: q broadcasts of x over row, q reduces over column."""
    rows, column = x.reshape(-1, x.shape[-1]), here.comm.column
    for root, x_block in enumerate(_blocks(here, rows, here.comm.row)):
        part = here.ops.zeros(dw.shape)
        here.ops.matmul_tn_add(x_block, dy.reshape(-1, dy.shape[-1]), part)
        part = column.reduce(part, root, here.name)
        if column.index == root:
            here.ops.accumulate(dw, part)


def _blocks(here: HereOnMesh, own: Array, comm: Comm) -> Iterator[Array]:
    """Yield all ranks' blocks in group order, in one buffer: use each before asking for the next.

    Comm: one broadcast of each block.
    """
    other = own if comm.size == 1 else here.ops.empty(own.shape, label="buffers")
    for root in range(comm.size):
        yield comm.broadcast(own if root == comm.index else other, root, here.name)
