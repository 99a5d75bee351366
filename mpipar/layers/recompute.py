"""Activation recomputation: a block keeps only its input and reruns forward before its gradients.

This shortens what is kept from F to I. What the weight gradient needs lives from I to W as it does
without recomputation, so schedules that postpone W save less. The second pass sees the same weights
as the first, because no update comes between F and I. Source: Chen et al., arXiv 1604.06174.

Attention alone can be recomputed, too (--recompute attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpipar.layers.parallel.chunks import rounded
from mpipar.layers.parallel.local_attention import LocalAttention, Saved, whole_positions
from mpipar.layers.stash import Batch, Layer, Stash

if TYPE_CHECKING:
    from mpipar.comm.recorder import Recorder
    from mpipar.ops.signature import Array, ThreeArrays


class ActivationRecompute:
    """Layers that run forward twice; the second time leaves out the result, which nothing reads.

    layers: those of a block, first to last.
    """

    def __init__(self, layers: Sequence[Layer], recorder: Recorder):
        self.layers, self.recorder = layers, recorder
        self.params = [param for layer in layers for param in layer.params]

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y of x. Comm: forward of the layers."""
        stash[self, "x"] = x
        inner = stash.inner()
        for layer in self.layers:
            x = layer.forward(x, inner)
        return x

    def backward_input(self, dy: Array, stash: Stash) -> Array:
        """Return dx of dy. Comm: forward (phase "recompute") and backward_input of the layers."""
        inner = stash.inner()
        with self.recorder.at("recompute"):
            x = stash.pop((self, "x"))
            *others, last = self.layers
            for layer in others:
                x = layer.forward(x, inner)
            recompute(last, x, inner)
        stash[self, "inner"] = inner
        for layer in reversed(self.layers):
            dy = layer.backward_input(dy, inner)
        return dy

    def backward_weight(self, stash: Stash) -> None:
        """Accumulate the gradients of the layers. Comm: backward_weight of the layers."""
        inner = stash.pop((self, "inner"))
        for layer in reversed(self.layers):
            layer.backward_weight(inner)
        assert not inner, f"the block left {list(inner)} in the stash"


def recompute(layer: Layer, x: Array, stash: Stash) -> None:
    """Fill the stash as the layer's forward does; nothing reads the result.

    If it has `recompute(x, stash)`, that leaves out what only the result needs: a product and its
    barrier. Comm: forward of the layer, except that barrier.
    """
    getattr(layer, "recompute", layer.forward)(x, stash)


class RecomputedAttention(LocalAttention):
    """`LocalAttention` that recomputes the scores for backward.

    Instead of all probabilities it keeps two numbers for each query and head: the largest score and
    the sum of exp(score - largest). This costs one more product of queries and keys.
    """

    def forward(self, q: Array, k: Array, v: Array, batch: Batch) -> tuple[Array, Saved]:
        """Return y (B, T, H, d), and what the backward pass needs."""
        places = whole_positions(batch)
        y, stats = self.ops.attention_block_forward(q, k, v, places, places)
        y = rounded(self.ops, y, q.dtype)
        return y, (q, k, v, y, stats)

    def backward_input(self, dy: Array, saved: Saved, batch: Batch, out: ThreeArrays) -> None:
        """Write dq, dk, dv."""
        ops, places, (q, k, v, y, stats) = self.ops, whole_positions(batch), saved
        gradients = ops.attention_block_backward(
            dy, q, k, v, stats, ops.attention_delta(dy, y), q_pos=places, k_pos=places
        )
        for to, gradient in zip(out, gradients, strict=True):
            ops.copy(to, gradient)
