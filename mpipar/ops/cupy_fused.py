"""The array functions on a GPU in fused kernels: `--kernels fused`, what `--device cuda` does.

Products, embeddings and images are those of `cupy_ops`; every chain of elementwise functions and
sums between them is one kernel of `ops/cuda`. Operands of 16 bits are read and rounded inside the
kernels, which compute in float32. There are no such kernels for float64.
"""

import numpy as np

from mpipar.ops.array_ops import valid_columns
from mpipar.ops.cuda.attention import MOST_WIDTH, Attention
from mpipar.ops.cuda.fused import Fused
from mpipar.ops.cuda.loader import Loader
from mpipar.ops.cuda.tile_model import TileModelAttention
from mpipar.ops.cupy_ops import CupyOps, cuda_tile

# What takes operands of 16 bits as they are, beside products.
FUSED_16_BITS = (
    "bias_backward_weight", "gelu_forward", "bias_gelu_forward", "gelu_backward_input",
    "layernorm_forward", "layernorm_backward_input", "layernorm_backward_weight",
    "rmsnorm_forward", "rmsnorm_backward_input", "rmsnorm_backward_weight",
    "attention_forward", "attention_backward_input", "cross_entropy_forward",
    "cross_entropy_backward_input", "adamw_step",
)


class FusedOps(Fused, CupyOps):
    """The array functions of `CupyOps` in float32, those that `Fused` has by its kernels."""

    takes_16_bits = CupyOps.takes_16_bits + FUSED_16_BITS
    tiled_head_width = MOST_WIDTH

    def __init__(self, gemm="blas", tf32=False, host_rank=0):
        CupyOps.__init__(self, "float32", gemm, tf32, host_rank)
        loader = Loader(self.xp)
        Fused.__init__(self, self.xp, loader)
        self._tiles = (TileModelAttention(self.xp, loader, cuda_tile()) if gemm == "cuda-tile"
                       else Attention(self.xp, loader))

    def bias_backward_weight(self, dy, db):
        """Add the sum of dy (..., M) over its leading dimensions to db (M,)."""
        self.column_sums(dy, db)

    # Attention: in tiles, which leave only log-sum-exp, or with whole scores where heads are too
    # wide for a tile. Scores are float32 until they are probabilities, whatever the operands are.

    def attention_forward(self, qkv, positions):
        """Return (y, saved) of causal attention: what `attention_backward_input` takes.

        qkv (B, T, 3, H, d), positions (T,); y (B, T, H, d), saved y itself and lse (B, H, T), or
        probs (B, H, T, T).
        """
        if qkv.shape[-1] > self.tiled_head_width:
            return self._scores_forward(qkv, positions)
        saved = self._tiles.forward(*_parts(qkv), positions, qkv.shape[-1] ** -0.5)
        return saved[0], saved

    def attention_backward_input(self, dy, qkv, saved, positions):
        """Return dqkv (B, T, 3, H, d)."""
        dqkv = self.xp.empty_like(qkv)
        if qkv.shape[-1] > self.tiled_head_width:
            self._scores_backward(dy, qkv, saved, dqkv)
        else:
            self._tiles.backward(dy, *_parts(qkv), *saved, positions, qkv.shape[-1] ** -0.5,
                                 _parts(dqkv))
        return dqkv

    def _scores_forward(self, qkv, positions):
        """Return (y (B, T, H, d), probs (B, H, T, T))."""
        q, k, v = self._heads_first(qkv)
        scores = self._float32_products(q, k)
        self.causal_softmax_forward(scores, positions, qkv.shape[-1] ** -0.5)
        probs = scores.astype(qkv.dtype, copy=False)
        y = self.xp.empty(qkv[:, :, 0].shape, qkv.dtype)
        self.stacked_products(probs, v, y.transpose(0, 2, 1, 3))
        return y, probs

    def _scores_backward(self, dy, qkv, probs, dqkv):
        """Write dqkv (B, T, 3, H, d)."""
        q, k, v = self._heads_first(qkv)
        dq, dk, dv = self._heads_first(dqkv)
        dy = dy.transpose(0, 2, 1, 3)  # (B, H, T, d)
        self.stacked_products(probs.transpose(0, 1, 3, 2), dy, dv)
        dscores = self._float32_products(dy, v)
        self.causal_softmax_backward(
            probs.astype(np.float32, copy=False), dscores, qkv.shape[-1] ** -0.5)
        dscores = dscores.astype(qkv.dtype, copy=False)
        self.stacked_products(dscores, k, dq)
        self.stacked_products(dscores.transpose(0, 1, 3, 2), q, dk)

    def _float32_products(self, a, b):
        """Return a b^T (B, H, T, T) in float32 of a and b (B, H, T, d)."""
        out = self.xp.empty((*a.shape[:3], b.shape[2]), np.float32)
        return self.stacked_products(a, b.transpose(0, 1, 3, 2), out)

    # Loss over a vocabulary shard.

    def cross_entropy_forward(self, logits, targets, start, num_valid):
        """Return stats (N, 3): maximum, sum of exp(logit - maximum), logit of the target or 0."""
        return self.cross_entropy_stats(
            logits, valid_columns(logits, start, num_valid), targets, start)

    def cross_entropy_backward_input(self, logits, targets, lse, start, num_valid, scale):
        """Write (softmax - onehot) * scale over logits (padding: 0) and return that array."""
        self.cross_entropy_backward(
            logits, valid_columns(logits, start, num_valid), targets, lse, start, scale)
        return logits


def _parts(packed):
    """Return the three views (B, T, H, d) of a packed (B, T, 3, H, d) array, no copy."""
    return tuple(packed[:, :, i] for i in range(3))
