"""Runs on a prepared folder: the model's vocabulary, the held-out part, resuming, and text."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from damage import flip
from in_process import alone, assert_refused, printed
from one_rank import fresh
from tokenizers_made import save_tokenizer

from mpipar.config.text import harmless
from mpipar.run.checkpoint.weights import save
from mpipar.run.data.fingerprint import fingerprint
from mpipar.run.data.source import load_source
from mpipar.run.data.token_file import pieces_of
from mpipar.run.data.tokenizer import FILES, load_tokenizer

STORIES = [f"Story {number}: the encoder of object {number * 7}.\n" * 3 for number in range(40)]
SMALL = (
    "--layers",
    1,
    "--d-model",
    8,
    "--heads",
    2,
    "--ffn",
    8,
    "--seq-len",
    16,
    "--batch-size",
    4,
    "--num-microbatches",
    1,
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to work in, with prepared data of 257 ids in `bytes`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stories.txt").write_text("<sep>".join(STORIES), encoding="utf-8")
    prepare("bytes", "bytes")
    return tmp_path


def prepare(tokenizer, out):
    printed(
        "data",
        "prepare",
        "stories.txt",
        "--separator",
        "<sep>",
        "--tokenizer",
        tokenizer,
        "--out",
        out,
    )


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ((), 257),
        (("--vocab-size", 300), 300),
        (("--preset", "gpt2"), 50257),
        (("--config", "a.toml"), 400),
    ],
)
def test_the_model_has_the_vocabulary_of_its_data(words, size, here):
    (here / "a.toml").write_text("vocab-size = 400\n")
    text = printed("train", "--print-config", "--data", "bytes", *words)
    assert f"\nvocab-size = {size}\n" in text
    assert ("# --vocab-size 257, the vocabulary of the data" in text) == (size == 257)


def test_an_id_above_the_model_s_vocabulary_is_refused(here):
    assert_refused(
        65,
        ["token 256 at position", "vocabulary of 256; type --vocab-size 257 or more"],
        "train",
        "--data",
        "bytes",
        "--vocab-size",
        256,
    )


def test_the_fingerprint_covers_all_files(here):
    def found(name):
        source = load_source((name,), 257)
        arrays = [source.tokens, source.held_out]
        digests = {piece.file.name: piece.sha256 for piece in pieces_of(arrays)}
        return fingerprint(arrays, digests)["files"]

    before = found("bytes")
    shutil.copytree("bytes", "copy")
    assert found("copy") == before
    path = here / "copy" / "dataset.json"
    path.write_text(path.read_text() + " ")  # such as another tokenizer of the same tokens
    assert found("copy") != before


@pytest.mark.text
def test_train_go_on_and_generate_with_the_tokenizer_of_the_data(here):
    """The run keeps the tokenizer from its first step on; another data folder is refused."""
    save_tokenizer(here / "model")
    prepare("model", "data")
    result = alone(
        "train",
        "--data",
        "data",
        "--out",
        "run",
        "--steps",
        2,
        *SMALL,
        "--sample-tokens",
        5,
        cwd=here,
    )
    assert result.returncode == 0, result.tail()
    assert "V 400, tied head" in result.stdout
    source = load_source(("data",), 400)
    assert f"{len(source.tokens):,} to train on, {len(source.held_out):,} held out" in result.stdout
    said = result.stdout.split("text generated from 'The ':\n")[1].split("\n\n")[0]
    said = "\n".join(line.removeprefix("| ") for line in said.splitlines())
    kept = load_tokenizer("run/weights")
    assert kept.digest == load_tokenizer("model").digest
    assert (
        json.loads((here / "run/weights/generation_config.json").read_text())["eos_token_id"]
        == kept.end
        == 0
    )
    assert {path.name for path in (here / "run" / "weights").iterdir()} & {*FILES} == {
        "tokenizer.json"
    }
    again = alone(
        "generate",
        "run",
        "--sample-tokens",
        5,
        cwd=here,
    )
    assert harmless(again.stdout).rstrip() == said.rstrip()
    shutil.copytree("data", "other")
    path = here / "other" / "train.bin"
    flip(path, 0)
    words = ("train", "--resume", "auto", "--out", "run", "--steps", 3)
    assert_refused(65, ["has other tokens than were written"], *words, "--data", "other")
    description = json.loads((here / "other" / "dataset.json").read_text())
    description["files"][0]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (here / "other" / "dataset.json").write_text(json.dumps(description))
    assert_refused(65, ["--data: has changed since the checkpoint"], *words, "--data", "other")
    np.testing.assert_array_equal(load_source(("other",), 400).tokens[4:], source.tokens[4:])


def test_a_large_vocabulary_has_no_table_of_pairs(here):
    """The square of 50,257 numbers would take 20 GB."""
    done = alone(
        "train",
        "--data",
        "bytes",
        *SMALL,
        "--vocab-size",
        600,
        "--steps",
        1,
        "--sample-tokens",
        0,
        "--eval-tokens",
        64,
        cwd=here,
    ).ended()
    assert "byte-bigram" not in done.stdout


@pytest.mark.text
def test_held_out_data_of_another_tokenizer_is_refused(here):
    prepare("train:300", "other")
    assert_refused(
        65,
        ["--val-data: its tokens were made by another", "--tokenizer other"],
        "train",
        "--data",
        "other",
        "--val-data",
        "bytes",
    )


def test_weights_keep_their_vocabulary(here):
    """No flag can change it, so none is named."""
    words = ("train", "--data", "bytes", "--init-from")
    save(fresh(layers=1, d_model=8, heads=2, ffn=8, seq_len=16, vocab_size=256), here / "weights")
    assert_refused(
        65, ["vocabulary of 256; give data prepared with the tokenizer"], *words, "weights"
    )
