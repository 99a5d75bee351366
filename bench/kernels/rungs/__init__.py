"""The GEMM ladder as data: the instantiation, grid, block and shared memory of each rung.

The first five rungs are the sources beside this file, to study; the sixth is the kernel of
`mpipar/ops/cuda` that trains. Layouts as in `mpipar.ops.cuda.gemm`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mpipar.ops.cuda import gemm as own
from mpipar.ops.cuda import kernels
from mpipar.ops.cuda.gemm import Gemm

FOLDERS = (Path(__file__).parent, kernels.FOLDER)  # of the sources


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
    "mma": Rung("BM BN BK WM WN Stages", own.TILES, True),
}


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
    if rung == "mma":
        return own.gemm(layout, dtype, out_dtype, tiles)
    types = (dtype, out_dtype or dtype) if kind.typed else ()
    name = own.template(f"gemm_{rung}", types, layout, tiles)
    size = dict(zip(kind.tiles.split(), tiles, strict=True))
    return Gemm(f"gemm_{rung}.cu", name, *_block(rung, size), shared_bytes=0)


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
