"""The array functions on shapes only: no numbers, but FLOPs, bytes and live memory.

The real engine and the real layers run on these, so the cost model is the code itself. Every
function allocates what that of `NumpyOps` allocates. Buffers that `NumpyOps` keeps between calls
are counted as *scratch*, on request. The table of `functions` determines shapes and types of
results.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.cuda.attention import parts_shape
from mpipar.ops.functions import EPILOGUES, Ops
from mpipar.ops.numpy_attention import GAP, QUERY_TILE, part_sizes
from mpipar.ops.numpy_ops import PRODUCT_TILE
from mpipar.ops.shape_array import Ledger, ShapeArray
from mpipar.ops.signature import DIMS, Array, Function, Part, Shape, ThreeArrays, shape_of


class Recording(Protocol):
    """Who says in which phase a product runs: the recorder of a step."""

    @property
    def phase(self) -> str: ...


class ShapeOps(Ops):
    """The array functions on `ShapeArray`.

    flops: phase -> FLOPs of products (2 M K N each).
    live: label -> bytes alive now.
    peak: label -> bytes alive when their sum was largest.
    like: the class of array functions whose bytes are counted. keeps_scratch: whether these are
    those of `NumpyOps`, which keeps buffers of its own.
    """

    def __init__(
        self,
        dtype: DTypeLike,
        recorder: Recording | None = None,
        like: type[ArrayOps] = ArrayOps,
        keeps_scratch: bool = False,
    ) -> None:
        self.takes_16_bits, self.tiled_head_width = like.takes_16_bits, like.tiled_head_width
        self.table_multiple = like.table_multiple
        self.xp = ModuleType("shapes")  # which computes nothing
        self.dtype = self.accum_dtype = np.dtype(dtype)
        self.device = "shapes"
        self.worst_case = False  # whether the experts of this rank get as many rows as possible
        self.recorder = recorder
        self.flops: Counter[str] = Counter()
        self._ledger = Ledger()
        self._scratch: dict[str, Array] | None = {} if keeps_scratch else None

    @property
    def live(self) -> dict[str, int]:
        """Label -> bytes of the arrays that are alive now."""
        return {label: size for label, size in self._ledger.live.items() if size}

    @property
    def peak(self) -> dict[str, int]:
        """Label -> bytes alive at the instant at which their sum was largest."""
        return dict(self._ledger.peak)

    def reset_peak(self) -> None:
        """Restart the search for the largest sum, from what is alive now."""
        self._ledger.reset_peak()

    def _count(self, flops: int) -> None:
        phase = "" if self.recorder is None else self.recorder.phase
        self.flops[phase] += flops

    # Memory.

    def empty(self, shape: Shape, dtype: DTypeLike | None = None, label: str = "stash") -> Array:
        """Return a new array, its bytes counted under the label until its last view is gone."""
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        dtype = self.dtype if dtype is None else dtype
        return ShapeArray.allocate(self._ledger, shape, dtype, label)

    def zeros(self, shape: Shape, dtype: DTypeLike | None = None, label: str = "stash") -> Array:
        """Return a new array."""
        return self.empty(shape, dtype, label)

    def asarray(self, host: np.ndarray) -> Array:
        """Return an array with a host array's shape and type; a ShapeArray is returned as it is."""
        return host if isinstance(host, ShapeArray) else self.empty(host.shape, host.dtype)

    def to_host(self, x: Array) -> np.ndarray:
        """Return a NumPy array of zeros in the shape of x."""
        return np.zeros(x.shape, x.dtype)

    def to_floats(self, xs: Sequence[Any]) -> list[float]:
        """Return a zero for each number."""
        return [0.0 for _ in xs]

    def counts_to_host(
        self, counts: Array, total: int, most: Shape = (), own: slice | None = None
    ) -> list[int]:
        """Return as many numbers as counts has; they differ by one at most, and their sum is total.

        In the worst case those in `own` add up to the product of `most`, and the others are 0.
        """
        found = [0] * counts.size
        worst = bool(most) and self.worst_case
        places = range(counts.size)[(worst and own) or slice(None)]
        total, parts = math.prod(most) if worst else total, len(places)
        for part, place in enumerate(places):
            found[place] = total * (part + 1) // parts - total * part // parts
        return found

    def block_order(self, blocks: Sequence[Sequence[int]]) -> tuple[Array, Array]:
        """Return two new arrays with a number for each row."""
        rows = sum(map(sum, blocks))
        return self.empty((rows,), np.int64), self.empty((rows,), np.int64)

    # These concern only the host.
    pinned, to_pinned = ArrayOps.pinned, ArrayOps.to_pinned
    synchronize, timestamp, nanoseconds = (
        ArrayOps.synchronize,
        ArrayOps.timestamp,
        ArrayOps.nanoseconds,
    )

    # All functions that have no method here.

    def _lend(self, name: str, size: int) -> None:
        """Count the buffer of this name as `NumpyOps._buffer` keeps it: its largest size so far."""
        if self._scratch is not None and size > getattr(self._scratch.get(name), "size", 0):
            self._scratch[name] = self.empty((size,), label="scratch")

    def copy(self, dst: Array, src: Array) -> None:
        """Copy nothing; as shapes' most frequent function it has a short way."""
        assert dst.shape == src.shape, (dst.shape, src.shape)

    def matmul_tn_add(self, x: Array, y: Array, out: Array) -> None:
        """Add a product to out, through a buffer for a block of its rows."""
        rows, columns = out.shape if out.strides[0] >= out.strides[1] else out.shape[::-1]
        self._lend("product", columns * min(rows, max(64, PRODUCT_TILE // max(1, columns))))
        super().matmul_tn_add(x, y, out)

    def _call(self, function: Function, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Count the FLOPs and bytes of a function, and return what it returns."""
        if function.name in EPILOGUES and function.name not in self.takes_16_bits:
            return getattr(ArrayOps, function.name)(self, *arguments, **named)  # one after another
        given = function.bind(arguments, named)
        sizes = function.sizes(given)
        if function.flops:
            self._count(math.prod(shape_of(DIMS.findall(function.flops), sizes)))
        real = [x.dtype for _, x in function.arrays(given) if x.dtype.kind not in "iu"]
        results = tuple(self._result(part, sizes, given, real) for part in function.gives)
        return results if len(results) > 1 else results[0] if results else None

    def _result(
        self, part: Part, sizes: Mapping[str, Any], given: Mapping[str, Any], real: list[np.dtype]
    ) -> Any:
        """Return one result; real: types of the arguments that are real numbers."""
        if part.kind == "host":
            return 0.0
        if part.name in given:
            return given[part.name]
        dtype = {"": (*real, None)[0], "sum": self.accum_dtype}.get(part.kind, part.kind)
        return self.empty(shape_of(part.dims or (), sizes), dtype)

    # Attention. FLOPs are those of the full square, the convention of published model FLOPs: a
    # product of all queries with all keys takes 2 B H Tq d Tk.

    def attention_forward(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array
    ) -> tuple[Array, Any]:
        """Return (y (B, Tq, H, d), probs (B, H, Tq, Tk) or, in tiles, (y, stats)); two products."""
        self._count(2 * 2 * q.size * k.shape[1])
        self._lend_tiles(q, k, "queries", turned=("keys",), of_keys=("values",))
        if q.shape[-1] > self.tiled_head_width:
            return super().attention_forward(q, k, v, q_pos, k_pos)
        batch, queries, heads, _ = q.shape
        y = self.empty(q.shape, q.dtype)
        return y, (y, self.empty((batch, heads, queries, 2), self.accum_dtype))

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
        """Return (dq, dk, dv), or `out`; four products."""
        self._count(4 * 2 * q.size * k.shape[1])
        held = self._lend_backward(q, k, "scores")
        if q.shape[-1] > self.tiled_head_width:
            batch, queries, heads, _ = q.shape
            assert saved.shape == (batch, heads, queries, k.shape[1]), saved.shape
        if out is None:
            out = super().attention_backward_input(dy, q, k, v, saved, q_pos, k_pos)
        del held
        for given, x in zip((dy, *out), (q, q, k, v), strict=True):
            assert given.shape == x.shape, (given.shape, x.shape)
        return out

    def attention_block_forward(
        self, q: Array, k: Array, v: Array, q_pos: Array, k_pos: Array
    ) -> tuple[Array, Array]:
        """Return (y (B, Tq, H, d), stats (B, H, Tq, 2)); two products."""
        self._count(2 * 2 * q.size * k.shape[1])
        self._lend_tiles(
            q, k, "queries", turned=("keys",), of_keys=("values",), of_scores=("scores",)
        )
        return super().attention_block_forward(q, k, v, q_pos, k_pos)

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
        """Return (dq, dk, dv); five products, one of which recomputes the scores."""
        self._count(5 * 2 * q.size * k.shape[1])
        held = self._lend_backward(q, k, "scores", "probs")
        self._lend_tiles(q, k, turned=("turned keys",))
        results = super().attention_block_backward(
            dy, q, k, v, stats, delta, q_pos=q_pos, k_pos=k_pos
        )
        del held
        return results

    def _lend_backward(self, q: Array, k: Array, *of_scores: str) -> Array | None:
        """Count the buffers of a tiled backward pass; return those that a GPU releases."""
        sums = (
            ("dk", "dv", "part")
            if q.shape[1] > QUERY_TILE or q.shape[2] > k.shape[2]
            else ("dk", "dv")
        )  # a single product computes each
        self._lend_tiles(
            q,
            k,
            "queries",
            "dy",
            turned=("values",),
            of_scores=of_scores,
            of_keys=("keys", *sums),
            of_tile=("dq",),
        )
        if q.shape[-1] > self.tiled_head_width:
            return None
        return self.empty(parts_shape(q, k), np.float32, "buffers")

    def _lend_tiles(
        self,
        q: Array,
        k: Array,
        *of_queries: str,
        turned: Sequence[str] = (),
        of_keys: Sequence[str] = (),
        of_scores: Sequence[str] = (),
        of_tile: Sequence[str] = (),
    ) -> None:
        """Count the buffers for a part, by name: see `NumpyOps`."""
        (batch, queries, heads, width), (_, keys, kv_heads, _) = q.shape, k.shape
        assert heads % kv_heads == 0, (heads, kv_heads)
        rows, own_heads = part_sizes(batch, queries, heads, keys, kv_heads)
        heads, kv_heads = heads // kv_heads * own_heads, own_heads
        tile = min(queries, QUERY_TILE)
        for names, size in (
            (of_queries, heads * queries * width),
            (of_tile, heads * tile * width),
            (of_keys, kv_heads * keys * width),
            (turned, kv_heads * width * (keys + GAP)),
            (of_scores, heads * tile * keys),
        ):
            for name in names:
                self._lend(name, rows * size)
