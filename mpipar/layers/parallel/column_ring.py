"""The column cut of tokens that are cut, with its barriers sent in pieces: see ring.py.

While this rank multiplies the tokens of one rank, those of the next are on their way. Only the
weight gradient first collects all of them.
"""

from __future__ import annotations

from mpipar.comm.grid import chunk_size, chunk_slice
from mpipar.layers.parallel import chunks, ring
from mpipar.layers.parallel.linear import Linear
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array


class ColumnRingLinear(Linear):
    """`ColumnSequenceLinear` whose barriers are rings."""

    cuts_outputs = True
    bias_is_cut = True

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, T, N/q) of x (B, T/q, K). Comm: one ring of x over tp."""
        stash[self.name, "x"] = x
        tokens, w = stash.batch.shape[1], self.w
        y = self.ops.empty((x.shape[0], tokens, w.shape[1]))
        for place, block in ring.pieces(self.ops, x, self.comm, self.name):
            own = y[:, chunk_slice(tokens, self.comm.size, place)]
            self.ops.copy(own, self.ops.matmul(block[:, : own.shape[1]], w))
        return self._plus_bias(y)

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, T/q, K) of dy (B, T, N/q). Comm: one ring of dx over tp."""
        stash[self.name, "dy"] = dy
        tokens, w, q = stash.batch.shape[1], self.w, self.comm.size

        def part(place: int) -> Array:
            dx = self.ops.matmul_nt(dy[:, chunk_slice(tokens, q, place)], w)
            return chunks.pad(self.ops, dx, 1, chunk_size(tokens, q))

        return ring.total(self.ops, part, self.comm, self.name)

    def backward_weight(self, stash: Stash) -> None:
        """Add x^T dy over all tokens to dw (K, N/q), and the sum of dy to db.

        It is one product at the end because pieces arrive in a different order on each rank, while
        ranks that hold copies of a weight, such as shared key heads, must add up tokens in the same
        order.
        Comm: one ring of x over tp.
        """
        x, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        tokens = stash.batch.shape[1]
        whole = self.ops.empty((x.shape[0], tokens, x.shape[2]), x.dtype, label="buffers")
        for place, block in ring.pieces(self.ops, x, self.comm, self.name):
            own = whole[:, chunk_slice(tokens, self.comm.size, place)]
            self.ops.copy(own, block[:, : own.shape[1]])
        self.ops.matmul_tn_add_sums(whole, dy, self.dw, self.db)
