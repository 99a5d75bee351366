"""The array functions on a GPU through CuPy: plain ones, products, embeddings, and its memory.

Embeddings are kernels: plain CuPy would read masks on the host, and sum by atomics. With them every
run gives the same bits, and nothing is read from the device.
"""

import math
from collections.abc import Callable, Sequence
from importlib import import_module
from time import perf_counter_ns
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpipar.errors import EnvironmentProblem
from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.arrays import as_rows
from mpipar.ops.cuda.gemm import BlasGemm, TileGemm
from mpipar.ops.cuda.kernels import C_TYPES, Loader
from mpipar.ops.cupy_copies import Copies
from mpipar.ops.signature import Array, Shape

OLDEST_CUPY = 14  # the first that knows bfloat16
# Of embedding.cu: threads that share a row, of a sort, of a sum, and bytes of a row that one block
# of the sums reads.
ROW_THREADS, SORT_THREADS, SUM_BLOCK, SUM_BYTES = 128, 512, (32, 8), 32 * 16
SORT, MERGE = f"places_in_tiles<{SORT_THREADS}>", "merge_runs"
# The type of tables: its kernels for lookups, positions and sums, by their name expressions.
EMBEDDINGS = {
    dtype: (
        f"embedding_forward<{own}, {ROW_THREADS}>",
        f"position_forward<{own}, {total}, {ROW_THREADS}>",
        f"add_rows<{own}, {total}>",
    )
    for dtype, own, total in (
        *((name, of_kernels, "float") for name, of_kernels in C_TYPES.items()),
        ("float64", "double", "double"),
    )
}


class CupyOps(ArrayOps):
    """The array functions of `ArrayOps` on a CUDA device, which becomes the current one.

    gemm: products of 16-bit operands with weights by "blas" (cuBLAS, as all others) or "tile" (the
    kernel of ops/cuda).
    host_rank: this process's place on its host, which selects its GPU. If there are fewer GPUs than
    ranks, the count wraps around to 0.

    copies: those that run beside the computing stream. All groups of a rank share them.

    Products and embeddings take 16-bit operands as they are, whatever `dtype` is.
    Raises EnvironmentProblem when CuPy or a usable GPU is missing.
    """

    takes_16_bits: tuple[str, ...] = (
        "matmul",
        "matmul_nt",
        "matmul_tn_add",
        "grouped_matmul",
        "grouped_matmul_nt",
        "grouped_matmul_tn_add",
        "embedding_backward_weight",
        "position_forward",
        "position_backward_weight",
    )
    table_multiple = 128
    oldest_device = 0  # compute capability
    checksum_block = 1 << 22  # few kernels, and 96 MiB of temporaries

    def __init__(self, dtype: DTypeLike, gemm: str = "blas", host_rank: int = 0) -> None:
        super().__init__(_usable_cupy(host_rank), dtype, "cuda")
        self.copies = Copies(self.xp, self.pinned)
        self._blas = BlasGemm(self.xp)
        self.loader = Loader(self.xp, self.oldest_device)
        # This makes no copy of what it reads, which would be as large as all gradients.
        self._squares = self.xp.ReductionKernel(
            "T x", "float64 y", "double(x) * double(x)", "a + b", "y = a", "0", "square_sum"
        )
        self._mark = self.timestamp(), perf_counter_ns()  # of the newest `to_floats`
        self._descend = self.xp.ElementwiseKernel(
            "T grad, T lr", "T data", "data -= lr * grad", "sgd_step"
        )
        self._gemm: Callable[..., None] = self._blas
        if gemm == "tile":
            self._tile_gemm = TileGemm(Loader(self.xp))
            self._gemm = self._by_width

    def _by_width(self, a: Array, b: Array, out: Array, accumulate: bool = False) -> None:
        """Write a b to out (or add it): 16-bit operands by tiles, wider ones by cuBLAS."""
        (self._tile_gemm if a.itemsize == 2 else self._blas)(a, b, out, accumulate)

    def matmul(self, x: Array, w: Array) -> Array:
        """Return x w: (..., K) times (K, M) gives (..., M)."""
        y = self.xp.empty((*x.shape[:-1], w.shape[1]), x.dtype)
        self._gemm(as_rows(x), w, as_rows(y))
        return y

    def _multiply(self, x: Array, w: Array, out: Array) -> None:
        self._gemm(x, w, out)

    def matmul_tn_add(self, x: Array, y: Array, out: Array) -> None:
        """Add x^T y to out: (..., K) and (..., M) give (K, M); out may be a transposed view."""
        self._gemm(as_rows(x).T, as_rows(y), out, accumulate=True)

    def _stacked_products(self, a: Array, b: Array, out: Array | None = None) -> Array:
        """Return a b for every leading index: one cuBLAS call per row of the batch, no copies."""
        if out is None:
            out = self.xp.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
        for i in range(len(a)):
            self._blas.stacked(a[i], b[i], out[i])
        return out

    # Embeddings. V rows of a table, D its columns.

    def embedding_forward(self, ids: Array, table: Array, start: int) -> Array:
        """Return table[ids - start] (..., D), zeros where an id belongs to another shard."""
        y = self.xp.empty((*ids.shape, table.shape[1]), table.dtype)
        self._embed(0, y, self._ids(ids), table, np.int64(start), np.int64(len(table)), y)
        return y

    def position_forward(self, x: Array, positions: Array, table: Array) -> Array:
        """Return x (B, T, D) + table[positions], positions (T,) or (B, T)."""
        assert x.dtype == table.dtype, (x.dtype, table.dtype)
        y = self.xp.empty(x.shape, x.dtype)
        self._embed(1, y, positions.size, self._ids(positions), table, self._whole(x), y)
        return y

    def _embed(self, kernel: int, y: Array, *arguments: Any) -> None:
        """Start a kernel with a block for each row of y (..., D)."""
        if y.size:
            self.loader.launch(
                "embedding.cu",
                EMBEDDINGS[y.dtype.name][kernel],
                (y.size // y.shape[-1],),
                (ROW_THREADS,),
                (y.shape[-1], *arguments),
            )

    def position_backward_weight(self, positions: Array, dy: Array, dtable: Array) -> None:
        """Add the batch sum of dy (B, T, D) to the rows `positions` of dtable."""
        self.embedding_backward_weight(positions, dy, dtable, 0)

    def embedding_backward_weight(self, ids: Array, dy: Array, dtable: Array, start: int) -> None:
        """Add each row of dy (..., D) to its id's row of dtable, if this shard holds it.

        Gradients are float32, or float64 if all numbers are. ids: of all rows of dy, or of the rows
        of each of its sequences.
        """
        n, columns = ids.size, dy.shape[-1]
        if dy.size == 0:
            return
        ids, dy = self._ids(ids), self._whole(dy)
        self.loader.launch(
            "embedding.cu",
            EMBEDDINGS[dy.dtype.name][2],
            (n, math.ceil(columns * dy.itemsize / SUM_BYTES)),
            SUM_BLOCK,
            (
                columns,
                n,
                dy.size // columns // n,
                ids,
                self._order(ids),
                dy,
                np.int64(start),
                np.int64(len(dtable)),
                self._in_place(dtable),
            ),
        )

    def _order(self, ids: Array) -> Array:
        """Return the places of the ids in ascending order; equal ids keep their order."""
        n, length = ids.size, SORT_THREADS
        grid, block = (math.ceil(n / SORT_THREADS),), (SORT_THREADS,)
        order = self.xp.empty((n,), np.int32)
        self.loader.launch("embedding.cu", SORT, grid, block, (n, ids, order))
        while length < n:
            merged = self.xp.empty((n,), np.int32)
            self.loader.launch("embedding.cu", MERGE, grid, block, (n, length, ids, order, merged))
            order, length = merged, 2 * length
        return order

    # What kernels take.

    def _whole(self, x: Array) -> Array:
        """Return x, or a copy if there are gaps between its elements."""
        return self.xp.ascontiguousarray(x)

    def _ids(self, x: Array) -> Array:
        assert x.dtype == np.int64, x.dtype
        return self._whole(x)

    @staticmethod
    def _in_place(x: Array) -> Array:
        assert x.flags.c_contiguous, (x.shape, x.strides)
        return x

    # Sums, updates, memory and time.

    def square_sum(self, x: Array) -> Any:
        """Return the sum of squares of x, accumulated in float64; see `sum`."""
        return self._squares(x)

    def to_floats(self, xs: Sequence[Any]) -> list[float]:
        """Return the results of `sum` and `square_sum` as floats of the host, all in one copy."""
        if not xs:
            return []
        stacked, mark = self.xp.stack(xs), self.timestamp()
        found = list(map(float, self.to_host(stacked)))
        self._mark = mark, perf_counter_ns()
        return found

    def sgd_step(self, data: Array, grad: Array, lr: float) -> None:
        """Subtract lr * grad from data."""
        self._descend(grad, self.scalar(lr), data)

    def to_host(self, x: Array) -> np.ndarray:
        """Return x copied to a NumPy array; waits for the device."""
        return np.asarray(self.xp.asnumpy(x))

    def pinned(self, shape: Shape, dtype: DTypeLike) -> np.ndarray:
        """Return an uninitialised host array in page-locked memory, where copies run fastest."""
        dtype, count = np.dtype(dtype), math.prod(shape)
        memory = self.xp.cuda.alloc_pinned_memory(max(1, count * dtype.itemsize))
        return np.frombuffer(memory, dtype, count).reshape(shape)

    def synchronize(self) -> None:
        """Wait until everything queued on the current stream is done."""
        self.xp.cuda.get_current_stream().synchronize()

    def timestamp(self) -> Any:
        """Return a mark after everything queued on the current stream: an event."""
        return self.xp.cuda.get_current_stream().record()

    def nanoseconds(self, instants: Sequence[Any]) -> list[int]:
        """Return when the device passed these marks, in ns of the host's clock.

        The latest `to_floats`, after which the host waited anyway, relates both clocks, or has the
        host's a little late. The caller has waited for the device, so no mark is later than now.
        """
        (mark, then), now = self._mark, perf_counter_ns()
        return [
            min(now, then + round(1e6 * self.xp.cuda.get_elapsed_time(mark, one)))  # it is in ms
            for one in instants
        ]


def _usable_cupy(host_rank: int) -> ModuleType:
    """Return the module cupy after one small computation on this process's device."""
    try:
        cupy = import_module("cupy")
    except ImportError as error:
        raise EnvironmentProblem(
            f"--device cuda needs CuPy, which cannot be imported here ({error}): install it with "
            "pip install '.[cuda]' (CUDA 12: '.[cuda12]'), or type --device cpu"
        ) from error
    if int(cupy.__version__.split(".")[0]) < OLDEST_CUPY:
        raise EnvironmentProblem(
            f"--device cuda needs CuPy {OLDEST_CUPY} or newer, and CuPy {cupy.__version__} is "
            "installed: pip install --upgrade '.[cuda]' (CUDA 12: '.[cuda12]'), or type "
            "--device cpu"
        )
    try:
        # A driver alone is not enough: with a missing CUDA library or a GPU that is too new, a
        # compiled kernel and a product fail. CUDA errors are RuntimeErrors; a library that cannot
        # be loaded raises one of the others. Without any GPU, taking the first raises an error that
        # says so.
        cupy.cuda.Device(host_rank % max(1, cupy.cuda.runtime.getDeviceCount())).use()
        square = cupy.ones((2, 2))
        float((square @ square).sum())
    except (RuntimeError, OSError, ImportError) as error:
        raise EnvironmentProblem(
            f"--device cuda needs a usable GPU, and CuPy cannot compute on one here ({error}): "
            "start on a node with a GPU and its driver, or type --device cpu"
        ) from error
    return cupy
