"""The array functions on a GPU in fused kernels: `--kernels fused`, the default of `--device cuda`.

Products and embeddings are those of `cupy_ops`. Every chain of elementwise functions and
sums between them is one kernel of `ops/cuda`. The kernels read and round 16-bit operands
themselves, and compute in float32. There are no such kernels for float64.
"""

from typing import Any

import numpy as np

from mpipar.ops.arrays import as_rows
from mpipar.ops.cuda.attention import MOST_WIDTH, Attention
from mpipar.ops.cuda.epilogues import Epilogues
from mpipar.ops.cuda.fused import Fused
from mpipar.ops.cuda.kernels import Loader
from mpipar.ops.cupy_ops import CupyOps
from mpipar.ops.functions import EPILOGUES
from mpipar.ops.signature import Array, ThreeArrays

# Functions besides the products that take 16-bit operands as they are.
FUSED_16_BITS = (
    *EPILOGUES,
    "swiglu_forward",
    "swiglu_backward_input",
    "rope_forward",
    "rope_backward_input",
    "bias_backward_weight",
    "gelu_forward",
    "gelu_backward_input",
    "layernorm_forward",
    "layernorm_backward_input",
    "layernorm_backward_weight",
    "rmsnorm_forward",
    "rmsnorm_backward_input",
    "rmsnorm_backward_weight",
    "attention_forward",
    "attention_backward_input",
    "attention_block_forward",
    "attention_delta",
    "attention_block_backward",
    "cross_entropy_forward",
    "cross_entropy_backward_input",
    "adamw_runs",
)


# The formulas of CupyOps also take `out`, which only the loop over tiles passes to them.
class FusedOps(Fused, CupyOps):  # type: ignore[misc]
    """The array functions of `CupyOps` in float32; kernels of `Fused` replace the plain ones."""

    takes_16_bits = CupyOps.takes_16_bits + FUSED_16_BITS
    tiled_head_width = MOST_WIDTH

    def __init__(self, gemm: str = "blas", host_rank: int = 0) -> None:
        CupyOps.__init__(self, "float32", gemm, host_rank)
        loader = Loader(self.xp)
        Fused.__init__(self, self.xp, loader)
        self._tiles = Attention(self.xp, loader)
        self._epilogues = (
            Epilogues(self.xp, self._blas, speaks=host_rank == 0) if gemm == "blas" else None
        )

    # Products with what follows them, where cuBLASLt has both as one function.

    def matmul_bias(self, x: Array, w: Array, b: Array | None) -> Array:
        """Return x w (..., M), plus b if there is one."""
        if b is not None and self._epilogues is not None:
            y = self.xp.empty((*x.shape[:-1], w.shape[1]), x.dtype)
            if self._epilogues.with_bias(as_rows(x), w, as_rows(y), self._whole(b)):
                return y
            del y
        return super().matmul_bias(x, w, b)

    def matmul_tn_add_sums(self, x: Array, y: Array, out: Array, sums: Array | None) -> None:
        """Add x^T y to out as `matmul_tn_add` does, and the sum of the rows of y to sums (M,)."""
        if sums is not None and self._epilogues is not None:
            made = self.xp.empty(sums.shape, sums.dtype)  # which the product's kernel overwrites
            if self._epilogues.with_sums(as_rows(x).T, as_rows(y), out, made):
                self.accumulate(sums, made)
                return
        super().matmul_tn_add_sums(x, y, out, sums)

    # Attention runs in tiles, which keep two numbers per query. If heads are too wide for a tile,
    # the plain formula with whole scores is used. Scores are float32 until they are probabilities,
    # whatever the operands are.

    def attention_forward(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array
    ) -> tuple[Array, Any]:
        """Return (y, saved): y itself and stats (B, H, Tq, 2), or probs (B, H, Tq, Tk)."""
        if q.shape[-1] > self.tiled_head_width:
            return super().attention_forward(q, k, v, q_pos, k_pos)
        saved = self._tiles.forward(q, k, v, q_pos, k_pos)
        return saved[0], saved

    def attention_backward_input(
        self,
        dy: Array,
        q: Array,
        k: Array,
        v: Array,
        saved: Any,
        q_pos: Array,
        k_pos: Array,
        *,
        out: ThreeArrays | None = None,
    ) -> ThreeArrays:
        """Return (dq, dk, dv), written to the three arrays `out` if they are given."""
        if q.shape[-1] > self.tiled_head_width:
            return super().attention_backward_input(dy, q, k, v, saved, q_pos, k_pos, out=out)
        results = out or tuple(self.xp.empty(x.shape, x.dtype) for x in (q, k, v))
        y, stats = saved
        delta = self._tiles.delta(dy, y)
        return self._tiles.backward(
            dy, q, k, v, stats, delta, q_pos=q_pos, k_pos=k_pos, out=results
        )

    def attention_block_forward(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array
    ) -> tuple[Array, Array]:
        """Return (y (B, Tq, H, d), stats (B, H, Tq, 2)) over these keys; y = 0 without keys."""
        if q.shape[-1] > self.tiled_head_width:
            return super().attention_block_forward(q, k, v, q_pos, k_pos)
        return self._tiles.forward(q, k, v, q_pos, k_pos, wide=True)

    def attention_delta(self, dy: Array, y: Array) -> Array:
        """Return delta (B, H, Tq), the sum of dy y over a head, where y is over all keys."""
        return self._tiles.delta(dy, y)

    def attention_block_backward(
        self,
        dy: Array,
        q: Array,
        k: Array,
        v: Array,
        stats: Array,
        delta: Array,
        *,
        q_pos: Array,
        k_pos: Array,
    ) -> ThreeArrays:
        """Return the parts of (dq, dk, dv) due to these keys; stats and delta are over all keys."""
        if q.shape[-1] > self.tiled_head_width:
            return super().attention_block_backward(
                dy, q, k, v, stats, delta, q_pos=q_pos, k_pos=k_pos
            )
        return self._tiles.backward(dy, q, k, v, stats, delta, q_pos=q_pos, k_pos=k_pos)

    def _causal_softmax(self, scores: Array, q_pos: Array, k_pos: Array, factor: float) -> Array:
        self.causal_softmax_forward(scores, q_pos, k_pos, factor)
        return scores

    def _softmax_backward(self, probs: Array, dprobs: Array, factor: float) -> Array:
        self.causal_softmax_backward(probs.astype(np.float32, copy=False), dprobs, factor)
        return dprobs
