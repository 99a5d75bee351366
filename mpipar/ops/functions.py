# mypy: disable-error-code="empty-body"
"""The array functions: the arguments and results of each, with their types and shapes.

`Ops` is what layers and models call, whatever computes. A new function is a signature here, with a
line that says its shapes (`signature`), and a formula in `array_ops`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from mpipar.ops.signature import (
    DIMS,
    Array,
    Function,
    Runs,
    Shape,
    ThreeArrays,
    memory,
    shape_of,
    shapes,
)


class Ops:
    """All array functions of one device in one floating-point type; `array_ops` has their text.

    dtype: of activations. statistics: of gradients and sums. tiled_head_width: the widest head
    whose attention keeps a number per query, not its scores. table_multiple: of what the rows of a
    shard of a vocabulary's table are. Tensor cores read a matrix at full speed only if its rows
    start at multiples of 16 bytes. They multiply it in tiles of up to 128 rows.
    """

    dtype: np.dtype
    statistics: np.dtype
    device: str
    tiled_head_width: int
    table_multiple: int

    def _call(self, function: Function, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Return what a function gives that has no method of its own."""
        raise TypeError(f"{type(self).__name__} has no {function.name}")

    # Memory.

    @memory
    def empty(self, shape: Shape, dtype: Any = None, label: str = "stash") -> Array: ...
    @memory
    def zeros(self, shape: Shape, dtype: Any = None, label: str = "stash") -> Array: ...
    @memory
    def asarray(self, host: np.ndarray) -> Array: ...
    @memory
    def to_host(self, x: Array) -> np.ndarray: ...
    @memory
    def numbers(self, xs: Sequence[Any]) -> list[float]: ...
    @memory
    def pinned(self, shape: Shape, dtype: Any) -> np.ndarray: ...
    @memory
    def to_pinned(self, x: Array) -> np.ndarray: ...
    @memory
    def row_counts(
        self, counts: Array, total: int, most: Shape = (), own: slice | None = None
    ) -> list[int]: ...
    @memory
    def block_order(self, blocks: Sequence[Sequence[int]]) -> tuple[Array, Array]: ...
    @memory
    def synchronize(self) -> None: ...
    @memory
    def instant(self) -> Any: ...
    @memory
    def nanoseconds(self, instants: Sequence[Any]) -> list[int]: ...

    @shapes("x[..]+ value ->")
    def fill(self, x: Array, value: float) -> None: ...
    @shapes("dst[..]+ src[..] ->")
    def copy(self, dst: Array, src: Array) -> None: ...

    # Sums and products.

    @shapes("x[..]+ factor -> x")
    def scale(self, x: Array, factor: float) -> Array: ...
    @shapes("x[..]+ y[..] -> x")
    def accumulate(self, x: Array, y: Array) -> Array: ...
    @shapes("parts[P..] -> sum[..]")
    def add_parts(self, parts: Array) -> Array: ...
    @shapes("x[..] -> total:host")
    def sum(self, x: Array) -> Any: ...
    @shapes("x[..] -> total:host")
    def square_sum(self, x: Array) -> Any: ...
    @shapes("x[..] -> total:host")
    def checksum(self, x: Array) -> int: ...
    @shapes("x[..K] w[KM] -> y[..M]")
    def matmul(self, x: Array, w: Array) -> Array: ...
    @shapes("x[..M] w[KM] -> y[..K]")
    def matmul_nt(self, x: Array, w: Array) -> Array: ...
    @shapes("x[..K] y[..M] out[KM]+ ->")
    def matmul_tn_add(self, x: Array, y: Array, out: Array) -> None: ...
    @shapes("x[..K] w[KM] b[M] residual[..M]? -> y[..M]")
    def matmul_bias(
        self, x: Array, w: Array, b: Array, residual: Array | None = None
    ) -> Array: ...
    @shapes("x[..K] w[KM] b[M] -> a[..M] h[..M]")
    def matmul_bias_gelu(self, x: Array, w: Array, b: Array) -> tuple[Array, Array]: ...
    @shapes("x[..K] y[..M] out[KM]+ sums[M]+ fresh ->")
    def matmul_tn_add_sums(
        self, x: Array, y: Array, out: Array, sums: Array, fresh: bool
    ) -> None: ...
    @shapes("dy[..M] w[KM] h[..K] -> dh[..K]")
    def matmul_nt_gelu_backward(self, dy: Array, w: Array, h: Array) -> Array: ...
    @shapes("y[..M]+ b[M] -> y")
    def bias_forward(self, y: Array, b: Array) -> Array: ...
    @shapes("y[..M]+ b[M] residual[..M] -> y")
    def bias_residual_forward(self, y: Array, b: Array, residual: Array) -> Array: ...
    @shapes("dy[..M] db[M]+ ->")
    def bias_backward_weight(self, dy: Array, db: Array) -> None: ...

    @shapes("x[..D] y[..D] -> dots[..]:sum")
    def row_dots(self, x: Array, y: Array) -> Array: ...
    @shapes("x[..D]+ factors[..] -> x")
    def scale_rows(self, x: Array, factors: Array) -> Array: ...

    # Experts: E of them, of which each of N tokens passes K. R rows in the order of their experts;
    # counts says how many of them each expert has.

    @shapes("x[RK] w[EKM] counts -> y[RM]")
    def grouped_matmul(self, x: Array, w: Array, counts: Sequence[int]) -> Array: ...
    @shapes("x[RM] w[EKM] counts -> y[RK]")
    def grouped_matmul_nt(self, x: Array, w: Array, counts: Sequence[int]) -> Array: ...
    @shapes("x[RK] y[RM] out[EKM]+ counts ->")
    def grouped_matmul_tn_add(
        self, x: Array, y: Array, out: Array, counts: Sequence[int]
    ) -> None: ...
    @shapes("x[ND] w[ED] -> logits[NE]:sum")
    def router_forward(self, x: Array, w: Array) -> Array: ...
    @shapes("dlogits[NE] w[ED] -> dx[ND]")
    def router_backward_input(self, dlogits: Array, w: Array) -> Array: ...
    @shapes("dlogits[NE] x[ND] dw[ED]+ ->")
    def router_backward_weight(self, dlogits: Array, x: Array, dw: Array) -> None: ...
    @shapes("logits[NE] count=K bias[..E]? -> ids[NK]:int64 probs[NK]:sum")
    def choice_forward(
        self, logits: Array, count: int, bias: Array | None = None
    ) -> tuple[Array, Array]: ...
    @shapes("dprobs[NK] probs[NK] ids[NK] experts=E -> dlogits[NE]:sum")
    def choice_backward_input(
        self, dprobs: Array, probs: Array, ids: Array, experts: int
    ) -> Array: ...
    @shapes("ids[BM] experts=E -> loads[BE]:sum")
    def expert_loads(self, ids: Array, experts: int) -> Array: ...
    @shapes("ids[NK] -> order[NK]:int64 tokens[NK]:int64 places[NK]:int64")
    def expert_order(self, ids: Array) -> ThreeArrays: ...
    @shapes("rows[NKD] probs[NK]? -> y[ND]")
    def combine_rows(self, rows: Array, probs: Array | None = None) -> Array: ...
    @shapes("dlogits[BTE]+ logits[BTE] loads[BE] factor ->")
    def balance_backward_input(
        self, dlogits: Array, logits: Array, loads: Array, factor: float
    ) -> None: ...
    @shapes("loads[BE] excess[E]+ ->")
    def add_excess(self, loads: Array, excess: Array) -> None: ...

    # Activations. Two of h are gate and up.

    @shapes("x[..] -> y[..]")
    def gelu_forward(self, x: Array) -> Array: ...
    @shapes("dy[..] x[..] -> dx[..]")
    def gelu_backward_input(self, dy: Array, x: Array) -> Array: ...
    @shapes("x[..M]+ b[M] -> y[..M]")
    def bias_gelu_forward(self, x: Array, b: Array) -> Array: ...
    @shapes("h[..2F] -> y[..F]")
    def swiglu_forward(self, h: Array) -> Array: ...
    @shapes("dy[..F] h[..2F] -> dh[..2F] y[..F]")
    def swiglu_backward_input(self, dy: Array, h: Array) -> tuple[Array, Array]: ...

    # Norms.

    @shapes("x[..D] w[D] eps -> y[..D] rstd[..]:sum")
    def rmsnorm_forward(self, x: Array, w: Array, eps: float) -> tuple[Array, Array]: ...
    @shapes("dy[..D] x[..D] w[D] rstd[..] -> dx[..D]")
    def rmsnorm_backward_input(self, dy: Array, x: Array, w: Array, rstd: Array) -> Array: ...
    @shapes("dy[..D] x[..D] w[D] rstd[..] residual[..D] -> dx[..D]")
    def rmsnorm_residual_backward_input(
        self, dy: Array, x: Array, w: Array, rstd: Array, residual: Array
    ) -> Array: ...
    @shapes("dy[..D] x[..D] rstd[..] dw[D]+ ->")
    def rmsnorm_backward_weight(self, dy: Array, x: Array, rstd: Array, dw: Array) -> None: ...
    @shapes("x[..D] w[D] b[D] eps -> y[..D] mean[..]:sum rstd[..]:sum")
    def layernorm_forward(self, x: Array, w: Array, b: Array, eps: float) -> ThreeArrays: ...
    @shapes("dy[..D] x[..D] w[D] mean[..] rstd[..] -> dx[..D]")
    def layernorm_backward_input(
        self, dy: Array, x: Array, w: Array, mean: Array, rstd: Array
    ) -> Array: ...
    @shapes("dy[..D] x[..D] w[D] mean[..] rstd[..] residual[..D] -> dx[..D]")
    def layernorm_residual_backward_input(
        self, dy: Array, x: Array, w: Array, mean: Array, rstd: Array, residual: Array
    ) -> Array: ...
    @shapes("dy[..D] x[..D] mean[..] rstd[..] dw[D]+ db[D]+ ->")
    def layernorm_backward_weight(
        self, dy: Array, x: Array, mean: Array, rstd: Array, dw: Array, db: Array
    ) -> None: ...

    # Embeddings and positions. P positions; h is d/2, and those of the tokens are (T,) or (B, T).

    @shapes("ids[..] table[VD] start -> y[..D]")
    def embedding_forward(self, ids: Array, table: Array, start: int) -> Array: ...
    @shapes("ids[..] dy[..D] dtable[VD]+ start ->")
    def embedding_backward_weight(
        self, ids: Array, dy: Array, dtable: Array, start: int
    ) -> None: ...
    @shapes("x[BTD] positions[T] table[PD] -> y[BTD]")
    def position_forward(self, x: Array, positions: Array, table: Array) -> Array: ...
    @shapes("positions[T] dy[BTD] dtable[PD]+ ->")
    def position_backward_weight(self, positions: Array, dy: Array, dtable: Array) -> None: ...
    @shapes("x[BTHd]+ positions table[P2h] -> x")
    def rope_forward(self, x: Array, positions: Array, table: Array) -> Array: ...
    @shapes("dy[BTHd]+ positions table[P2h] -> dy")
    def rope_backward_input(self, dy: Array, positions: Array, table: Array) -> Array: ...

    # Attention. Q queries, K keys, H heads, G heads of keys and values. What is saved may be a
    # pair instead.

    @shapes("q[BQHd] k[BKGd] v[BKGd] q_pos[Q] k_pos[K] -> y[BQHd] saved[BHQK]")
    def attention_forward(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array
    ) -> tuple[Array, Any]: ...
    @shapes("dy[BQHd] q[BQHd] k[BKGd] v[BKGd] saved q_pos[Q] k_pos[K] out? -> "
            "dq[BQHd] dk[BKGd] dv[BKGd]")
    def attention_backward_input(
        self, dy: Array, q: Array, k: Array, v: Array, saved: Any, q_pos: Array, k_pos: Array, *,
        out: ThreeArrays | None = None
    ) -> ThreeArrays: ...
    @shapes("q[BQHd] k[BKGd] v[BKGd] q_pos[Q] k_pos[K] -> y[BQHd]:sum stats[BHQ2]:sum")
    def attention_block_forward(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array
    ) -> tuple[Array, Array]: ...
    @shapes("dy[BQHd] q[BQHd] k[BKGd] v[BKGd] stats[BHQ2] delta[BHQ] q_pos[Q] k_pos[K] -> "
            "dq[BQHd]:sum dk[BKGd]:sum dv[BKGd]:sum")
    def attention_block_backward(
        self, dy: Array, q: Array, k: Array, v: Array, stats: Array, delta: Array, *,
        q_pos: Array, k_pos: Array
    ) -> ThreeArrays: ...
    @shapes("y[BQHd]+ stats[BHQ2]+ y2[BQHd] stats2[BHQ2] ->")
    def attention_merge(self, y: Array, stats: Array, y2: Array, stats2: Array) -> None: ...
    @shapes("dy[BQHd] y[BQHd] -> delta[BHQ]:sum")
    def attention_delta(self, dy: Array, y: Array) -> Array: ...

    # Loss and choice of tokens.

    @shapes("logits[..V] targets[..] start num_valid -> stats[..3]:sum")
    def cross_entropy_forward(
        self, logits: Array, targets: Array, start: int, num_valid: int
    ) -> Array: ...
    @shapes("stats[SN3] -> loss[N]:sum sums[N2]:sum")
    def cross_entropy_combine(self, stats: Array) -> tuple[Array, Array]: ...
    @shapes("logits[..V]+ targets[..] sums[..2] start num_valid scale -> logits")
    def cross_entropy_backward_input(
        self, logits: Array, targets: Array, sums: Array, start: int, num_valid: int, scale: float
    ) -> Array: ...
    @shapes("logits[..V] start num_valid count=K -> best[..K2]:float64")
    def top_forward(self, logits: Array, start: int, num_valid: int, count: int) -> Array: ...

    # Images.

    @shapes("x[BHWC] kernel stride padding -> y[BPQK]")
    def unfold_forward(self, x: Array, kernel: int, stride: int, padding: int) -> Array: ...
    @shapes("dy[BPQK] shape=BHWC kernel stride padding -> dx[BHWC]")
    def unfold_backward_input(
        self, dy: Array, shape: Shape, kernel: int, stride: int, padding: int
    ) -> Array: ...
    @shapes("x[BHWC] width -> y[BPQC] places[BPQC]:int64")
    def maxpool_forward(self, x: Array, width: int) -> tuple[Array, Array]: ...
    @shapes("dy[BPQC] places[BPQC] shape=BHWC width -> dx[BHWC]")
    def maxpool_backward_input(
        self, dy: Array, places: Array, shape: Shape, width: int
    ) -> Array: ...
    @shapes("x[BHWC] -> y[BC]")
    def meanpool_forward(self, x: Array) -> Array: ...
    @shapes("dy[BC] shape=BHWC -> dx[BHWC]")
    def meanpool_backward_input(self, dy: Array, shape: Shape) -> Array: ...

    # Updates.

    @shapes("data[..]+ grad[..] rate ->")
    def sign_step(self, data: Array, grad: Array, rate: float) -> None: ...
    @shapes("data[..]+ grad[..] lr ->")
    def sgd_step(self, data: Array, grad: Array, lr: float) -> None: ...
    @shapes("data[..]+ grad[..] m[..]+ v[..]+ lr beta1 beta2 eps weight_decay step copy[..]+? ->")
    def adamw_step(
        self, data: Array, grad: Array, m: Array, v: Array, *, lr: float, beta1: float,
        beta2: float, eps: float, weight_decay: float, step: int, copy: Array | None = None
    ) -> None: ...
    @shapes("data[..]+ grad[..] m[..]+ v[..]+ runs lr beta1 beta2 eps weight_decay step "
            "copy[..]+? ->")
    def adamw_runs(
        self, data: Array, grad: Array, m: Array, v: Array, runs: Runs, *, lr: float,
        beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
        copy: Array | None = None
    ) -> None: ...


DECLARED: dict[str, Function] = {
    name: method.function for name, method in vars(Ops).items() if hasattr(method, "function")}
MEMORY = [name for name, function in DECLARED.items() if function.text == "->"]
FUNCTIONS = {name: function for name, function in DECLARED.items() if name not in MEMORY}
# FLOPs: a number and the sizes that it is multiplied by.
EPILOGUES = (
    "matmul_bias", "matmul_bias_gelu", "matmul_nt_gelu_backward", "matmul_tn_add_sums")
FLOPS = dict.fromkeys(("matmul", "matmul_nt", "matmul_tn_add", *EPILOGUES), "2..KM")
FLOPS |= dict.fromkeys(
    ("grouped_matmul", "grouped_matmul_nt", "grouped_matmul_tn_add"), "2RKM")
FLOPS |= dict.fromkeys(
    ("router_forward", "router_backward_input", "router_backward_weight"), "2NED")
# These take 16 bits as they are. They move values, add two numbers of one type (which rounds once),
# or work on arrays that are float32 anyway.
EXACT_IN_16_BITS = (
    "fill", "copy", "scale", "accumulate", "bias_forward", "bias_residual_forward",
    "embedding_forward", "sum", "square_sum", "checksum", "attention_merge",
    "cross_entropy_combine", "sign_step", "sgd_step", "adamw_step", "adamw_runs",
)
# Two functions one after the other, which a device may have as one that rounds once.
COMPOSED = (*EPILOGUES, "bias_gelu_forward", "layernorm_residual_backward_input",
            "rmsnorm_residual_backward_input")


def flops(name: str, sizes: Mapping[str, Any]) -> int:
    """Return the floating-point operations of a call of a product, 0 of other functions."""
    return prod(shape_of(DIMS.findall(FLOPS[name]), sizes)) if name in FLOPS else 0
