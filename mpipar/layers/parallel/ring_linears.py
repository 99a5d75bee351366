"""The cuts of tokens that are cut, with their barriers sent in pieces: see ring.py."""

from __future__ import annotations

from mpipar.comm.grid import chunk_size, chunk_slice
from mpipar.layers.parallel import chunks, ring
from mpipar.layers.parallel.column import ColumnLinear
from mpipar.layers.parallel.row import RowLinear
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array


class ColumnRingLinear(ColumnLinear):
    """`ColumnSequenceLinear` whose barriers are sent in pieces.

    While this rank multiplies the tokens of one rank, those of the next are on their way. Only the
    weight gradient first collects all of them.
    """

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, T, N/q) of x (B, T/q, K). Comm: one ring of x over tp."""
        stash[self.name, "x"] = x
        length, w = stash.batch.shape[1], self.w
        y = self.ops.empty((x.shape[0], length, w.shape[1]))
        for group_rank, block in ring.pieces(self.ops, x, self.comm, self.name):
            own = y[:, chunk_slice(length, self.comm.size, group_rank)]
            self.ops.copy(own, self.ops.matmul(block[:, : own.shape[1]], w))
        return self._plus_bias(y)

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, T/q, K) of dy (B, T, N/q). Comm: one ring of dx over tp."""
        stash[self.name, "dy"] = dy
        length, w, q = stash.batch.shape[1], self.w, self.comm.size

        def part(group_rank: int) -> Array:
            dx = self.ops.matmul_nt(dy[:, chunk_slice(length, q, group_rank)], w)
            return chunks.pad(self.ops, dx, 1, chunk_size(length, q))

        return ring.total(self.ops, part, self.comm, self.name)

    def backward_weight(self, stash: Stash) -> None:
        """Add x^T dy over all tokens to dw (K, N/q), and the sum of dy to db.

        It is one product at the end because pieces arrive in a different order on each rank, while
        ranks that hold copies of a weight, such as shared key heads, must add up tokens in the same
        order.
        Comm: one ring of x over tp.
        """
        x, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        length = stash.batch.shape[1]
        whole = self.ops.empty((x.shape[0], length, x.shape[2]), x.dtype, label="buffers")
        for group_rank, block in ring.pieces(self.ops, x, self.comm, self.name):
            own = whole[:, chunk_slice(length, self.comm.size, group_rank)]
            self.ops.copy(own, block[:, : own.shape[1]])
        self.ops.matmul_tn_add_sums(whole, dy, self.dw, self.db)


class RowRingLinear(RowLinear):
    """`RowSequenceLinear` whose barriers are sent in pieces.

    While the sum of one rank's tokens is on its way, this rank multiplies those of the next.
    """

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, T/q, N) of x (B, T, K/q). Comm: one ring of y over tp."""
        stash[self.name, "x"] = x
        length, w, q = stash.batch.shape[1], self.w, self.comm.size

        def part(group_rank: int) -> Array:
            y = self.ops.matmul(x[:, chunk_slice(length, q, group_rank)], w)
            return chunks.pad(self.ops, y, 1, chunk_size(length, q))

        return self._plus_bias(ring.total(self.ops, part, self.comm, self.name))

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, T, K/q) of dy (B, T/q, N). Comm: one ring of dy over tp."""
        length, w = stash.batch.shape[1], self.w
        dx = self.ops.empty((dy.shape[0], length, w.shape[0]))
        whole = self.ops.empty((dy.shape[0], length, dy.shape[2]))
        for group_rank, block in ring.pieces(self.ops, dy, self.comm, self.name):
            rows = chunk_slice(length, self.comm.size, group_rank)
            own = whole[:, rows]
            self.ops.copy(own, block[:, : own.shape[1]])
            self.ops.copy(dx[:, rows], self.ops.matmul_nt(own, w))
        stash[self.name, "dy"] = whole
        return dx
