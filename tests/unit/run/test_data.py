"""Data: the rows that a step trains on, the bigram model, and the sources of tokens."""

import gzip
import itertools
import math
import os
import pickle
import sys
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from config_helpers import changed
from hypothesis import given, settings
from hypothesis import strategies as st

from mpipar.comm.grid import Grid
from mpipar.config.resolve import resolve
from mpipar.errors import DataError
from mpipar.ops import make
from mpipar.run.data.parts import PSEUDO_COUNT, bigram_loss, load, split
from mpipar.run.data.rows import Rows
from mpipar.run.data.source import load_source

OPS = make("cpu", "float64")
BATCH_SIZE, SEQ_LEN = 24, 3


def rows_of(tokens, dp=1, num_microbatches=1, rank=0, seed=3, islands=None):
    """Rows of one replica; dp: the replicas of all islands."""
    config = changed(
        dp=dp,
        pp=1,
        tp=1,
        num_microbatches=num_microbatches,
        seed=seed,
        batch_size=BATCH_SIZE,
        seq_len=SEQ_LEN,
        islands=islands,
    )
    sizes = {"island": islands or 1, "dp": dp // (islands or 1)}
    return Rows(OPS, tokens, resolve(config, dp)[0], Grid(rank, sizes))


def whole_batch(tokens, dp, num_microbatches, batch_of):
    """Tokens and targets of the global batch, in the order of the rows' global numbers."""
    parts = [
        batch_of(rows_of(tokens, dp, num_microbatches, dp_rank), mb)
        for mb in range(num_microbatches)
        for dp_rank in range(dp)
    ]
    return np.concatenate([np.stack([part.tokens, part.targets], 1) for part in parts])


# --- rows


@pytest.mark.parametrize("inside", [1, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_an_island_reads_the_same_part_of_the_batch_on_every_layout(inside, num_microbatches, rng):
    """The second step of two islands."""
    tokens = rng.integers(0, 256, 500).astype(np.uint8)
    for number, part in enumerate(np.split(rows_of(tokens).train(2, 0).tokens, 2)):
        ranks = range(number * inside, (number + 1) * inside)
        found = [
            rows_of(tokens, 2 * inside, num_microbatches, rank, islands=2).train(2, mb).tokens
            for mb in range(num_microbatches)
            for rank in ranks
        ]
        np.testing.assert_array_equal(np.concatenate(found), part)


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
    replicas = [rows_of(tokens, dp, num_microbatches, dp_rank).sweep() for dp_rank in range(dp)]
    for ((one,), _), *filled in zip(rows_of(tokens).sweep(), *replicas, strict=True):
        parts = [
            batches[mb]
            for mb in range(num_microbatches)
            for batches, counted in filled
            if mb < counted
        ]
        np.testing.assert_array_equal(np.concatenate([part.tokens for part in parts]), one.tokens)
        np.testing.assert_array_equal(np.concatenate([part.targets for part in parts]), one.targets)
        assert len({len(batches) for batches, _ in filled}) == 1, "replicas run the same passes"


def test_a_batch_is_a_piece_of_the_text_and_its_successors():
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


def test_rows_begin_anywhere():
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
    seen = np.concatenate([batch.tokens.ravel() for (batch,), _ in rows.sweep()])
    np.testing.assert_array_equal(seen, np.arange(len(seen)))
    left = length - 1 - len(seen)
    assert 0 <= left < SEQ_LEN, "less than a row is left out"


@settings(max_examples=50)
@given(length=st.integers(2, 3000), seq_len=st.integers(1, 20))
def test_split_keeps_order_and_holds_out_the_last_tenth_but_at_least_a_row(length, seq_len):
    train, held_out = split(np.arange(length), seq_len)
    np.testing.assert_array_equal(np.concatenate([train, held_out]), np.arange(length))
    assert len(held_out) == min(length, max(length // 10, seq_len + 1))


# --- bigrams


def test_bigram_loss_is_what_it_says(rng):
    """Beside the same formula by dictionaries, a token at a time."""
    train = rng.integers(0, 6, 60).astype(np.uint8) ** 2 % 7
    held_out = rng.integers(0, 7, 25).astype(np.uint8)
    pairs, before = Counter(itertools.pairwise(train.tolist())), Counter(train[:-1].tolist())
    prior = (np.bincount(train[1:], minlength=7) + 1) / (len(train) - 1 + 7)
    more = 7 * PSEUDO_COUNT
    expected = -np.mean([
        math.log((pairs[a, b] + more * prior[b]) / (before[a] + more))
        for a, b in itertools.pairwise(held_out.tolist())
    ])  # fmt: skip
    assert bigram_loss(train, held_out, 7) == pytest.approx(expected, rel=1e-12)


# --- sources: text read as bytes, and files of tokens, held out by their names


def header(num_tokens, magic=20240520, version=1):
    ints = np.zeros(256, "<i4")
    ints[:3] = magic, version, num_tokens
    return ints.tobytes()


def test_a_folder_stands_for_its_texts_as_bytes(tmp_path):
    """Without what is hidden; of JSON lines only the texts, and no byte order mark."""
    for name, content in {
        "b.txt": bytes(range(1, 128)),
        "sub/c.jsonl": b'\xef\xbb\xbf{"text": "one\\ntwo"}\n\n{"id": 3, "text": "\\u00e4"}\n',
        "a.txt": b"\xef\xbb\xbf\xc3\xa4b\n",
        ".secret": b"x",
        "sub/.cache/c": b"x",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    source = load_source((str(tmp_path),), 256)
    assert bytes(source.tokens) == b"\xc3\xa4b\n" + bytes(range(1, 128)) + b"one\ntwo\n\xc3\xa4\n"
    assert source.what == "142 bytes from 3 files"


@pytest.mark.parametrize(("head", "dtype", "vocab_size"), [
    (b"", "<u2", 50257), (header(1000), "<u2", 50257),
    (header(1000, magic=20240801, version=7), "<u4", 128_256),
])  # fmt: skip
def test_token_files(head, dtype, vocab_size, tmp_path, rng):
    ids, path = rng.integers(0, vocab_size, 1000).astype(dtype), tmp_path / "tokens.bin"
    path.write_bytes(head + ids.tobytes())
    source = load_source((str(path), str(path)), vocab_size)
    np.testing.assert_array_equal(source.tokens, np.concatenate([ids, ids]))
    assert source.what == f"2,000 tokens ({ids.dtype.name}) from 2 files"


def test_the_highest_id_is_the_vocabulary_s_last(tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(np.array([3, 299, 7], "<u2").tobytes())
    assert np.max(load_source((str(path),), 300).tokens) == 299
    with pytest.raises(DataError, match=r"token 299 is outside .* 299; type --vocab-size 300"):
        load_source((str(path),), 299)


@pytest.mark.parametrize(("content", "message"), [
    (header(2) + b"\0" * 6, r"2 tokens \(1,028 bytes\), but the file has 1,030"),
    (header(9, version=2) + b"\0" * 18, "version 2, which is not"), (header(-4), "-4 tokens"),
    (header(0), "0 tokens"), (header(4)[:700], "4 tokens"), (b"abc", "not a whole number"),
    (header(4, magic=20240522) + b"\0" * 8, "llm.c's format 20240522"), (b"", "empty"),
    (b"once upon a time, there was a text\n" * 9, "is text, not ids"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
    (gzip.compress(bytes(range(256)) * 9, mtime=0), "gzip"), (pickle.dumps([1.5] * 99), "pickle"),
    (b"PAR1" + b"\1\2\3\4" * 99, "Parquet"), (b"<!DOCTYPE html>" * 9, "a web page"),
    (np.array([5, -1] * 9, "<i4").tobytes(), "outside"),
    *((np.array([7, 44_444, 0] * 9, kind).tobytes(), "every second id is 0")
      for kind in ("<u4", "<i4", "<i8", ">i4", ">u8")),
])  # fmt: skip
def test_token_file_that_is_none(content, message, tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path}.*{message}") as caught:
        load_source((str(path),), 50257)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(("names", "first"), [
    (("train.bin", "val.bin"), 1),
    (("tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin"), 1),
    (("fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"), 2),
    (("interval.bin", "val-00000.bin", "val-00001.bin"), 1),
])  # fmt: skip
def test_files_that_are_held_out_by_their_names(names, first, tmp_path):
    """A folder as nanoGPT or llm.c leaves it; the files from the `first` one on are held out."""
    for number, name in enumerate(names):
        head = header(300) if "_" in name else b""
        (tmp_path / name).write_bytes(head + np.full(300, number, "<u2").tobytes())
    (tmp_path / "meta.pkl").write_bytes(b"\0")
    config = changed(data=(str(tmp_path),), batch_size=BATCH_SIZE, seq_len=SEQ_LEN)
    (train, held_out), what = load(resolve(config, 1)[0])
    assert what == f"{300 * len(names)} tokens (uint16) from {len(names)} files"
    np.testing.assert_array_equal(train, np.repeat(range(first), 300))
    np.testing.assert_array_equal(held_out, np.repeat(range(first, len(names)), 300))


def test_data_that_is_held_out_alone_or_too_small(tmp_path):
    for name, count in (("val.bin", SEQ_LEN), ("train.bin", BATCH_SIZE * SEQ_LEN)):
        (tmp_path / name).write_bytes(np.zeros(count, "<u2").tobytes())

    def loaded(**values):
        found = {name: (str(tmp_path / path),) for name, path in values.items()}
        return load(resolve(changed(batch_size=BATCH_SIZE, seq_len=SEQ_LEN, **found), 1)[0])[0]

    with pytest.raises(DataError, match="held out, as its name says, so there is nothing"):
        loaded(data="val.bin")
    with pytest.raises(DataError, match="or to hold out: 72 and 3 tokens, but a row needs"):
        loaded(data=".")
    (tmp_path / "val.bin").write_bytes(np.zeros(9, "<u2").tobytes())
    for val_data, count in (("val.bin", 9), (".", 9), ("train.bin", 72)):
        assert len(loaded(data="train.bin", val_data=val_data)[1]) == count


@pytest.mark.parametrize(("vocab_size", "kind"), [(65_536, "<u2"), (65_537, "<i4")])
def test_ids_are_read_with_the_type_that_the_vocabulary_needs(vocab_size, kind, tmp_path):
    path, ids = tmp_path / "tokens.bin", np.array([7, 50_000, 3, 0, 44_444, 199] * 50)
    path.write_bytes(ids.astype(kind).tobytes())
    source = load_source((str(path),), vocab_size)
    np.testing.assert_array_equal(source.tokens[5:99], ids[5:99])
    assert source.what == f"300 tokens (uint{8 * int(kind[2])}) from 1 file"
    wider = "<u4" if kind == "<u2" else "<u8"
    for other in (wider, wider.replace("<", ">")):
        path.write_bytes(ids.astype(other).tobytes())
        with pytest.raises(DataError, match="every second id is 0"):
            load_source((str(path),), vocab_size)


def test_big_endian_ids_are_refused(tmp_path, rng):
    """Where every id of 16 bits is in the vocabulary, their bytes show it."""
    path, ids = tmp_path / "tokens.bin", rng.integers(0, 50_257, 10_000)
    path.write_bytes(ids.astype(">u2").tobytes())
    with pytest.raises(DataError, match="big-endian"):
        load_source((str(path),), 65_536)
    path.write_bytes(ids.astype("<u2").tobytes())
    assert len(load_source((str(path),), 65_536).tokens) == len(ids)


def test_ids_that_begin_as_a_pickle_or_an_archive_does(tmp_path):
    path = tmp_path / "tokens.bin"
    for first in (0x0280, 0x8B1F, 0xFEFF, 0xFFFE):
        path.write_bytes(np.array([first, 5, 7], "<u2").tobytes())
        assert load_source((str(path),), 65_536).tokens.__array__()[0] == first


def test_a_sparse_file_is_judged_before_it_takes_memory(tmp_path):
    """Three GiB of zeros: its first byte is no text, so nothing more is read."""
    (tmp_path / "a.txt").touch()
    os.truncate(tmp_path / "a.txt", 3 << 30)
    tracemalloc.start()
    with pytest.raises(DataError, match="byte 0 is zero"):
        load_source((str(tmp_path),), 256)
    assert tracemalloc.get_traced_memory()[1] < 1 << 26
    tracemalloc.stop()


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), data=st.data())
def test_several_files_are_one_stream(sizes, data, tmp_path_factory):
    folder, stops = tmp_path_factory.mktemp("stream"), np.cumsum(sizes)
    whole = np.arange(stops[-1], dtype="<u2")
    for number, part in enumerate(np.split(whole, stops[:-1])):
        (folder / f"{number}.bin").write_bytes(part.tobytes())
    tokens = load_source((str(folder),), len(whole) + 1).tokens
    first, last, inner = (data.draw(st.integers(0, len(whole))) for _ in range(3))
    part, expected = tokens[first:last], whole[first:last]
    assert len(part) == len(expected)
    np.testing.assert_array_equal(part, expected)
    np.testing.assert_array_equal(part[inner:], expected[inner:])
    np.testing.assert_array_equal(tokens[-2:], whole[-2:])


def test_all_problems_of_the_data_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "high.txt").write_bytes("ab\u00ff".encode())
    with pytest.raises(DataError) as caught:
        load_source(("empty.txt", "nothing", "high.txt", "missing"), 190)
    assert [one.partition(":")[0] for one in sorted(caught.value.problems)] == [
        "empty.txt", "high.txt", "missing", "nothing",
    ]  # fmt: skip


def test_built_in_text(monkeypatch):
    source = load_source((), 256)
    assert len(source.tokens) > 300_000
    assert f"{len(source.tokens):,} bytes of Python's language reference" in source.what
    for vocab_size, message in ((128, "outside the vocabulary of 128"), (50257, "50,257 is not")):
        with pytest.raises(DataError, match=message):
            load_source((), vocab_size)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(DataError, match=r"pydoc_data.topics.* --data FILE_OR_FOLDER"):
        load_source((), 256)


@pytest.mark.parametrize(("change", "message"), [
    (lambda path: os.truncate(path, 10), "it was truncated while"),
    (lambda path: path.write_bytes(np.full(600, 50, "<u2").tobytes()),
     "tokens.bin: token 50 is outside the vocabulary of 50"),
], ids=["truncated", "larger ids"])  # fmt: skip
def test_a_token_file_that_changes_while_it_is_read(change, message, tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(np.arange(600, dtype="<u2").__mod__(50).tobytes())
    train, held_out = split(load_source((str(path),), 50).tokens, SEQ_LEN)
    assert bigram_loss(train, held_out, 50) < 0.5  # a cycle
    rows = rows_of(train)
    assert rows.train(1, 0).shape == (BATCH_SIZE, SEQ_LEN)
    change(path)
    with pytest.raises(DataError, match=message):
        rows.train(2, 0)


@pytest.mark.fault
def test_data_of_more_than_4_gib(tmp_path):
    """No signed 32-bit number counts its tokens, and none its bytes. Reading them takes long."""
    path, count = tmp_path / "tokens.bin", 2**31 + 1000
    with open(path, "wb") as file:
        file.truncate(2 * count)
        file.seek(2 * count - 2)
        file.write(b"\7\0")
    source = load_source((str(path),), 256, thorough=False)
    assert f"{count:,} tokens (uint16)" in source.what
    assert len(source.tokens) == count
    assert np.asarray(source.tokens[count - 2 : count]).tolist() == [0, 7]
