"""The rows that a step trains on, and the bigram model."""

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from config_helpers import changed
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.comm.grid import Grid
from mpipar.config.resolve import resolve
from mpipar.errors import DataError
from mpipar.ops import make
from mpipar.run.data.bigram import PSEUDO_COUNTS, bigram_loss
from mpipar.run.data.rows import Rows, split

OPS = make("cpu", "float64")
BATCH_SIZE, SEQ_LEN = 24, 3


def rows_of(tokens, dp=1, num_microbatches=1, dp_rank=0, seed=3):
    config = changed(
        dp=dp,
        pp=1,
        tp=1,
        num_microbatches=num_microbatches,
        seed=seed,
        batch_size=BATCH_SIZE,
        seq_len=SEQ_LEN,
    )
    return Rows(OPS, tokens, resolve(config, dp)[0], Grid(dp_rank, {"dp": dp}))


def whole_batch(tokens, dp, num_microbatches, batch_of):
    """Tokens and targets of the global batch, in the order of the rows' global numbers."""
    parts = [
        batch_of(rows_of(tokens, dp, num_microbatches, dp_rank), mb)
        for mb in range(num_microbatches)
        for dp_rank in range(dp)
    ]
    return np.concatenate([np.stack([part.tokens, part.targets], 1) for part in parts])


# --- rows


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_every_layout_trains_on_the_same_rows(dp, num_microbatches, step, rng):
    tokens = rng.integers(0, 256, 500).astype(np.uint8)

    def batch(rows, mb):
        return rows.train(step, mb)

    np.testing.assert_array_equal(
        whole_batch(tokens, dp, num_microbatches, batch), whole_batch(tokens, 1, 1, batch)
    )


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_every_layout_is_judged_on_the_same_rows(dp, num_microbatches):
    tokens = np.arange(200, dtype=np.uint8)
    alone = rows_of(tokens)
    for number in range(alone.num_sweeps()):
        replicas = [
            rows_of(tokens, dp, num_microbatches, dp_rank).sweep(number) for dp_rank in range(dp)
        ]
        parts = [
            batch
            for mb in range(num_microbatches)
            for batches in replicas
            for batch in batches[mb : mb + 1]
        ]
        (one,) = alone.sweep(number)
        np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), one.tokens)
        np.testing.assert_array_equal(np.concatenate([part.targets for part in parts]), one.targets)
        filled = [
            rows_of(tokens, dp, num_microbatches, dp_rank).filled_sweep(number)
            for dp_rank in range(dp)
        ]
        assert len({len(batches) for batches, _ in filled}) == 1, "replicas run the same passes"
        assert [counted for _, counted in filled] == list(map(len, replicas))


def test_a_batch_is_a_piece_of_the_text_and_its_successors(rng):
    tokens = np.arange(250, dtype=np.uint8)  # each position is its own token
    batch = rows_of(tokens).train(1, 0)
    for array in (batch.tokens, batch.targets):
        assert array.shape == batch.shape == (BATCH_SIZE, SEQ_LEN)
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
    np.testing.assert_array_equal(batch.targets, batch.tokens + 1)
    np.testing.assert_array_equal(np.diff(batch.tokens, axis=1), 1)
    np.testing.assert_array_equal(batch.positions, np.arange(SEQ_LEN))


def test_rows_depend_on_step_and_seed_and_on_nothing_else(rng):
    tokens = rng.integers(0, 256, 5000).astype(np.uint8)
    first = rows_of(tokens).train(1, 0).tokens
    rows = rows_of(tokens)
    rows.train(7, 0)  # earlier reads leave no trace
    np.testing.assert_array_equal(rows.train(1, 0).tokens, first)
    assert (rows.train(2, 0).tokens != first).any()
    assert (rows_of(tokens, seed=4).train(1, 0).tokens != first).any()
    assert len(np.unique(first, axis=0)) == BATCH_SIZE, "rows of a batch are drawn separately"


def test_rows_begin_anywhere(rng):
    """First and last possible start occur, and none outside; all are about equally frequent."""
    tokens = np.arange(SEQ_LEN + 20, dtype=np.uint8)
    rows = rows_of(tokens)
    starts = Counter(int(row[0]) for step in range(300) for row in rows.train(step, 0).tokens)
    assert sorted(starts) == list(range(20))
    expected = 300 * BATCH_SIZE / 20
    assert max(abs(n - expected) for n in starts.values()) < 6 * math.sqrt(expected)


@settings(max_examples=50)
@given(length=st.integers(BATCH_SIZE * SEQ_LEN + 1, 400))
def test_a_sweep_covers_the_text_without_overlap(length):
    tokens = np.arange(length, dtype=np.uint16)
    rows = rows_of(tokens)
    seen = np.concatenate(
        [batch.tokens.ravel() for i in range(rows.num_sweeps()) for batch in rows.sweep(i)]
    )
    np.testing.assert_array_equal(seen, np.arange(len(seen)))
    left = length - 1 - len(seen)
    assert 0 <= left < SEQ_LEN, "less than a row is left out"


@settings(max_examples=50)
@given(length=st.integers(0, 3000), seq_len=st.integers(1, 20))
def test_split_keeps_order_and_holds_out_the_last_tenth_but_at_least_a_row(length, seq_len):
    tokens = np.arange(length)
    row = seq_len + 1
    if length < 2 * row:
        with pytest.raises(DataError, match=rf"{length:,} tokens.*a smaller --seq-len"):
            split(tokens, seq_len)
        return
    train, held_out = split(tokens, seq_len)
    np.testing.assert_array_equal(np.concatenate([train, held_out]), tokens)
    assert len(held_out) == max(length // 10, row)
    assert len(train) >= row


# --- bigrams


def slow_bigram_loss(train, held_out, vocab_size):
    """The bigram loss by dictionaries, a token at a time."""
    pairs, after, total = defaultdict(Counter), Counter(), 0
    for a, b in itertools.pairwise(train):
        pairs[a][b] += 1
        after[b] += 1
        total += 1
    losses = []
    for pseudo in PSEUDO_COUNTS:
        loss = 0.0
        for a, b in itertools.pairwise(held_out):
            prior = {
                token: (after[token] + 1) / (total + vocab_size) for token in range(vocab_size)
            }
            weight = pseudo * vocab_size
            known = sum(pairs[a].values()) + weight * sum(prior.values())
            loss -= math.log((pairs[a][b] + weight * prior[b]) / known)
        losses.append(loss / (len(held_out) - 1))
    return min(losses)


def test_bigram_loss_is_what_it_says(rng):
    train = rng.integers(0, 6, 60).astype(np.uint8) ** 2 % 7
    held_out = rng.integers(0, 7, 25).astype(np.uint8)
    expected = slow_bigram_loss(train.tolist(), held_out.tolist(), 7)
    assert bigram_loss(train, held_out, 7) == pytest.approx(expected, rel=1e-12)


def test_bigram_model_knows_a_cycle_and_nothing_of_noise(rng):
    cycle = np.tile(np.arange(50, dtype=np.uint8), 200)
    assert bigram_loss(cycle, cycle[:999], 50) < 0.02
    noise = rng.integers(0, 20, 40_000).astype(np.uint8)
    assert bigram_loss(noise[:-9000], noise[-9000:], 20) == pytest.approx(math.log(20), abs=0.02)
