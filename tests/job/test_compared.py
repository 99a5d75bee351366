"""What ranks compare before the first step: every byte that determines the numbers.

Each rank here starts in a folder of its own, as on a host of its own. What its session would
compare with those of the others is taken from it.
"""

import contextlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from in_process import StandIn, alone
from one_rank import fresh
from program import block_of, flip, pair
from tokenizers_made import save_tokenizer

from mpipar import cli
from mpipar.errors import DataError
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.manifest import read_manifest
from mpipar.run.data.source import load_source
from mpipar.run.data.token_file import fingerprint, pieces_of
from mpipar.run.files import digests
from mpipar.run.process import consistency
from mpipar.run.process.environment import CORETYPE
from mpipar.run.resume import Start, check_begin

SMALL = """--layers 1 --d-model 8 --heads 2 --ffn 8 --seq-len 8 --batch-size 4 --steps 2
    --num-microbatches 1""".split()
LARGE = 1 << 20  # bytes
CSV = ["0F0,0F1,0B0,0B1\n", "0F0,0B0,0F1,0B1\n"]


class ComparedError(Exception):
    """Ends a command where it has compared all that it compares at its start."""


class Taking(StandIn):
    """The session of one rank, which gives away what it would compare."""

    def compare(self, facts):
        self.taken = getattr(self, "taken", {}) | dict(facts)
        if "--dp" in facts and self.facts.keys() & {"command"}:
            raise ComparedError


def facts_in(folder, *words, rank=0):
    """What a rank whose working directory is this folder compares."""
    session = Taking(1, rank)
    with contextlib.chdir(folder), pytest.raises(ComparedError):
        cli.main([str(word) for word in words], session)
    assert CORETYPE in session.facts, "kernels round differently"
    return session.taken


def differing(folders, *words):
    """The fields in which ranks in these folders differ."""
    table = consistency.differences([facts_in(folder, *words) for folder in folders])
    return sorted({line.split("  ")[0] for line in table[1:]})


@pytest.fixture
def hosts(tmp_path):
    """Two folders with equal copies of data, weights, prompts and a schedule."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    tokens = np.random.default_rng(0).integers(0, 256, 2 << 20).astype("<u2")
    tokens.tofile(one / "tokens.bin")
    checkpoint.save(
        fresh(d_model=256, heads=2, layers=1, ffn=512, vocab_size=256, dtype="float32"), one / "w"
    )
    (one / "w" / "digests.json").unlink()  # by which a host would know that its own copy is damaged
    assert (one / "w" / "model.safetensors").stat().st_size > 2 * LARGE
    (one / "p.txt").write_text("a b\n")
    (one / "s.csv").write_text(CSV[0])
    (one / "c.toml").write_text("lr = 0.1\n")
    shutil.copytree(one, other)
    return one, other


TRAIN = ("train", "--data", "tokens.bin")


@pytest.mark.parametrize(
    ("words", "change", "fields"),
    [
        ((*TRAIN, *SMALL), lambda host: flip(host / "tokens.bin"), ["data"]),
        (
            (*TRAIN, "--init-from", "w"),
            lambda host: flip(host / "w" / "model.safetensors"),
            ["weights"],
        ),
        (
            ("generate", "w", "--prompts", "p.txt"),
            lambda host: (host / "p.txt").write_text("a c\n"),
            ["prompts"],
        ),
        (
            (*TRAIN, *SMALL, "--num-microbatches", 2, "--schedule-csv", "s.csv"),
            lambda host: (host / "s.csv").write_text(CSV[1]),
            ["schedule"],
        ),
        (
            (*TRAIN, *SMALL, "--config", "c.toml"),
            lambda host: (host / "c.toml").write_text("lr = 0.2\n"),
            ["--lr"],
        ),
        (
            ("generate", "w", "--prompt", "a"),
            lambda host: (host / "w" / "generation_config.json").write_text('{"eos_token_id": 7}'),
            ["sampling"],
        ),
        (("train", "--data", "a.txt", *SMALL), lambda host: flip(host / "a.txt"), ["data"]),
    ],
    ids=[
        "data",
        "weights",
        "prompts",
        "schedule",
        "config",
        "stop tokens",
        "text",
    ],
)
def test_one_bit_in_the_middle_of_what_a_rank_reads_is_seen(words, change, fields, hosts):
    for host in hosts:
        (host / "a.txt").write_text("a text of bytes. " * 40)
    assert differing(hosts, *words) == []
    change(hosts[1])
    assert differing(hosts, *words) == fields


def test_other_checkpoints_of_one_name_are_seen(hosts):
    alone(*TRAIN, *SMALL, "--eval-tokens", 64, "--out", "run", cwd=hosts[0]).ended()
    shutil.copytree(hosts[0] / "run", hosts[1] / "run")
    words = ("train", "--resume", "run", "--steps", 9)
    assert differing(hosts, *words) == []
    step = hosts[1] / "run" / "checkpoints" / "step-00000002"
    other = replace(read_manifest(step), schedule="gpipe")
    (step / "manifest.json").write_text(other.text())
    assert differing(hosts, *words) == ["checkpoint"]


@pytest.mark.text
def test_the_files_of_a_tokenizer_are_compared(hosts):
    words = (*TRAIN, "--init-from", "w")
    shape = {"d_model": 8, "heads": 2, "layers": 1, "ffn": 8, "vocab_size": 400}
    for host in hosts:  # a model with as many ids as the tokenizer has
        save_tokenizer(host / "w")
        checkpoint.save(fresh(**shape, dtype="float32"), host / "w")
    assert differing(hosts, *words) == []
    path = hosts[1] / "w" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"][-1:] = []
    path.write_text(json.dumps(content))
    assert differing(hosts, *words) == ["tokenizer"]


@pytest.mark.fault
@pytest.mark.slow
def test_ranks_with_other_copies_end_before_the_first_step(hosts):
    flip(hosts[1] / "tokens.bin")
    words = [*TRAIN, *SMALL, "--dp", "2", "--out", hosts[0] / "run"]
    block = block_of(pair(words, words, hosts), 69)
    assert [line.split()[:2] for line in block.splitlines() if "data  " in line] == [
        ["data", "0"],
        ["data", "1"],
    ]
    assert not (hosts[0] / "run").exists()


# --- the table of what differs


@pytest.mark.fault
def test_the_table_names_field_ranks_and_values():
    facts = [{"a": "1", "b": "x"}, {"a": "2", "b": "x"}, {"a": "1", "b": "x"}]
    assert [line.split() for line in consistency.differences(facts)] == [
        ["field", "ranks", "value"],
        ["a", "0,2", "1"],
        ["a", "1", "2"],
    ]


def test_one_byte_of_the_source_changes_the_version(tmp_path, monkeypatch):
    assert Path(cli.__file__).is_relative_to(consistency.PACKAGE)
    monkeypatch.setattr(consistency, "PACKAGE", tmp_path)
    (tmp_path / "one.py").write_text("x = 1\n")
    before = consistency.source_digest()
    (tmp_path / "one.py").write_text("x = 2\n")
    assert consistency.source_digest() != before


# --- digests of files


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, in which also facts about a new file are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "SETTLED", -1)
    return tmp_path / "cache" / "mpipar" / digests.FOLDER


def digest(path):
    with open(path, "rb") as file:
        return digests.digest_of(file, "here")


def test_a_file_is_read_once_until_it_changes(tmp_path, cache, monkeypatch):
    path, reads, plain = tmp_path / "f", [], os.pread
    monkeypatch.setattr(os, "pread", lambda *given: reads.append(given) or plain(*given))
    path.write_bytes(b"x" * 1000)
    first = digest(path)
    assert reads
    reads.clear()
    assert digest(path) == first
    assert not reads
    status = path.stat()
    path.write_bytes(b"x" * 999 + b"y")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as if nothing had been written
    assert digest(path) != first
    assert reads


def test_what_is_damaged_in_the_cache_is_not_believed(tmp_path, cache):
    (tmp_path / "f").write_bytes(b"abc")
    first = digest(tmp_path / "f")
    (kept,) = cache.iterdir()
    kept.write_text('{"file": "x"}')
    assert digest(tmp_path / "f") == first


def test_a_file_that_was_just_written_is_read_again(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(digests, "SETTLED", 10**12)
    (tmp_path / "f").write_bytes(b"abc")
    digest(tmp_path / "f")
    assert not cache.exists() or not list(cache.iterdir())


def test_tokens_are_checked_again_only_for_a_smaller_vocabulary(tmp_path, cache, monkeypatch):
    path, reads = tmp_path / "t.bin", []
    np.arange(300, dtype="<u2").tofile(path)
    load_source((str(path),), 300)
    plain = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *given: reads.append(given) or plain(*given))
    load_source((str(path),), 301)
    digest(path)
    assert not reads
    with pytest.raises(DataError, match="token 299 is outside"):
        load_source((str(path),), 299)


# --- the fingerprint of data


def found(path):
    """(arrays, fingerprint) of a token file."""
    arrays = [load_source((str(path),), 256).tokens]
    return arrays, fingerprint(
        arrays, {piece.file.name: digest(piece.file.name) for piece in pieces_of(arrays)}
    )


def test_the_fingerprint_of_a_large_token_file_sees_every_byte_and_the_cut(tmp_path):
    path, other = tmp_path / "large.bin", tmp_path / "other.bin"
    tokens = np.zeros(2 * LARGE, np.uint16)
    tokens.tofile(path)
    tokens[LARGE] = 1
    tokens.tofile(other)
    first, second = (found(one)[1] for one in (path, other))
    assert (first["length"], first["dtype"]) == (2 * LARGE, "uint16")
    assert first["files"] != second["files"]
    path.rename(tmp_path / "moved.bin")
    arrays, moved = found(tmp_path / "moved.bin")
    assert moved == first
    digests = {arrays[0].pieces[0].file.name: "x"}
    other_cut = [arrays[0][:LARGE], arrays[0][LARGE:]]  # other tokens are held out
    assert fingerprint(other_cut, digests) != fingerprint(arrays, digests)


def test_a_checkpoint_refuses_what_has_changed():
    new, state = {"length": 9, "dtype": "uint16", "files": "a"}, {"candidates": ("step",)}
    older = {"length": 9, "dtype": "uint16", "sha256": "of the ends of the files"}
    for stored in (new, older):
        check_begin(Start(data=stored, **state), new, "")
        with pytest.raises(DataError, match="--data: has changed since the checkpoint"):
            check_begin(Start(data=stored, **state), new | {"length": 8}, "")
    with pytest.raises(DataError, match="--data: has changed since the checkpoint"):
        check_begin(Start(data=new, **state), new | {"files": "b"}, "")
