"""Prompts, tokens and text; `mpipar generate` as a user starts it.

tests/mpi/test_weights_and_text.py shows that every layout draws the same tokens.
"""

import os
import shutil

import gpt2_reference as gpt2
import numpy as np
import pytest
from helpers import find_launcher
from hypothesis import example, given
from hypothesis import strategies as st
from in_process import assert_refused
from one_rank import worker_for
from program import layout_flags, mpipar
from safetensors.numpy import load_file, save_file

from mpipar.checkpoint import weights as checkpoint
from mpipar.data.tokenizer import default_tokenizer
from mpipar.errors import DataError
from mpipar.files.text import harmless
from mpipar.inference.prompts import show
from mpipar.ops.mixed_ops import DTYPES

needs_mpiexec = pytest.mark.skipif(find_launcher() is None, reason="no mpiexec: install .[mpich]")
SHAPE = {"layers": 4, "D": 18, "F": 31, "T": 7, "tied": True}
HEADS = 6
FULL = "mpipar: the text ends here because the model reads at most 7 tokens\n"


# --- prompts


@given(st.binary(min_size=1).map(list))
@example(list("a\u20ac\U0001f600".encode()))
@example([0xE2, 0x82])
@example([0xF0, 0x9F, 65, 0xE2, 0x82, 0xAC])
def test_text_shown_piece_by_piece_is_the_whole_text(tokens):
    """A character of several bytes is shown when its last byte has come, and never taken back."""
    pieces = list(show(tokens[:1], iter(tokens[1:]), default_tokenizer(256)))
    assert "".join(pieces) == default_tokenizer(256).decode(tokens)


def test_a_letter_is_shown_as_soon_as_it_is_there():
    tokens = iter(list("b\u20acc".encode()))
    assert list(show([97], tokens, default_tokenizer(256))) == ["a", "b", "", "", "\u20ac", "c", ""]


# --- the command


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two random models: of bytes, and of token ids."""
    rng = np.random.default_rng(5)
    folder = tmp_path_factory.mktemp("models")
    tensors = {}
    for name, vocab_size in (("bytes", 256), ("ids", 601)):
        tensors[name] = gpt2.random_weights(rng, **SHAPE, V=vocab_size)
        config = gpt2.configuration(**SHAPE, V=vocab_size, heads=HEADS)
        gpt2.write_model(folder / name / "weights", tensors[name], config)
    return folder, tensors


def generated(models, name, *words, ranks=None):
    result = mpipar("generate", models[0] / name, "--dtype", "float64", *words, ranks=ranks)
    assert result.returncode == 0, result.tail()
    assert result.stderr in ("", FULL)
    return result.stdout


def expected_text(models, name, prompt, count):
    tokenizer = default_tokenizer({"bytes": 256, "ids": 601}[name])
    tokens = tokenizer.encode(prompt)
    count = min(count, SHAPE["T"] + 1 - len(tokens))
    found = gpt2.greedy(models[1][name], HEADS, tokens, count, SHAPE["T"])
    return harmless(tokenizer.decode([*tokens, *found])) + "\n"


@pytest.mark.parametrize(("name", "prompt"), [
    ("bytes", "x"), ("bytes", "\u00e9 \u20ac"), ("ids", "600"), ("ids", " 7  600\n3 "),
])  # fmt: skip
def test_greedy_text_is_that_of_an_independent_gpt2(name, prompt, models):
    words = ["--prompt", prompt, "--temperature", "0", "--sample-tokens", "20"]
    assert generated(models, name, *words) == expected_text(models, name, prompt, 20)


@needs_mpiexec
@pytest.mark.parametrize(("layout", "name"), [
    ((1, 2, 2), "ids"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ((1, 1, 3), "bytes"), ((1, 4, 1), "ids"), ((2, 1, 2), "bytes"))),
], ids=str)  # fmt: skip
def test_text_is_that_of_one_rank(layout, name, models):
    ranks = int(np.prod(layout))
    for drawn in (["--temperature", "0"], ["--temperature", "0.8", "--seed", "4"]):
        words = ["--prompt", "12 3", "--sample-tokens", "15", *drawn]
        text = generated(models, name, *words, *layout_flags(layout), ranks=ranks)
        assert text == generated(models, name, *words)


def test_any_number_of_tokens(models):
    for count in (0, 1, 5):
        words = ["--prompt", "1 2 3", "--sample-tokens", str(count)]
        assert len(generated(models, "ids", *words).split()) == 3 + count


def test_float32_is_the_default(models):
    result = mpipar("generate", models[0] / "bytes" / "weights", "--prompt", "a")
    assert result.returncode == 0, result.tail()
    assert result.stdout.startswith("a")


@pytest.mark.parametrize(("words", "code", "parts"), [
    ("nowhere", 65, ["nowhere: there is no such folder"]),
    ("bytes --prompt=", 2, ["--prompt ''"]),
    ("ids", 2, ["--prompt 'The '", "without the files of a tokenizer takes ids"]),
    ("bytes --temperature -1", 2, ["--temperature -1", "at least 0"]),
    ("bytes --layers 2", 2, ["--layers: mpipar generate does not use it"]),
    ("bytes --tp 4", 2, ["tp 4", "1 was started"]),
])  # fmt: skip
def test_bad_input_is_refused(words, code, parts, models):
    run, *rest = words.split()
    assert_refused(code, parts, "generate", models[0] / run, *rest)


@pytest.mark.parametrize(("value", "dtype"), [
    (np.nan, "float32"), (-np.inf, "bfloat16"), (1e300, "float64")])  # fmt: skip
def test_weights_that_are_not_finite_are_refused(value, dtype, models, tmp_path):
    folder = shutil.copytree(models[0] / "ids" / "weights", tmp_path / "weights")
    tensors = load_file(folder / "model.safetensors")
    name = max(tensors, key=lambda name: tensors[name].size)
    tensors[name] = tensors[name].astype(DTYPES.get(dtype, dtype))
    tensors[name].reshape(-1)[-1] = value
    save_file(tensors, folder / "model.safetensors")
    worker = worker_for(folder, "float32")
    with pytest.raises(DataError, match=rf"tensor {name}: not all numbers are finite in float32"):
        checkpoint.load(worker, str(folder))


def test_a_pipe_as_weights_is_refused_and_not_waited_for(models, tmp_path):
    folder = shutil.copytree(models[0] / "ids" / "weights", tmp_path / "weights")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert_refused(65, ["model.safetensors: ", "is a named pipe; give a regular file"],
                   "generate", folder, "--prompt", "7")


# --- training on tokens ends in tokens


def test_a_model_of_ids_continues_its_own_data_by_default(tmp_path):
    """The default prompt is text, which such a model cannot take; nobody typed it."""
    ids = np.tile(np.arange(600, 620), 30).astype("<u2")
    (tmp_path / "tokens.bin").write_bytes(ids.tobytes())
    words = ["--data", tmp_path / "tokens.bin", "--vocab-size", "620", "--steps", "1",
             "--layers", "1", "--d-model", "4", "--heads", "1", "--seq-len", "8",
             "--sample-tokens", "3", "--batch-size", "4"]
    result = mpipar("train", *words, "--out", tmp_path / "run")
    assert result.returncode == 0, result.tail()
    assert "bigram" not in result.stdout, "that model is one of bytes"
    text = result.stdout.split("text generated from '600':\n")[1].splitlines()[0]
    assert len(text.split()) == 4
    assert text.startswith("600 ")
    assert_refused(2, ["--prompt 'Once'"], "train", *words, "--prompt", "Once",
                   "--out", tmp_path / "typed")
