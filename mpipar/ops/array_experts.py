"""The formulas of a mixture of experts: its products, its router, the order of its rows."""

from collections.abc import Iterator, Sequence

import numpy as np

from mpipar.ops.arrays import Arrays
from mpipar.ops.signature import Array, Shape, ThreeArrays, memory, shapes


class ExpertFormulas(Arrays):
    """The part of `ArrayOps` that mixtures of experts use."""

    # Experts: a product for each of E experts over its own rows, which follow one another. Of R
    # rows in the order of their experts, counts says how many each expert has. Each of N tokens
    # passes K experts.

    @shapes("x[RK] w[EKM] counts -> y[RM]", flops="2RKM")
    def grouped_matmul(self, x: Array, w: Array, counts: Sequence[int]) -> Array:
        """Return x w[e] (R, M) of x (R, K) and w (E, K, M): expert e has the next counts[e] rows.

        An expert without rows is skipped.
        """
        y = self.xp.empty((len(x), w.shape[2]), x.dtype)
        for expert, rows in _groups(counts, x):
            self._multiply(x[rows], w[expert], y[rows])
        return y

    def _multiply(self, x: Array, w: Array, out: Array) -> None:
        """Write x w of x (R, K) and w (K, M) to out (R, M)."""
        out[...] = self.matmul(x, w)

    @shapes("x[RM] w[EKM] counts -> y[RK]", flops="2RKM")
    def grouped_matmul_nt(self, x: Array, w: Array, counts: Sequence[int]) -> Array:
        """Return x w[e]^T (R, K) of x (R, M) and w (E, K, M), as `grouped_matmul`."""
        return self.grouped_matmul(x, w.transpose(0, 2, 1), counts)

    @shapes("x[RK] y[RM] out[EKM]+ counts ->", flops="2RKM")
    def grouped_matmul_tn_add(self, x: Array, y: Array, out: Array, counts: Sequence[int]) -> None:
        """Add x^T y over the rows of each expert to out[e]: (R, K) and (R, M) give (E, K, M)."""
        for expert, rows in _groups(counts, x):
            self.matmul_tn_add(x[rows], y[rows], out[expert])

    @shapes("x[..D] y[..D] -> dots[..]:sum")
    def row_dots(self, x: Array, y: Array) -> Array:
        """Return the sum of each row of x y, both (..., D)."""
        assert x.shape == y.shape, (x.shape, y.shape)
        return self._row_dots(x, y)

    @shapes("x[..D]+ factors[..] -> x")
    def scale_rows(self, x: Array, factors: Array) -> Array:
        """Multiply each row of x (..., D) by its factor (...) in place and return x."""
        x *= factors[..., None]
        return x

    @shapes("x[ND] w[ED] -> logits[NE]:sum", flops="2NED")
    def router_forward(self, x: Array, w: Array) -> Array:
        """Return the logits x w^T (N, E) of x (N, D) and w (E, D), in the type of sums."""
        return self.matmul_nt(x, w)

    @shapes("dlogits[NE] w[ED] -> dx[ND]", flops="2NED")
    def router_backward_input(self, dlogits: Array, w: Array) -> Array:
        """Return dx = dlogits w (N, D)."""
        return self.matmul(dlogits, w)

    @shapes("dlogits[NE] x[ND] dw[ED]+ ->", flops="2NED")
    def router_backward_weight(self, dlogits: Array, x: Array, dw: Array) -> None:
        """Add dlogits^T x to dw (E, D)."""
        self.matmul_tn_add(dlogits, x, dw)

    @shapes("logits[NE] count=K bias[..E]? -> ids[NK]:int64 probs[NK]:sum")
    def choice_forward(
        self, logits: Array, count: int, bias: Array | None = None
    ) -> tuple[Array, Array]:
        """Return (ids (N, count) of the experts of each token, their probabilities (N, count)).

        They are those of the largest logits (N, E), the largest first; among equal ones the lowest
        id. The probabilities are the softmax over these alone. bias (E,) or (N, E): added to the
        softmax over all logits for the choice, but not for the probabilities (arXiv 2408.15664).
        """
        scores = logits if bias is None else self._row_softmax(logits) + bias
        ids = self.xp.argsort(-scores, axis=-1, kind="stable")[:, :count]
        ids = self.xp.ascontiguousarray(ids, np.int64)
        return ids, self._row_softmax(logits[self.xp.arange(len(ids))[:, None], ids])

    def _row_softmax(self, logits: Array) -> Array:
        """Return the softmax over the last dimension."""
        probs = self.xp.exp(logits - logits.max(axis=-1, keepdims=True))
        probs /= probs.sum(axis=-1, keepdims=True)
        return probs

    @shapes("dprobs[NK] probs[NK] ids[NK] experts=E -> dlogits[NE]:sum")
    def choice_backward_input(self, dprobs: Array, probs: Array, ids: Array, experts: int) -> Array:
        """Return dlogits (N, E) of dprobs (N, K): zero for experts that were not chosen."""
        dlogits = self.xp.zeros((len(ids), experts), probs.dtype)
        inner = (dprobs - self._row_dots(probs, dprobs)[:, None]) * probs
        dlogits[self.xp.arange(len(ids))[:, None], ids] = inner
        return dlogits

    @shapes("ids[BM] experts=E -> loads[BE]:sum")
    def expert_loads(self, ids: Array, experts: int) -> Array:
        """Return how often each expert occurs in each row of ids (B, M): (B, E).

        Ids beyond the experts do not count.
        """
        width = experts + 1
        places = self.xp.minimum(ids, experts) + width * self.xp.arange(len(ids))[:, None]
        loads = self.xp.bincount(places.reshape(-1), minlength=width * len(ids))
        return self.xp.ascontiguousarray(loads.reshape(-1, width)[:, :experts], self.dtype)

    @shapes("ids[NK] -> order[NK]:int64 tokens[NK]:int64 places[NK]:int64")
    def expert_order(self, ids: Array) -> ThreeArrays:
        """Return what sorts the choices of ids (N, K) by expert, then by token, all flat (N, K).

        order: the numbers of the choices, sorted. tokens: their tokens. places: the place of each
        choice in that order.
        """
        order = self.xp.argsort(ids.reshape(-1), kind="stable")
        places = self.xp.empty_like(order)
        places[order] = self.xp.arange(len(order))
        shape = ids.shape
        return order.reshape(shape), (order // shape[1]).reshape(shape), places.reshape(shape)

    @shapes("rows[NKD] probs[NK]? -> y[ND]")
    def combine_rows(self, rows: Array, probs: Array | None = None) -> Array:
        """Return the sum (N, D) over the K rows of each token (N, K, D), in the order of choices.

        probs (N, K): factors of the rows, if given.
        """
        y = rows[:, 0] * (1 if probs is None else probs[:, :1])
        for k in range(1, rows.shape[1]):
            y += rows[:, k] * (1 if probs is None else probs[:, k : k + 1])
        return y

    @shapes("dlogits[BTE]+ logits[BTE] loads[BE] factor ->")
    def balance_backward_input(
        self, dlogits: Array, logits: Array, loads: Array, factor: float
    ) -> None:
        """Add the gradient of factor * sum_e loads[b, e] P[b, t, e] to dlogits (B, T, E).

        P is the softmax over all logits. loads (B, E): how often a row chose each expert; it has no
        gradient (arXiv 2101.03961, section 2.2).
        """
        probs = self._row_softmax(logits)
        inner = loads[:, None, :] - (probs * loads[:, None, :]).sum(axis=-1, keepdims=True)
        inner *= probs
        inner *= self.scalar(factor)
        dlogits += inner

    @shapes("loads[BE] excess[E]+ ->")
    def add_excess(self, loads: Array, excess: Array) -> None:
        """Add E times each expert's excess over the mean load, a whole number, to excess (E,)."""
        total = loads.sum(axis=0)
        excess += total * self.scalar(len(excess)) - total.sum()

    @shapes("data[..]+ grad[..] rate ->", exact=True)
    def sign_step(self, data: Array, grad: Array, rate: float) -> None:
        """Subtract rate from data where grad is positive, and add it where grad is negative."""
        data -= self.scalar(rate) * self.xp.sign(grad)

    @memory
    def counts_to_host(
        self, counts: Array, total: int, most: Shape = (), own: slice | None = None
    ) -> list[int]:
        """Return the numbers of an array, flattened, on the host; their sum is about `total`.

        On shapes, which have no numbers, `total` is distributed equally. If the worst case is
        requested, the sum is the product of `most`, which those in `own` cannot exceed and receive
        entirely.
        """
        return [int(count) for count in self.to_host(counts.reshape(-1))]

    @memory
    def block_order(self, blocks: Sequence[Sequence[int]]) -> tuple[Array, Array]:
        """Return what sorts by column the rows of blocks that are stored by row, and its inverse.

        blocks: numbers of rows of each, on the host.
        """
        sizes = np.asarray(blocks)
        starts = np.cumsum(sizes).reshape(sizes.shape) - sizes
        order = np.concatenate(
            [
                np.arange(start, start + size)
                for start, size in zip(starts.T.flat, sizes.T.flat, strict=True)
            ]
        )
        return self.asarray(order), self.asarray(np.argsort(order))


def _groups(counts: Sequence[int], x: Array) -> Iterator[tuple[int, slice]]:
    """Yield (expert, its rows) for the experts that have some of the rows of x."""
    first = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(first, first + count)
        first += count
    assert first == len(x), (counts, len(x))
