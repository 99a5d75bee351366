"""The array functions on a GPU in fused kernels: `--kernels fused`, the default of `--device cuda`.

Products, embeddings and images are those of `cupy_ops`. Every chain of elementwise functions and
sums between them is one kernel of `ops/cuda`. The kernels read and round operands of 16 bits
themselves, and compute in float32. There are no such kernels for float64.
"""

import numpy as np

from mpipar.ops.cuda.attention import MOST_WIDTH, Attention
from mpipar.ops.cuda.fused import Fused
from mpipar.ops.cuda.loader import Loader
from mpipar.ops.cuda.tile_model import TileModelAttention
from mpipar.ops.cupy_ops import CupyOps, cuda_tile
from mpipar.ops.loss_ops import valid_columns

# The functions beside products that take operands of 16 bits as they are.
FUSED_16_BITS = (
    "swiglu_forward", "swiglu_backward_input", "rope_forward", "rope_backward_input",
    "bias_backward_weight", "gelu_forward", "bias_gelu_forward", "gelu_backward_input",
    "layernorm_forward", "layernorm_backward_input", "layernorm_backward_weight",
    "rmsnorm_forward", "rmsnorm_backward_input", "rmsnorm_backward_weight",
    "attention_forward", "attention_backward_input", "attention_block_forward", "attention_delta",
    "attention_block_backward", "cross_entropy_forward",
    "cross_entropy_backward_input", "adamw_runs",
)


class FusedOps(Fused, CupyOps):
    """The array functions of `CupyOps` in float32; kernels of `Fused` replace the plain ones."""

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

    # Attention runs in tiles, which leave only log-sum-exp. If heads are too wide for a tile, it is
    # the plain formula with whole scores; `kernels.ATTENTION` is the table. Scores are float32
    # until they are probabilities, whatever the operands are.

    def attention_forward(self, q, k, v, q_pos, k_pos):
        """Return (y, saved): y itself and lse (B, H, Tq), or probs (B, H, Tq, Tk)."""
        if q.shape[-1] > self.tiled_head_width:
            return super().attention_forward(q, k, v, q_pos, k_pos)
        saved = self._tiles.forward(q, k, v, q_pos, k_pos)
        return saved[0], saved

    def attention_backward_input(self, dy, q, k, v, saved, q_pos, k_pos, *, out=None):
        """Return (dq, dk, dv), written to the three arrays `out` if they are given."""
        if q.shape[-1] > self.tiled_head_width:
            return super().attention_backward_input(dy, q, k, v, saved, q_pos, k_pos, out=out)
        out = out or tuple(self.xp.empty(x.shape, x.dtype) for x in (q, k, v))
        y, lse = saved
        delta = self._tiles.delta(dy, y)
        return self._tiles.backward(
            dy, q, k, v, lse, delta, q_pos=q_pos, k_pos=k_pos, out=out)

    def attention_block_forward(self, q, k, v, q_pos, k_pos):
        """Return (y (B, Tq, H, d), lse (B, H, Tq)) over these keys; no key: y = 0, lse = -inf."""
        if q.shape[-1] > self.tiled_head_width:
            return super().attention_block_forward(q, k, v, q_pos, k_pos)
        return self._tiles.forward(q, k, v, q_pos, k_pos, wide=True)

    def attention_delta(self, dy, y):
        """Return delta (B, H, Tq), the sum of dy y over a head; y of all keys."""
        return self._tiles.delta(dy, y)

    def attention_block_backward(self, dy, q, k, v, lse, delta, *, q_pos, k_pos):
        """Return (dq, dk, dv) as far as they come from these keys; lse and delta are of all."""
        if q.shape[-1] > self.tiled_head_width:
            return super().attention_block_backward(
                dy, q, k, v, lse, delta, q_pos=q_pos, k_pos=k_pos)
        return self._tiles.backward(dy, q, k, v, lse, delta, q_pos=q_pos, k_pos=k_pos)

    def _causal_softmax(self, scores, q_pos, k_pos, factor):
        self.causal_softmax_forward(scores, q_pos, k_pos, factor)
        return scores

    def _softmax_backward(self, probs, dprobs, factor):
        self.causal_softmax_backward(probs.astype(np.float32, copy=False), dprobs, factor)
        return dprobs

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
