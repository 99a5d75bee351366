"""Prompts, tokens and text; `mpipar generate` as a user starts it.

tests/equal/run/test_weights_and_text.py shows that every layout draws the same tokens.
"""

import json
import shutil
from dataclasses import replace

import gpt2_reference as gpt2
import numpy as np
import pytest
from config_helpers import reading_of
from hypothesis import example, given
from hypothesis import strategies as st
from in_process import alone, assert_refused
from one_rank import fresh, worker_for
from safetensors.numpy import load_file, save_file
from tokenizers_made import save_like_llama, save_tokenizer

from mpipar.commands import generate
from mpipar.config.text import harmless
from mpipar.errors import DataError, UsageError
from mpipar.ops.mixed_ops import DTYPES
from mpipar.run import generation as generate_command
from mpipar.run import inputs
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.data.tokenizer import default_tokenizer, load_tokenizer, tokenizer_of
from mpipar.run.generation import Prompt, answer, read_prompts, show
from mpipar.run.inference.generate import Sampling, Text, draw

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


@pytest.mark.text
@given(text=st.text(alphabet="the object\u00e4\u4e2d\U0001f600\ufffd", min_size=1, max_size=9))
def test_whole_characters_with_byte_fallback(text, fallback):
    """Each byte of a letter that is not in the vocabulary is a token of its own."""
    tokens = fallback.encode(text)
    pieces = list(show(tokens[:1], iter(tokens[1:]), fallback))
    assert "".join(pieces) == fallback.decode(tokens)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@pytest.fixture(scope="module")
def fallback(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fallback")
    save_like_llama(folder)
    return load_tokenizer(folder)


def test_an_answer_completes_the_character_that_its_prompt_began():
    tokenizer = default_tokenizer(256)
    ids = list("a\u20ac".encode())
    text = Text(0, [*ids, 98], end="length")
    assert answer(tokenizer, Prompt("?", ids[:2]), text)["text"] == "\u20acb"


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("largest", [np.inf, np.nan, -np.inf])
def test_a_logit_that_is_not_finite_is_never_drawn(largest, temperature):
    candidates = np.array([[largest, 3.0], [1.0, 2.0], [-np.inf, 1.0]])
    with np.errstate(all="raise"):
        assert np.isnan(draw(candidates, Sampling(1, temperature), 0, 0))
        assert draw(candidates[1 : 2 + (temperature > 0)], Sampling(1, temperature), 0, 0) == 2


def test_prompts_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert [text for _, text in read_prompts(str(tmp_path / "a.txt"))] == ["one", "two"]
    for content, part in (("one".encode("utf-16"), "UTF-16"), (b"\x1f\x8b\x08", "gzip")):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(DataError, match=part):
            read_prompts(str(tmp_path / "a.txt"))


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


def generated(models, name, *words):
    result = alone("generate", models[0] / name, "--dtype", "float64", *words).ended()
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


@pytest.mark.parametrize(("words", "code", "parts"), [
    ("nowhere", 65, ["nowhere: there is no such folder"]),
    ("bytes --prompt=", 2, ["--prompt ''"]),
    ("ids --prompt Once", 2, ["--prompt 'Once'", "without the files of a tokenizer takes ids"]),
    ("bytes --tp 4", 2, ["--tp 4", "on 1 rank"]),
    ("bytes --prompt=12345678", 2, ["'12345678': has 8 tokens", "at most 7", "shorten it"]),
    ("bytes --prompt a --prompts p.txt", 2, ["--prompt and --prompts p.txt: give one of them"]),
    ("bytes --answers a.jsonl", 2, ["--answers: is gone; redirect the standard output"]),
    ("bytes --prompts nowhere.txt", 65, ["nowhere.txt: No such file"]),
    ("bytes --top-k 0 --stop-token x", 2, ["--top-k 0", "--stop-token"]),
    ("bytes --prompt a --stop-token 3,999", 2, ["--stop-token 999: is not in the vocabulary"]),
    ("bytes --batch-size 3 --num-microbatches 2", 2, ["--batch-size 3 with"]),
    ("bytes --tp 1 --cp 2 --prompt a", 2, ["--cp 2", "use --dp for more texts, or --tp or --pp"]),
])  # fmt: skip
def test_bad_input_is_refused(words, code, parts, models):
    run, *rest = words.split()
    assert_refused(code, parts, "generate", models[0] / run, *rest, ranks=1 + ("--cp" in rest))


@pytest.mark.parametrize(("name", "text", "code", "parts"), [
    ("p.txt", "a\n\n123456789\n", 2, ["p.txt: line 3: has 9 tokens"]),
    ("p.txt", " \n\n", 65, ["p.txt: has no prompt"]),
    ("p.txt", b"a\n\xff\n", 65, ["p.txt: is not UTF-8 text: byte 2"]),
    ("p.txt", "12345678\n" * 15, 2, ["p.txt: line 10"]),
])  # fmt: skip
def test_files_of_prompts_that_are_refused(name, text, code, parts, models, tmp_path):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert_refused(code, parts, "generate", models[0] / "bytes", "--prompts", name, folder=tmp_path)


def test_prompts_of_a_file_are_answered_in_their_order(models, tmp_path):
    """Two batches; each answer is the text of its prompt alone."""
    prompts = ["a", "\u00e9", "12345", "b c", "1234567"]
    (tmp_path / "p.txt").write_text("\n".join(prompts), "utf-8")
    words = ["generate", models[0] / "bytes", "--dtype", "float64", "--temperature", "0"]
    words += ["--sample-tokens", "3", "--batch-size", "3", "--prompts", "p.txt"]
    done = alone(*words, cwd=tmp_path).ended()
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["prompt"] for one in found] == prompts
    assert [one["end"] for one in found] == ["length", "length", "length", "length", "seq_len"]
    for one in found:
        text = expected_text(models, "bytes", one["prompt"], 3)
        assert harmless(one["prompt"] + one["text"]) + "\n" == text
        assert len(one["tokens"]) == (1 if one["end"] == "seq_len" else 3)


def test_a_stop_token_ends_the_text_and_is_not_shown(models):
    words = ["--prompt", "1 2 3", "--temperature", "0", "--sample-tokens", "4"]
    whole = generated(models, "ids", *words).split()
    assert len(whole) == 7
    stop = whole[5]
    shown = generated(models, "ids", *words, "--stop-token", f"600,{stop}").split()
    assert shown == whole[: 3 + whole[3:].index(stop)]


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
    with pytest.raises(DataError, match=rf"not all numbers are finite in float32, in {name};"):
        checkpoint.load(worker, str(folder))


# --- training on tokens ends in tokens


@pytest.mark.parametrize(("config", "generation", "expected"), [
    ({"eos_token_id": 41}, None, (41,)), ({"eos_token_id": [41, 7]}, None, (41, 7)),
    ({"eos_token_id": 41}, {"eos_token_id": [5]}, (5,)), ({"eos_token_id": 41}, {}, (41,)),
    ({"eos_token_id": None}, None, ()), ({"eos_token_id": 601}, None, ()), ({}, None, ()),
])  # fmt: skip
def test_texts_end_as_the_files_beside_the_weights_say(config, generation, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert generate_command.ends_of(tmp_path, default_tokenizer(601), 601) == expected


@pytest.mark.text
def test_text_for_weights_with_their_own_tokenizer_is_refused(tmp_path):
    checkpoint.save(fresh(vocab_size=300, layers=1, seq_len=8, dtype="float32"), tmp_path / "w")
    save_tokenizer(tmp_path / "w", 300)
    (tmp_path / "a.txt").write_text("a text of ASCII letters. " * 100)
    for data in (["--data", tmp_path / "a.txt"], []):
        words = ["train", "--init-from", tmp_path / "w", *data, "--out", tmp_path / "run"]
        assert_refused(65, ["type mpipar data prepare TEXT... --tokenizer"], *words)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_weights_that_overflow_end_in_words_alone(temperature, tmp_path):
    """No warning with a path of our source is printed before them."""
    worker = fresh(layers=1, seq_len=8, vocab_size=256, dtype="float32")
    for flat in worker.flats:
        flat.data[...] = 6e4
    checkpoint.save(worker, tmp_path / "w")
    words = ["--dtype", "float16", "--prompt", "a", "--temperature", temperature]
    result = alone("generate", tmp_path / "w", *words)
    assert result.returncode == 79
    assert "a logit is infinite or not a number" in result.stderr
    assert "Warning" not in result.stderr


@pytest.mark.parametrize("vocab_size", [97, 300])
def test_a_small_model_without_a_tokenizer_takes_ids(vocab_size, tmp_path):
    """It is trained further on its own ids, whatever the default prompt is, and then takes ids."""
    weights = tmp_path / "weights"
    checkpoint.save(fresh(vocab_size=vocab_size, layers=1, seq_len=8, dtype="float32"), weights)
    (np.arange(900, dtype="<u2") % 97).tofile(tmp_path / "tokens.bin")
    words = ["--init-from", str(weights), "--data", str(tmp_path / "tokens.bin")]
    found = inputs.prepare(reading_of(*words), 1, 0)
    assert (found.prompt, found.tokenizer.what, found.tokenizer.files) == ([], "ids", {})
    args = generate.Arguments(str(weights), prompt="5 9")
    request = generate_command.prepare(reading_of(), args, 1, 0)
    assert (request.prompts[0].ids, request.notes) == ([5, 9], [])
    with pytest.raises(UsageError, match="takes ids, as in --prompt '464 318'"):
        generate_command.prepare(reading_of(), replace(args, prompt=None), 1, 0)


def test_text_with_another_vocabulary_than_256_is_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("a text of ASCII letters. " * 100)
    for size in (128, 300):
        found = inputs.prepare(
            reading_of("--data", str(tmp_path / "a.txt"), "--vocab-size", str(size)), 1, 0
        )
        assert found.prompt == list(b"The ")
        found.tokenizer.copy(tmp_path)
        assert tokenizer_of(tmp_path, size).encode("b") == [98]


def test_a_prompt_that_the_trained_model_cannot_read_gives_way_to_the_held_out_part(tmp_path):
    words = """--steps 1 --layers 1 --d-model 4 --heads 1 --seq-len 3 --sample-tokens 4
        --batch-size 4 --eval-tokens 9""".split()
    result = alone("train", *words, "--out", tmp_path / "run").ended()
    assert "text generated from '" in result.stdout
