"""Which rows of the text a step trains on: row i of step s is a pure function of (seed, s, i).

The place in the grid and the microbatch only choose which i are read, so every layout trains on the
same rows. Letters: B rows of a microbatch, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpipar.errors import DataError

HELD_OUT = 10  # one part in ten is held out


@dataclass(frozen=True)
class Batch:
    """One microbatch: tokens and targets (B, T), positions (T,); targets is None when
    generating.
    """

    tokens: object
    targets: object
    positions: object

    @property
    def shape(self):
        return self.tokens.shape


def split(tokens, batch_size: int, seq_len: int):
    """The training part and the held-out part (the last tenth, but at least one batch).

    Raises DataError when either would be smaller than one batch.
    """
    one_batch = batch_size * seq_len + 1
    held_out = max(len(tokens) // HELD_OUT, one_batch)
    if len(tokens) - held_out < one_batch:
        raise DataError(
            f"the data has {len(tokens):,} tokens, fewer than one batch to train on and one to"
            f" hold out (2 x ({batch_size} rows x {seq_len} tokens + 1) = {2 * one_batch:,}):"
            " give more data, or a smaller --batch-size or --seq-len")
    return tokens[:-held_out], tokens[-held_out:]


class Rows:
    """Rows of one part of the text for one place in the grid.

    batch_size is global; this rank's dp replica reads batch_size / dp_size rows in num_microbatches
    pieces.
    """

    def __init__(self, ops, tokens, config, dp_rank):
        self.ops, self.tokens = ops, tokens
        self.seed, self.seq_len = config.run.seed, config.model.seq_len
        self.dp_rank, self.dp_size = dp_rank, config.grid.dp
        self.num_rows = config.train.batch_size // (self.dp_size * config.grid.num_microbatches)
        self.num_microbatches = config.grid.num_microbatches
        self.positions = ops.asarray(np.arange(self.seq_len))

    def _indices(self, mb: int):
        """Global row numbers of this replica's microbatch mb."""
        first = (mb * self.dp_size + self.dp_rank) * self.num_rows
        return range(first, first + self.num_rows)

    def _batch(self, starts) -> Batch:
        rows = np.stack([self.tokens[start:start + self.seq_len + 1] for start in starts])
        rows = rows.astype(np.int64)
        tokens, targets = (np.ascontiguousarray(part) for part in (rows[:, :-1], rows[:, 1:]))
        return Batch(self.ops.asarray(tokens), self.ops.asarray(targets), self.positions)

    def train(self, step: int, mb: int) -> Batch:
        """Microbatch mb of a training step: rows that begin anywhere in the text."""
        starts = []
        for row in self._indices(mb):
            philox = np.random.Philox(key=self.seed, counter=[0, row, step, 0])
            generator = np.random.Generator(philox)
            starts.append(int(generator.integers(len(self.tokens) - self.seq_len)))
        return self._batch(starts)

    def num_sweeps(self) -> int:
        """Batches in one sweep over the text in rows that do not overlap; a last partial batch is
        left out.
        """
        per_batch = self.num_rows * self.dp_size * self.num_microbatches
        return (len(self.tokens) - 1) // self.seq_len // per_batch

    def sweep(self, number: int, mb: int) -> Batch:
        """Microbatch mb of batch `number` of the sweep."""
        per_batch = self.num_rows * self.dp_size * self.num_microbatches
        return self._batch([(number * per_batch + row) * self.seq_len for row in self._indices(mb)])
