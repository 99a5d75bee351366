"""The row cut of tokens that are cut, with its barriers sent in pieces: see ring.py.

While the sum of one rank's tokens is on its way, this rank multiplies those of the next.
"""

from __future__ import annotations

from mpipar.comm.grid import chunk_size, chunk_slice
from mpipar.layers.parallel import chunks, ring
from mpipar.layers.parallel.linear import Linear
from mpipar.layers.stash import Stash
from mpipar.ops.signature import Array


class RowRingLinear(Linear):
    """`RowSequenceLinear` whose barriers are rings."""

    cuts_outputs = False

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, T/q, N) of x (B, T, K/q). Comm: one ring of y over tp."""
        stash[self.name, "x"] = x
        tokens, w, q = stash.batch.shape[1], self.w, self.comm.size

        def part(place: int) -> Array:
            y = self.ops.matmul(x[:, chunk_slice(tokens, q, place)], w)
            return chunks.pad(self.ops, y, 1, chunk_size(tokens, q))

        return self._plus_bias(ring.total(self.ops, part, self.comm, self.name))

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx (B, T, K/q) of dy (B, T/q, N). Comm: one ring of dy over tp."""
        tokens, w = stash.batch.shape[1], self.w
        dx = self.ops.empty((dy.shape[0], tokens, w.shape[0]))
        whole = self.ops.empty((dy.shape[0], tokens, dy.shape[2]))
        for place, block in ring.pieces(self.ops, dy, self.comm, self.name):
            rows = chunk_slice(tokens, self.comm.size, place)
            own = whole[:, rows]
            self.ops.copy(own, block[:, : own.shape[1]])
            self.ops.copy(dx[:, rows], self.ops.matmul_nt(own, w))
        stash[self.name, "dy"] = whole
        return dx

    def backward_weight(self, stash: Stash) -> None:
        """Add x^T dy over all tokens to dw (K/q, N), and the sum of dy to db (N,)."""
        x, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        self.ops.matmul_tn_add_sums(x, dy, self.dw, self.db)
