"""Embeddings on a GPU: lookups, and gradients summed without atomics.

Every run gives the same bits, and nothing is read from the device. Letters: V rows of a table, D
its columns.
"""

from math import ceil
from typing import Any

import numpy as np

from mpipar.ops.cuda.kernels import C_TYPES, KernelOps
from mpipar.ops.signature import Array

FILE = "embedding.cu"
ROW_THREADS = 128  # threads that share a row
SORT_THREADS = 512
SUM_BLOCK = (32, 8)  # as in embedding.cu
SUM_BYTES = 32 * 16  # of a row, read by one block of the sums


TYPES = {**C_TYPES, "float64": "double"}
SORT, MERGE = f"places_in_tiles<{SORT_THREADS}>", "merge_runs"


def names(dtype: str) -> tuple[str, ...]:
    """Return the name expressions of forward, position_forward and add_rows for a type."""
    own = TYPES[dtype]
    total = own if own == "double" else "float"
    return (
        f"embedding_forward<{own}, {ROW_THREADS}>",
        f"position_forward<{own}, {total}, {ROW_THREADS}>",
        f"add_rows<{own}, {total}>",
    )


NAMES = {dtype: names(dtype) for dtype in TYPES}


class EmbeddingOps(KernelOps):
    """The functions of embeddings. Plain CuPy would read masks on the host, and sum by atomics.

    Gradients are float32, or float64 if all numbers are.
    """

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
                FILE,
                NAMES[y.dtype.name][kernel],
                (y.size // y.shape[-1],),
                (ROW_THREADS,),
                (y.shape[-1], *arguments),
            )

    def position_backward_weight(self, positions: Array, dy: Array, dtable: Array) -> None:
        """Add the batch sum of dy (B, T, D) to the rows `positions` of dtable."""
        self.embedding_backward_weight(positions, dy, dtable, 0)

    def embedding_backward_weight(self, ids: Array, dy: Array, dtable: Array, start: int) -> None:
        """Add each row of dy (..., D) to its id's row of dtable, if this shard holds it.

        ids: of all rows of dy, or of the rows of each of its sequences.
        """
        n, columns = ids.size, dy.shape[-1]
        if dy.size == 0:
            return
        ids, dy = self._ids(ids), self._whole(dy)
        self.loader.launch(
            FILE,
            NAMES[dy.dtype.name][2],
            (n, ceil(columns * dy.itemsize / SUM_BYTES)),
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
        grid, block = (ceil(n / SORT_THREADS),), (SORT_THREADS,)
        order = self.xp.empty((n,), np.int32)
        self.loader.launch(FILE, SORT, grid, block, (n, ids, order))
        while length < n:
            merged = self.xp.empty((n,), np.int32)
            self.loader.launch(FILE, MERGE, grid, block, (n, length, ids, order, merged))
            order, length = merged, 2 * length
        return order
