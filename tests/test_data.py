"""Tokens and their sources, the rows that a step trains on, and the bigram model."""

import itertools
import math
import os
import sys
import types
from collections import Counter, defaultdict

import numpy as np
import pytest
from config_helpers import changed
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.comm.grid import Grid
from mpipar.config.resolve import resolve
from mpipar.data.bigram import PSEUDO_COUNTS, bigram_loss
from mpipar.data.rows import Rows, split
from mpipar.data.source import LLMC_HEADER, load_tokens
from mpipar.data.token_file import TokenFile
from mpipar.errors import DataError
from mpipar.ops import make

OPS = make("cpu", "float64")
BATCH_SIZE, SEQ_LEN = 24, 3


def rows_of(tokens, dp=1, num_microbatches=1, dp_rank=0, seed=3):
    config = changed(dp=dp, pp=1, tp=1, num_microbatches=num_microbatches, seed=seed,
                     batch_size=BATCH_SIZE, seq_len=SEQ_LEN)
    return Rows(OPS, tokens, resolve(config, dp)[0], Grid(dp_rank, dp_size=dp))


def whole_batch(tokens, dp, num_microbatches, batch_of):
    """Tokens and targets of the global batch, in the order of the rows' global numbers."""
    parts = [batch_of(rows_of(tokens, dp, num_microbatches, dp_rank), mb)
             for mb in range(num_microbatches) for dp_rank in range(dp)]
    return np.concatenate([np.stack([part.tokens, part.targets], 1) for part in parts])


# --- rows


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_every_layout_trains_on_the_same_rows(dp, num_microbatches, step, rng):
    tokens = rng.integers(0, 256, 500).astype(np.uint8)

    def batch(rows, mb):
        return rows.train(step, mb)

    np.testing.assert_array_equal(whole_batch(tokens, dp, num_microbatches, batch),
                                  whole_batch(tokens, 1, 1, batch))


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_every_layout_is_judged_on_the_same_rows(dp, num_microbatches):
    tokens = np.arange(200, dtype=np.uint8)
    alone = rows_of(tokens)
    for number in range(alone.num_sweeps()):
        replicas = [rows_of(tokens, dp, num_microbatches, dp_rank).sweep(number)
                    for dp_rank in range(dp)]
        parts = [batch for mb in range(num_microbatches)
                 for batches in replicas for batch in batches[mb:mb + 1]]
        one, = alone.sweep(number)
        np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), one.tokens)
        np.testing.assert_array_equal(np.concatenate([part.targets for part in parts]), one.targets)


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
    seen = np.concatenate([batch.tokens.ravel() for i in range(rows.num_sweeps())
                           for batch in rows.sweep(i)])
    np.testing.assert_array_equal(seen, np.arange(len(seen)))
    left = length - 1 - len(seen)
    assert 0 <= left < SEQ_LEN, "less than a row is left out"


@settings(max_examples=50)
@given(length=st.integers(0, 3000), batch_size=st.integers(1, 20), seq_len=st.integers(1, 20))
def test_split_keeps_order_and_holds_out_the_end(length, batch_size, seq_len):
    tokens = np.arange(length)
    one_batch = batch_size * seq_len + 1
    if length < 2 * one_batch:
        with pytest.raises(DataError, match=rf"{length:,} tokens.*--batch-size or --seq-len"):
            split(tokens, batch_size, seq_len)
        return
    train, held_out = split(tokens, batch_size, seq_len)
    np.testing.assert_array_equal(np.concatenate([train, held_out]), tokens)
    assert len(held_out) == max(length // 10, one_batch)
    assert len(train) >= one_batch


# --- bytes and files of tokens


def header(num_tokens, magic=20240520, version=1):
    ints = np.zeros(256, "<i4")
    ints[:3] = magic, version, num_tokens
    return ints.tobytes()


def test_text_is_read_as_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes("\u00e4b\n".encode())
    (tmp_path / "b.md").write_bytes(bytes(range(256)))
    tokens, what = load_tokens((str(tmp_path / "a.txt"), str(tmp_path / "b.md")), 256)
    assert tokens.dtype == np.uint8
    assert bytes(tokens) == "\u00e4b\n".encode() + bytes(range(256))
    assert what == "260 bytes from 2 files"


def test_a_folder_stands_for_its_files(tmp_path):
    for name, text in {"b.txt": "2", "sub/a.txt": "3", "a.txt": "1", ".secret": "x",
                       ".git/config": "x", "sub/.cache/c": "x"}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    tokens, what = load_tokens((str(tmp_path),), 256)
    assert bytes(tokens) == b"123"
    assert "3 files" in what


@pytest.mark.parametrize("with_header", [True, False])
def test_token_files(with_header, tmp_path, rng):
    ids = rng.integers(0, 50257, 1000).astype("<u2")
    path = tmp_path / "tokens.bin"
    path.write_bytes((header(1000) if with_header else b"") + ids.tobytes())
    tokens, what = load_tokens((str(path),), 50257)
    np.testing.assert_array_equal(tokens, ids)
    assert tokens.dtype == np.uint16
    assert what == "1,000 tokens from 1 file"
    tokens, _ = load_tokens((str(path), str(path)), 50257)
    np.testing.assert_array_equal(tokens, np.concatenate([ids, ids]))


def test_the_highest_id_is_the_vocabulary_s_last(tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(np.array([3, 299, 7], "<u2").tobytes())
    assert max(load_tokens((str(path),), 300)[0]) == 299
    with pytest.raises(DataError, match=r"token 299 at position 1 .* 299; type --vocab-size 300"):
        load_tokens((str(path),), 299)


@pytest.mark.parametrize(("content", "message"), [
    (header(2) + b"\0" * 6, r"2 tokens \(1,028 bytes\), the file has 1,030"),
    (header(9, version=2) + b"\0" * 18, "version 2"),
    (header(-4), "-4 tokens"),
    (header(0), "no token"),
    (header(4)[:700], "4 tokens"),
    (header(4, magic=20240801) + b"\0" * 16, "Llama 3"),
    (b"abc", "3 bytes are not a whole number"),
    (b"a", "1 bytes are not a whole number"),
    (b"", "empty"),
])  # fmt: skip
def test_token_file_that_is_none(content, message, tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_tokens((str(path),), 50257)
    assert len(caught.value.problems) == 1
    assert str(path) in str(caught.value)


def test_all_problems_of_the_data_at_once(tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "high.txt").write_bytes(b"ab\xff")
    names = ["empty.txt", "nothing", "high.txt", "missing"]
    with pytest.raises(DataError) as caught:
        load_tokens(tuple(str(tmp_path / name) for name in names), 200)
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 4
    for part in (*names, "is empty", "holds no file", "token 255 at position 2", "no such file"):
        assert part in text


def test_bytes_are_refused_for_a_vocabulary_of_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="50,257 is not one of bytes; give token files"):
        load_tokens((str(tmp_path / "a.txt"),), 50257)


def test_built_in_text():
    tokens, what = load_tokens((), 256)
    assert len(tokens) > 300_000
    assert f"{len(tokens):,} bytes of Python's language reference" in what
    assert b"generator" in bytes(tokens)
    for vocab_size, message in ((128, "outside the vocabulary of 128"), (50257, "50,257")):
        with pytest.raises(DataError, match=message):
            load_tokens((), vocab_size)


def test_python_without_the_built_in_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"pydoc_data.topics.* --data FILE_OR_FOLDER"):
        load_tokens((), 256)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics",
                        types.SimpleNamespace(topics={"b": "2", "a": "1"}))
    assert bytes(load_tokens((), 256)[0]) == b"1\n2"


def test_a_large_token_file_is_not_read_into_memory(tmp_path):
    path = tmp_path / "tokens.bin"
    with open(path, "wb") as file:
        file.write(header(2**25))
        file.truncate(LLMC_HEADER + 2**26)
    assert isinstance(load_tokens((str(path),), 50257)[0], TokenFile)


def rows_of_file(path):
    """The training rows of a .bin file of 600 tokens below 50."""
    path.write_bytes(np.arange(600, dtype="<u2").__mod__(50).tobytes())
    tokens, _ = load_tokens((str(path),), 50)
    train, held_out = split(tokens, BATCH_SIZE, SEQ_LEN)
    assert bigram_loss(train, held_out, 50) < 0.1  # a cycle
    return rows_of(train)


@pytest.mark.parametrize(("change", "message"), [
    (lambda path: os.truncate(path, 10), "ends at token 5, but tokens up to .* cut while it was"),
    (lambda path: path.write_bytes(np.full(600, 50, "<u2").tobytes()),
     r"tokens.bin: token 50 at position \d+ is outside the vocabulary of 50"),
], ids=["truncated", "larger ids"])  # fmt: skip
def test_a_token_file_that_changes_while_it_is_read(change, message, tmp_path):
    path = tmp_path / "tokens.bin"
    rows = rows_of_file(path)
    assert rows.train(1, 0).shape == (BATCH_SIZE, SEQ_LEN)
    change(path)
    with pytest.raises(DataError, match=message):
        rows.train(2, 0)


def test_data_of_more_than_4_gib(tmp_path, monkeypatch):
    """No signed 32-bit number counts its tokens, and none its bytes. Reading them takes long."""
    monkeypatch.setattr(TokenFile, "check", lambda tokens: None)
    path, count = tmp_path / "tokens.bin", 2**31 + 1000
    with open(path, "wb") as file:
        file.truncate(2 * count)
        file.seek(2 * count - 2)
        file.write(b"\7\0")
    tokens, what = load_tokens((str(path),), 256)
    assert f"{count:,} tokens" in what
    assert len(tokens) == count
    assert list(tokens[count - 2:count]) == [0, 7]


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
            prior = {token: (after[token] + 1) / (total + vocab_size)
                     for token in range(vocab_size)}
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
