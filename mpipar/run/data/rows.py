"""The rows of the text for each step: row i of step s is a pure function of (seed, s, i).

The place in the grid and the microbatch only select which i are read, so every layout trains on the
same rows. Under context parallelism, each rank reads only its slices of every row. Letters: B rows
of a microbatch, T tokens that a rank reads of each.
"""

from collections.abc import Iterator

import numpy as np

from mpipar.comm.grid import ISLAND, token_pieces
from mpipar.errors import DataError
from mpipar.layers.stash import Batch
from mpipar.run.data.source import load_source
from mpipar.run.data.token_file import BLOCK

HELD_OUT = 10  # one part in ten is held out
PSEUDO_COUNT = 0.1  # of the bigram model; the best of 1, 0.3, ..., 0.01 on the built-in text


def split(tokens, seq_len: int):
    """Return the training part and the held-out part: the last tenth, but at least one row."""
    held_out = max(len(tokens) // HELD_OUT, seq_len + 1)
    return tokens[:-held_out], tokens[-held_out:]


def load(config, thorough: bool = True):
    """Return ((training part, held-out part), a description of them).

    The held-out part is --val-data, else what the data itself holds out, else its last tenth.
    thorough: see `load_source`. Raises DataError if the text cannot be used.
    """
    run, model = config.run, config.model
    source = load_source(run.data, model.vocab_size, thorough)
    tokens, held_out, what = source.tokens, source.held_out, source.what
    if tokens is None:
        raise DataError(
            f"--data {run.data[0]}: is held out, as its name says, so there is nothing"
            " to train on; give training files too, or another name"
        )
    if run.val_data:
        other = load_source(run.val_data, model.vocab_size, thorough)
        held_out = other.tokens if other.held_out is None else other.held_out
        what = f"{what}; held out: {other.what}"
        if (tokens.dtype == np.uint8) != (held_out.dtype == np.uint8):
            raise DataError("--val-data: either it or --data is text, the other tokens")
        if source.tokenizer and other.tokenizer not in ("", source.tokenizer):
            raise DataError(
                "--val-data: its tokens were made by another tokenizer than --data's; prepare"
                f" it with --tokenizer {run.data[0]}"
            )
    if held_out is None:
        tokens, held_out = split(tokens, model.seq_len)
    if min(len(tokens), len(held_out)) <= model.seq_len:
        raise DataError(
            f"the data has fewer than one row to train on or to hold out: {len(tokens):,} and"
            f" {len(held_out):,} tokens, but a row needs {model.seq_len} + 1; give more data, or a"
            " smaller --seq-len"
        )
    return (tokens, held_out), what


def evaluated(part, config):
    """Return what evaluations read of the held-out part: the rows that --eval-tokens reaches."""
    tokens, seq_len = config.run.eval_tokens, config.model.seq_len
    return part if tokens is None else part[: -(-tokens // seq_len) * seq_len + 1]


def rows_per_microbatch(config) -> int:
    """Return the rows of a microbatch of one dp replica. config: resolved."""
    return config.train.batch_size // (config.grid.dp * config.grid.num_microbatches)


def token_places(tokens: int, grid_config, cp_rank: int) -> np.ndarray:
    """Return the places in a row of `tokens` tokens that a rank of cp reads, ascending."""
    if grid_config.cp == 1:
        return np.arange(tokens)
    pieces = token_pieces(tokens, grid_config.cp_attention, grid_config.cp, cp_rank)
    return np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])


def routed_rows(config, grid) -> np.ndarray | None:
    """Return the rows of a microbatch that each rank of the expert group sends to each expert.

    (q, E). Experts are equally popular, up to one row. None if nothing is routed.
    """
    model = config.model
    if not getattr(model, "experts", 0):
        return None
    ranks, counts = grid.group("expert"), []
    for world_rank in ranks:
        places = token_places(model.seq_len, config.grid, grid.group_rank_of(world_rank, "cp"))
        total = rows_per_microbatch(config) * len(places) * model.experts_per_token
        counts.append(np.diff(total * np.arange(model.experts + 1) // model.experts))
    return np.array(counts)


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
        self.islands = grid.size(ISLAND)
        self.num_rows = rows_per_microbatch(config)
        self.num_microbatches = config.grid.num_microbatches
        self.places = token_places(self.distance, config.grid, grid.group_rank("cp"))
        self.positions = positions_of(ops, self.distance, self.places)
        # Rows may begin at places 0 .. num_starts - 1; those of a sweep are `distance` apart.
        self.num_starts = len(part) - self.distance

    def _indices(self, mb: int, parts: int = 1):
        """Return the global row numbers of this replica's microbatch mb.

        parts: of the batch and its replicas; each has its own rows, however many microbatches.
        """
        size = self.dp_size // parts
        part, place = divmod(self.dp_rank, size)
        first = ((part * self.num_microbatches + mb) * size + place) * self.num_rows
        return range(first, first + self.num_rows)

    def _batch(self, starts) -> Batch:
        rows = np.stack([self.part[start : start + self.distance + 1] for start in starts])
        rows = rows.astype(np.int64)
        tokens, targets = (
            np.ascontiguousarray(rows[:, places]) for places in (self.places, self.places + 1)
        )
        return Batch(self.ops.asarray(tokens), self.ops.asarray(targets), *self.positions)

    def train(self, step: int, mb: int) -> Batch:
        """Return microbatch mb of a training step: rows that begin anywhere in the text."""
        starts = []
        for row in self._indices(mb, self.islands):
            philox = np.random.Philox(key=self.seed, counter=[0, row, step, 0])
            generator = np.random.Generator(philox)
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
            rows = ([row for row in self._indices(mb) if row < left] for mb in range(most))
            starts = [[(first + row) * self.distance for row in some] for some in rows if some]
            filled = starts + [[0]] * (most - len(starts))
            yield list(map(self._batch, filled)), len(starts)


def bigram_loss(train, held_out, vocab_size: int) -> float:
    """Return the mean loss of a bigram model on the held-out part, in nats per byte.

    The model sees only the previous byte: the baseline for a trained one. Bigrams are counted on
    the training part, and each row of counts is smoothed with a share of the unigram.
    """
    pairs, wanted = (_pairs(part, vocab_size) for part in (train, held_out))
    unigram = (pairs.sum(0) + 1) / (pairs.sum() + vocab_size)
    smooth = pairs + PSEUDO_COUNT * vocab_size * unigram
    probability = smooth / smooth.sum(1, keepdims=True)
    return float(-(wanted * np.log(probability)).sum() / wanted.sum())


def _pairs(tokens, vocab_size: int) -> np.ndarray:
    """Return how often each token follows each other (V, V), reading the text in blocks."""
    counts = np.zeros(vocab_size**2)
    for first in range(0, len(tokens) - 1, BLOCK):
        block = np.asarray(tokens[first : first + BLOCK + 1]).astype(np.int64)
        counts += np.bincount(block[:-1] * vocab_size + block[1:], minlength=vocab_size**2)
    return counts.reshape(vocab_size, vocab_size)
