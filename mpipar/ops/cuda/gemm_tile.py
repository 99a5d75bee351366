"""The product on tensor cores as data and as a function: `gemm_mma.cu`, `--gemm tile`.

Layouts: "NN" op(A) = A, op(B) = B; "NT" op(B) = transposed; "TN" op(A) = transposed.
"""

from collections.abc import Callable, Sequence
from math import ceil, prod
from typing import NamedTuple

from mpipar.ops.cuda.gemm import checked, stored
from mpipar.ops.cuda.kernels import C_TYPES, Loader
from mpipar.ops.signature import Array

LAYOUTS = ("NN", "NT", "TN")  # y = x w; dx = dy w^T; dw = x^T dy. None needs both transposed.
PARAMETERS = "BM BN BK WM WN Stages"  # see gemm_mma.cu
LARGE, SMALL = (128, 128, 32, 64, 32, 3), (64, 64, 32, 32, 32, 3)


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
    layout: str, dtype: str, out_dtype: str | None = None, tiles: Sequence[int] = LARGE
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


def fitting(
    num_processors: int, layout: str, dtype: str, out_dtype: str, rows: int, columns: int
) -> Gemm:
    """Return the Gemm for a C of rows x columns.

    If C has fewer large tiles than the device has processors, small ones give more blocks.
    """
    large = gemm(layout, dtype, out_dtype)
    enough = prod(grid(large, rows, columns)) >= num_processors
    return large if enough else gemm(layout, dtype, out_dtype, SMALL)


def grid(kernel: Gemm, rows: int, columns: int) -> tuple[int, int]:
    """Return the blocks that cover a C of rows x columns."""
    return ceil(rows / kernel.rows), ceil(columns / kernel.columns)


class TileGemm:
    """Products by our own kernels: out = a b or out += a b.

    choose: (layout, operand type, result type, rows of out, columns of out) -> Gemm.
    """

    def __init__(self, loader: Loader, choose: Callable[..., Gemm]) -> None:
        self._loader, self._choose = loader, choose

    def __call__(self, a: Array, b: Array, out: Array, accumulate: bool = False) -> None:
        """Write a b to out (or add it); a (M, K), b (K, N), out (M, N)."""
        if out.size == 0:  # e.g. a rank's piece of fewer tokens than ranks: no block to start
            return
        a, b, out = checked(a, b, out)
        (a_turned, lda), (b_turned, ldb), (_, ldc) = map(stored, (a, b, out))
        layout = "NT"[a_turned] + "NT"[b_turned]
        kernel = self._choose(layout, a.dtype.name, out.dtype.name, *out.shape)
        arguments = (*out.shape, a.shape[1], a, lda, b, ldb, float(accumulate), out, ldc)
        self._loader.launch(
            kernel.file,
            kernel.name,
            grid(kernel, *out.shape),
            kernel.block,
            arguments,
            kernel.shared_bytes,
        )
