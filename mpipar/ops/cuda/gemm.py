"""Products on a GPU: out = a b or out += a b, by cuBLAS, or by a kernel of ours: `--gemm tile`.

Matrices are two-dimensional views whose rows or columns are contiguous. A transposed view costs
nothing, and no operand is ever copied. The sums are float32 for 16-bit and 32-bit operands, and
float64 for 64-bit ones. Both operands have the same type. `out` may be wider, as gradients of
16-bit weights are.
"""

from collections.abc import Callable, Sequence
from math import ceil
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from mpipar.ops.cuda.kernels import C_TYPES, Loader
from mpipar.ops.signature import Array, DeviceArray, ThreeArrays


def stored(x: Array) -> tuple[bool, int]:
    """Return (whether x (rows, columns) is stored as its transpose, elements between its rows)."""
    rows, columns = x.shape
    item = x.itemsize
    if x.strides[1] == item or columns == 1 or not x.size:  # CuPy: nothing has strides of 0
        return False, max(1, columns, x.strides[0] // item)
    assert x.strides[0] == item or rows == 1, (x.shape, x.strides)
    return True, max(rows, x.strides[1] // item)


def checked(a: Array, b: Array, out: Array) -> ThreeArrays:
    """Return (a, b, out), all transposed if out is stored that way: out^T = b^T a^T."""
    assert a.shape[1] == b.shape[0], (a.shape, b.shape)
    assert out.shape == (a.shape[0], b.shape[1]), (out.shape, a.shape, b.shape)
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    return (b.T, a.T, out.T) if stored(out)[0] else (a, b, out)


class BlasGemm:
    """cuBLAS, one call per product. It handles mixed types, transposes and accumulation itself."""

    def __init__(self, xp: ModuleType) -> None:
        self._blas, self._device = xp.cuda.cublas, xp.cuda.device
        runtime = xp.cuda.runtime
        self.types = {
            "float64": runtime.CUDA_R_64F,
            "float32": runtime.CUDA_R_32F,
            "bfloat16": runtime.CUDA_R_16BF,
            "float16": runtime.CUDA_R_16F,
        }
        self.sums = dict.fromkeys(self.types, self._blas.CUBLAS_COMPUTE_32F)
        self.sums["float64"] = self._blas.CUBLAS_COMPUTE_64F
        # 0 and 1 in host memory, where cuBLAS reads its factors during the call, and their
        # addresses.
        self._factors = {
            name: np.array([0, 1], "float64" if name == "float64" else "float32")
            for name in self.types
        }
        self.places = {
            name: [one.ctypes.data + i * one.itemsize for i in (0, 1)]
            for name, one in self._factors.items()
        }

    def __call__(self, a: Array, b: Array, out: Array, accumulate: bool = False) -> None:
        """Write a b to out (or add it); a (M, K), b (K, N), out (M, N)."""
        self._multiply(self._blas.gemmEx, *checked(a, b, out), accumulate)

    def stacked(self, a: Array, b: Array, out: Array) -> None:
        """Write a[h] b[h] to out[h] for every h; a (H, M, K), b (H, K, N), out (H, M, N)."""
        assert len(a) == len(b) == len(out), (a.shape, b.shape, out.shape)
        assert not stored(out[0])[0], (out.shape, out.strides)
        apart = [(x.strides[0] // x.itemsize,) for x in (a, b, out)]
        self._multiply(
            self._blas.gemmStridedBatchedEx, *checked(a[0], b[0], out[0]), False, apart, (len(a),)
        )

    def _multiply(
        self,
        function: Callable[..., Any],
        a: DeviceArray,
        b: DeviceArray,
        out: DeviceArray,
        accumulate: bool,
        apart: Sequence[tuple[int, ...]] = ((), (), ()),
        count: tuple[int, ...] = (),
    ) -> None:
        """Call cuBLAS. apart, count: for stacked matrices, their distances and their number.

        cuBLAS is column-major: what it calls C is our out^T = b^T a^T. A matrix that is stored in
        rows is already transposed from its point of view.
        """
        name = a.dtype.name
        zero, one = self.places[name]
        (a_turned, lda), (b_turned, ldb), (_, ldc) = map(stored, (a, b, out))
        turn = (self._blas.CUBLAS_OP_N, self._blas.CUBLAS_OP_T)
        function(
            self._device.get_cublas_handle(),
            turn[b_turned],
            turn[a_turned],
            out.shape[1],
            out.shape[0],
            a.shape[1],
            one,
            b.data.ptr,
            self.types[name],
            ldb,
            *apart[1],
            a.data.ptr,
            self.types[name],
            lda,
            *apart[0],
            one if accumulate else zero,
            out.data.ptr,
            self.types[out.dtype.name],
            ldc,
            *apart[2],
            *count,
            self.sums[name],
            self._blas.CUBLAS_GEMM_DEFAULT,
        )


# The product on tensor cores, `gemm_mma.cu`, as data and as a function. Layouts: "NN" op(A) = A,
# op(B) = B; "NT" op(B) = transposed; "TN" op(A) = transposed.

LAYOUTS = ("NN", "NT", "TN")  # y = x w; dx = dy w^T; dw = x^T dy. None needs both transposed.
TILES = (128, 128, 32, 64, 32, 3)  # BM, BN, BK, WM, WN, Stages: see gemm_mma.cu


class Gemm(NamedTuple):
    """A kernel. name: name expression. rows, columns: of C per block. block: threads."""

    file: str
    name: str
    rows: int
    columns: int
    block: tuple[int, ...]
    shared_bytes: int


def template(kernel: str, types: Sequence[str], layout: str, tiles: Sequence[int]) -> str:
    """Return the name expression of a kernel for types (NumPy's names), layout and tiles."""
    parameters = [C_TYPES[name] for name in types]
    parameters += ["true" if letter == "T" else "false" for letter in layout]
    return f"{kernel}<{', '.join([*parameters, *map(str, tiles)])}>"


def gemm(
    layout: str, dtype: str, out_dtype: str | None = None, tiles: Sequence[int] = TILES
) -> Gemm:
    """Return the Gemm for operands of `dtype` (NumPy's name) and C of `out_dtype`."""
    rows, columns, steps, warp_rows, warp_columns, stages = tiles
    values = 0  # of a stage in shared memory: the rows of gemm_mma.cu's tiles are 8 longer
    for extent, k_contiguous in ((rows, layout[0] == "N"), (columns, layout[1] == "T")):
        values += extent * (steps + 8) if k_contiguous else steps * (extent + 8)
    return Gemm(
        "gemm_mma.cu",
        template("gemm_mma", (dtype, out_dtype or dtype), layout, tiles),
        rows,
        columns,
        (32 * (rows // warp_rows) * (columns // warp_columns),),
        2 * stages * values,
    )


def grid(kernel: Gemm, rows: int, columns: int) -> tuple[int, int]:
    """Return the blocks that cover a C of rows x columns."""
    return ceil(rows / kernel.rows), ceil(columns / kernel.columns)


class TileGemm:
    """Products by our own kernels: out = a b or out += a b.

    choose: (layout, operand type, result type) -> Gemm.
    """

    def __init__(self, loader: Loader, choose: Callable[..., Gemm] = gemm) -> None:
        self._loader, self._choose = loader, choose

    def __call__(self, a: Array, b: Array, out: Array, accumulate: bool = False) -> None:
        """Write a b to out (or add it); a (M, K), b (K, N), out (M, N)."""
        if out.size == 0:  # e.g. a rank's piece of fewer tokens than ranks: no block to start
            return
        a, b, out = checked(a, b, out)
        (a_turned, lda), (b_turned, ldb), (_, ldc) = map(stored, (a, b, out))
        layout = "NT"[a_turned] + "NT"[b_turned]
        kernel = self._choose(layout, a.dtype.name, out.dtype.name)
        arguments = (*out.shape, a.shape[1], a, lda, b, ldb, float(accumulate), out, ldc)
        self._loader.launch(
            kernel.file,
            kernel.name,
            grid(kernel, *out.shape),
            kernel.block,
            arguments,
            kernel.shared_bytes,
        )
