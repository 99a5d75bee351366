"""Products cut in both directions over a grid of q x q ranks, each with a block of x, w and y.

SUMMA: rank (i, j) holds x[i, j] (rows and K), w[i, j] (K and N) and y[i, j] (rows and N). Every
product is a sum of q products of blocks. One rank of each row or column of the grid after another
broadcasts its block, or collects the sum of all ranks' blocks:

    forward          x along the rows,  w along the columns   y[i, j] = sum_l x[i, l] w[l, j]
    backward_input   w along the columns, dx in the rows      dx[i, l] = sum_j dy[i, j] w[l, j]^T
    backward_weight  x along the rows,  dw in the columns     dw[l, j] = sum_i x[i, l]^T dy[i, j]

Two matrices travel in each function, and a rank holds its own block of each plus at most one more.
Per rank, every function sends (q-1)/q^2 of these two whole matrices. Source: van de Geijn and
Watts, SUMMA, 1997.

2.5d: d such grids split the rows of x and y, each with its own copy of w's blocks. A rank thus
sends 1/d as much of x, and as much of w as in a single grid. The weight gradient is then summed
over the grids, which is one more barrier. Sources: Solomonik and Demmel, 2011; Tesseract, arXiv
2105.14500.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mpipar.comm.group import Comm
from mpipar.layers.stash import Stash
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array


class Mesh(NamedTuple):
    """A rank's groups: its row and column of the q x q grid, and its counterparts in other grids.

    row.index counts along N (and K of x). column.index counts along the rows of x (and K of w).
    depth: the ranks at the same place of each grid, for the 2.5d cut.
    """

    row: Comm
    column: Comm
    depth: Comm


class Summa:
    """y = x w over one grid, with the three functions of a layer. w, dw: this rank's blocks."""

    def __init__(self, ops: Ops, mesh: Mesh, name: str, w: Array, dw: Array) -> None:
        self.ops, self.mesh, self.name, self.w, self.dw = ops, mesh, name, w, dw

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (.., N/q) of x (.., K/q).

        Comm: q broadcasts of x over row, q of w over column.
        """
        stash[self.name, "x"] = x
        rows = x.reshape(-1, x.shape[-1])
        y = self.ops.zeros((rows.shape[0], self.w.shape[1]))
        x_blocks = self._blocks(rows, self.mesh.row)
        w_blocks = self._blocks(self.w, self.mesh.column)
        for x_block, w_block in zip(x_blocks, w_blocks, strict=True):
            # y += x w, where x is the transpose of x^T.
            self.ops.matmul_tn_add(x_block.T, w_block, y)
        return y.reshape(*x.shape[:-1], self.w.shape[1])

    def backward_input(self, dy: Array, stash: Stash) -> Array | None:
        """Return dx (.., K/q) of dy (.., N/q).

        Comm: q broadcasts of w over column, q reduces of dx over row.
        """
        stash[self.name, "dy"] = dy
        dx, row = None, self.mesh.row
        for root, w_block in enumerate(self._blocks(self.w, self.mesh.column)):
            part = row.reduce(self.ops.matmul_nt(dy, w_block), root, self.name)
            dx = part if row.index == root else dx
        return dx

    def backward_weight(self, stash: Stash) -> None:
        """Add x^T dy to dw (K/q, N/q).

        Comm: q broadcasts of x over row, q reduces of dw over column.
        """
        self.add(stash, self.dw)

    def add(self, stash: Stash, dw: Array) -> None:
        """Add x^T dy over the rows of this grid to dw. Comm: that of `backward_weight`."""
        x, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        rows, column = x.reshape(-1, x.shape[-1]), self.mesh.column
        for root, x_block in enumerate(self._blocks(rows, self.mesh.row)):
            part = self.ops.zeros(dw.shape)
            self.ops.matmul_tn_add(x_block, dy.reshape(-1, dy.shape[-1]), part)
            part = column.reduce(part, root, self.name)
            if column.index == root:
                self.ops.accumulate(dw, part)

    def _blocks(self, own: Array, comm: Comm) -> Iterator[Array]:
        """Yield all ranks' blocks in group order, in one buffer: use each before the next.

        Comm: one broadcast of each block.
        """
        other = own if comm.size == 1 else self.ops.empty(own.shape, label="buffers")
        for root in range(comm.size):
            yield comm.broadcast(own if root == comm.index else other, root, self.name)


class Depth(Summa):
    """y = x w over d grids, each of which runs SUMMA on its 1/d of the rows."""

    def backward_weight(self, stash: Stash) -> None:
        """Add x^T dy to dw (K/q, N/q).

        Comm: that of SUMMA, and one all_reduce of dw over depth.
        """
        part = self.ops.zeros(self.dw.shape)
        self.add(stash, part)
        self.ops.accumulate(self.dw, self.mesh.depth.all_reduce(part, self.name))


MESH_CUTS = {"2d": Summa, "2.5d": Depth}
