"""The rows of the text for each step: row i of step s is a pure function of (seed, s, i).

The place in the grid and the microbatch only select which i are read, so every layout trains on the
same rows. Under context parallelism, each rank reads only its slices of every row. Letters: B rows
of a microbatch, T tokens that a rank reads of each.
"""

from collections.abc import Iterator

import numpy as np

from mpipar.comm.grid import token_pieces
from mpipar.layers.stash import Batch


def rows_per_microbatch(config) -> int:
    """Return the rows of a microbatch of one dp replica. config: resolved."""
    return config.train.batch_size // (config.grid.dp * config.grid.num_microbatches)


def token_places(tokens: int, grid_config, cp_rank: int) -> np.ndarray:
    """Return the places in a row of `tokens` tokens that a rank of cp reads, ascending."""
    if grid_config.cp == 1:
        return np.arange(tokens)
    pieces = token_pieces(tokens, grid_config.cp_attention, grid_config.cp, cp_rank)
    return np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])


def blank_batch(ops, config) -> Batch:
    """Return a microbatch of token 0 in its true shape, as cp rank 0 reads it. config: resolved."""
    places = token_places(config.model.seq_len, config.grid, 0)
    shape = (rows_per_microbatch(config), len(places))
    tokens, targets = (ops.zeros(shape, "int64", label="buffers") for _ in range(2))
    return Batch(tokens, targets, *positions_of(ops, config.model.seq_len, places))


def positions_of(ops, tokens: int, places: np.ndarray):
    """Return a Batch's positions and all_positions for a rank with these of `tokens` places."""
    everyone = None if len(places) == tokens else ops.asarray(np.arange(tokens))
    return ops.asarray(places), everyone


class Rows:
    """Rows of one part of the text for one place in the grid.

    batch_size is global; this rank's dp replica reads batch_size / dp_size rows, in
    num_microbatches pieces.
    """

    def __init__(self, ops, part, config, grid):
        self.ops, self.part = ops, part
        self.seed, self.distance = config.run.seed, config.model.seq_len
        self.dp_size, self.dp_rank = grid.layout["dp"], grid.replica
        self.dp_together = grid.size("dp")  # replicas that take a step together
        self.num_rows = rows_per_microbatch(config)
        self.num_microbatches = config.grid.num_microbatches
        self.places = token_places(self.distance, config.grid, grid.group_rank("cp"))
        self.positions = positions_of(ops, self.distance, self.places)
        # Rows may begin at places 0 .. num_starts - 1; those of a sweep are `distance` apart.
        self.num_starts = len(part) - self.distance

    def _indices(self, mb: int, together: int):
        """Return the global row numbers of this replica's microbatch mb.

        together: the number of neighbouring replicas that divide a microbatch, those of an island.
        The rows of the next island follow all microbatches of this one.
        """
        part, place = divmod(self.dp_rank, together)
        first = ((part * self.num_microbatches + mb) * together + place) * self.num_rows
        return range(first, first + self.num_rows)

    def _batch(self, starts) -> Batch:
        rows = np.stack(
            [self.part[start : start + self.distance + 1] for start in starts], dtype=np.int64
        )
        tokens, targets = (
            np.ascontiguousarray(rows[:, places]) for places in (self.places, self.places + 1)
        )
        return Batch(self.ops.asarray(tokens), self.ops.asarray(targets), *self.positions)

    def train(self, step: int, mb: int) -> Batch:
        """Return microbatch mb of a training step: rows that begin anywhere in the text."""
        starts = []
        for row in self._indices(mb, self.dp_together):
            generator = np.random.Generator(
                np.random.Philox(key=self.seed, counter=[0, row, step, 0])
            )
            starts.append(int(generator.integers(self.num_starts)))
        return self._batch(starts)

    def rows_of_sweep(self) -> int:
        """Return the non-overlapping rows of the text, over all replicas."""
        return (self.num_starts - 1) // self.distance + 1

    def sweep(self) -> Iterator[tuple[list[Batch], int]]:
        """Yield (microbatches, how many of them count) of each batch of non-overlapping rows.

        The last batch has only what is left of the text: fewer rows in a microbatch, fewer
        microbatches, and none for some replicas. Replicas that shard weights must run the same
        passes, so one that has fewer runs the first row again, without counting it.
        """
        everywhere = self.num_rows * self.dp_size  # rows of a microbatch over all replicas
        total = self.rows_of_sweep()
        for first in range(0, total, everywhere * self.num_microbatches):
            left = total - first
            most = min(self.num_microbatches, -(-left // everywhere))
            rows = (
                [row for row in self._indices(mb, self.dp_size) if row < left] for mb in range(most)
            )
            starts = [[(first + row) * self.distance for row in some] for some in rows if some]
            filled = starts + [[0]] * (most - len(starts))
            yield list(map(self._batch, filled)), len(starts)
