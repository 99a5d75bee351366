"""The GEMM ladder as data: the instantiation, grid, block and shared memory of each rung.

Layouts: "NN" op(A) = A, op(B) = B; "NT" op(B) = transposed; "TN" op(A) = transposed.
"""

from collections.abc import Sequence
from math import ceil, prod
from typing import NamedTuple

# The kernels' names for NumPy's types.
C_TYPES = {"float32": "float", "bfloat16": "bf16", "float16": "half"}
LAYOUTS = ("NN", "NT", "TN")  # y = x w; dx = dy w^T; dw = x^T dy. None needs both transposed.


class Rung(NamedTuple):
    """A rung of the ladder. tiles: names of the tile parameters. default: their default values.

    typed: whether the element types are parameters too (the others are float32 only).
    """

    tiles: str
    default: tuple[int, ...]
    typed: bool


RUNGS = {
    "naive": Rung("", (), True),
    "shared": Rung("Tile", (32,), True),
    "register": Rung("BM BN BK TM TN", (64, 64, 8, 8, 4), True),
    "vector": Rung("BM BN BK TM TN", (128, 128, 8, 8, 8), False),
    "warp": Rung("BM BN BK WM WN", (128, 128, 8, 64, 32), False),
    "mma": Rung("BM BN BK WM WN Stages", (128, 128, 32, 64, 32, 3), True),
}
SMALL = {"warp": (64, 64, 8, 32, 32), "mma": (64, 64, 32, 32, 32, 3)}


class Gemm(NamedTuple):
    """A kernel. name: name expression. rows, columns: of C per block. block: threads."""

    file: str
    name: str
    rows: int
    columns: int
    block: tuple[int, ...]
    shared_bytes: int


def gemm(
    rung: str,
    layout: str,
    dtype: str = "float32",
    out_dtype: str | None = None,
    tiles: Sequence[int] | None = None,
) -> Gemm:
    """Return the Gemm of one rung for operands of `dtype` (NumPy's name) and C of `out_dtype`."""
    kind = RUNGS[rung]
    tiles = kind.default if tiles is None else tuple(tiles)
    assert len(tiles) == len(kind.tiles.split()), (rung, tiles)
    assert kind.typed or dtype == (out_dtype or dtype) == "float32", (rung, dtype, out_dtype)
    types = [C_TYPES[dtype], C_TYPES[out_dtype or dtype]] if kind.typed else []
    transposed = ["true" if letter == "T" else "false" for letter in layout]
    name = f"gemm_{rung}<{', '.join([*types, *transposed, *map(str, tiles)])}>"
    size = dict(zip(kind.tiles.split(), tiles, strict=True))
    return Gemm(f"gemm_{rung}.cu", name, *_block(rung, size), _shared_bytes(rung, layout, size))


def fitting(
    num_processors: int, layout: str, dtype: str, out_dtype: str, rows: int, columns: int
) -> Gemm:
    """Return the highest rung for a type: "warp" or, for 16 bits, "mma".

    If C has fewer blocks than the device has processors, smaller tiles give more blocks.
    """
    rung = "warp" if dtype == "float32" else "mma"
    large = gemm(rung, layout, dtype, out_dtype)
    blocks = prod(grid(large, rows, columns))
    if blocks >= num_processors:
        return large
    return gemm(rung, layout, dtype, out_dtype, SMALL[rung])


def grid(kernel: Gemm, rows: int, columns: int) -> tuple[int, int]:
    """Return the blocks that cover a C of rows x columns."""
    return ceil(rows / kernel.rows), ceil(columns / kernel.columns)


def flop_per_byte(kernel: Gemm, itemsize: int) -> float:
    """Return FLOPs per byte of operands that a block reads from global memory, without caches."""
    rows, columns = (1, 1) if kernel.file == "gemm_naive.cu" else (kernel.rows, kernel.columns)
    return 2 * rows * columns / ((rows + columns) * itemsize)


def _block(rung: str, size: dict[str, int]) -> tuple[int, int, tuple[int, ...]]:
    """Return (rows, columns, threads) of a block."""
    if rung == "naive":
        return 8, 32, (32, 8)
    if rung == "shared":
        return size["Tile"], size["Tile"], (size["Tile"] ** 2,)
    rows, columns = size["BM"], size["BN"]
    if "TM" in size:
        return rows, columns, (rows // size["TM"] * (columns // size["TN"]),)
    return rows, columns, (32 * (rows // size["WM"]) * (columns // size["WN"]),)


def _shared_bytes(rung: str, layout: str, size: dict[str, int]) -> int:
    """Return the bytes of dynamic shared memory per block: gemm_mma.cu's tiles, rows 8 longer."""
    if rung != "mma":
        return 0
    steps = size["BK"]
    values = 0
    for extent, k_contiguous in ((size["BM"], layout[0] == "N"), (size["BN"], layout[1] == "T")):
        values += extent * (steps + 8) if k_contiguous else steps * (extent + 8)
    return 2 * size["Stages"] * values
