"""Causal attention written plainly, for NumPy and CuPy alike: part of `ArrayOps`.

Query i sees key j if and only if positions[j] <= positions[i]. B batch, T tokens, H heads, d width
of a head.
"""

import numpy as np


class ArrayAttention:
    """Attention whose scores are whole arrays: product, mask, softmax, product."""

    def stacked_products(self, a, b, out=None):
        """Return a b for every leading index: (B, H, M, K), (B, H, K, N) give (B, H, M, N).

        out: where to write it, if anywhere; a view will do.
        """
        return self.xp.matmul(a, b, out=out)

    def attention_forward(self, qkv, positions):
        """Return (y, probs) of causal attention.

        qkv (B, T, 3, H, d), positions (T,); y (B, T, H, d), probs (B, H, T, T), hidden part 0.
        """
        q, k, v = self._heads_first(qkv)
        scores = self.stacked_products(q, k.transpose(0, 1, 3, 2))
        scores *= self.scalar(qkv.shape[-1] ** -0.5)
        visible = positions[None, :] <= positions[:, None]
        scores = self.xp.where(visible, scores, self.scalar(-np.inf))
        probs = self.xp.exp(scores - scores.max(axis=-1, keepdims=True))
        probs /= probs.sum(axis=-1, keepdims=True)
        y = self.stacked_products(probs, v)
        return self.xp.ascontiguousarray(y.transpose(0, 2, 1, 3)), probs

    def attention_backward_input(self, dy, qkv, probs, positions):
        """Return dqkv (B, T, 3, H, d); of a row, dscores = probs (dprobs - sum(probs dprobs))."""
        q, k, v = self._heads_first(qkv)
        dqkv = self.xp.empty_like(qkv)
        dq, dk, dv = self._heads_first(dqkv)
        dy = dy.transpose(0, 2, 1, 3)  # (B, H, T, d)
        self.stacked_products(probs.transpose(0, 1, 3, 2), dy, dv)
        dprobs = self.stacked_products(dy, v.transpose(0, 1, 3, 2))
        dscores = probs * (dprobs - (probs * dprobs).sum(axis=-1, keepdims=True))
        dscores *= self.scalar(qkv.shape[-1] ** -0.5)
        self.stacked_products(dscores, k, dq)
        self.stacked_products(dscores.transpose(0, 1, 3, 2), q, dk)
        return dqkv

    @staticmethod
    def _heads_first(qkv):
        """Return the three views (B, H, T, d) of a packed (B, T, 3, H, d) array, no copy."""
        return tuple(qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
