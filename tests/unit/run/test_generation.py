"""Generation with a cache against generation without one, on one rank; the command and its texts.

tests/equal/models/test_generation.py has the layouts.
"""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import gpt2_reference
import numpy as np
import pytest
from config_helpers import reading_of
from generation_cases import (
    FAMILIES,
    PROMPTS,
    SHAPE,
    enliven,
    whole_logits,
    with_cache,
    without_cache,
)
from helpers import assert_close
from hypothesis import example, given
from hypothesis import strategies as st
from in_process import alone, assert_refused
from one_rank import fresh, worker_for
from safetensors.numpy import load_file, save_file
from tokenizers_made import save_like_llama, save_tokenizer

from mpipar.comm.grid import Grid
from mpipar.comm.recorder import Recorder
from mpipar.commands.generate import Arguments
from mpipar.config.text import harmless
from mpipar.errors import DataError, UsageError
from mpipar.layers.parallel.kv_cache import KVCache
from mpipar.layers.recompute import ActivationRecompute
from mpipar.layers.stash import Stash
from mpipar.ops import make
from mpipar.ops.mixed_ops import DTYPES
from mpipar.run import generation
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.weights import write_tokenizer_files
from mpipar.run.data.tokenizer import load_tokenizer, tokenizer_of
from mpipar.run.generation import (
    FULL,
    LENGTH,
    STOP,
    Sampling,
    Text,
    answer,
    best,
    continue_one,
    draw,
    generate,
    read_prompts,
    show,
)
from mpipar.run.resolve import Inputs, Prompt
from mpipar.train.worker import Worker

GREEDY = Sampling(8)


def model(family="gpt2", **values):
    worker = fresh(**SHAPE | FAMILIES[family] | {"num_microbatches": 2} | values)
    enliven(worker)
    return worker


@pytest.fixture(scope="module")
def gpt2():
    return model()


def assert_as_without_cache(worker, prompts, monkeypatch, sampling=GREEDY):
    """Tokens are equal, and logits to 1e-12."""
    texts, seen = with_cache(worker, prompts, sampling, monkeypatch)
    for text, prompt in zip(texts, prompts, strict=True):
        tokens, logits = without_cache(worker, prompt, sampling)
        for place, wanted in enumerate(logits, len(prompt)):
            found = seen[text.number, place][: len(wanted)]
            assert_close(found, wanted, 1e-12, f"logits of text {text.number}, place {place}")
        assert text.tokens == tokens, text.number


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_and_logits_are_those_without_a_cache(family, monkeypatch):
    """Five prompts of other lengths in two groups, the last of which has a row that fills up."""
    assert_as_without_cache(model(family), PROMPTS, monkeypatch)


@pytest.mark.parametrize("recompute", ["block", "attention"])
def test_blocks_that_run_forward_again_keep_the_cache(recompute, monkeypatch):
    assert_as_without_cache(model("llama", recompute=recompute), PROMPTS, monkeypatch)


def test_prompts_of_one_length_need_no_padding(gpt2, monkeypatch):
    assert_as_without_cache(gpt2, [[1, 2], [3, 4], [5, 6]], monkeypatch)


def test_float32_and_sixteen_bits(monkeypatch):
    """With 16 bits the cache is rounded where attention's operands are: no more than once."""
    for dtype, tol in (("float32", 1e-5), ("bfloat16", 0.03)):
        worker = model("llama", dtype=dtype)
        texts, seen = with_cache(worker, PROMPTS, Sampling(3), monkeypatch)
        for text in texts:
            for place in range(len(PROMPTS[text.number]), len(text.tokens)):
                wanted = whole_logits(worker, text.tokens[:place]).astype(np.float64)
                found = seen[text.number, place][: len(wanted)].astype(np.float64)
                assert_close(found, wanted, tol, f"{dtype}, text {text.number}")


# --- broken twins


def changed_cache(change):
    """KVCache.forward with another q, k, v or firsts."""

    def forward(self, ops, name, q, k, v, plain=KVCache.forward):
        q, k, v, firsts = change(self, q, k, v)
        kept, self.firsts = self.firsts, firsts
        try:
            return plain(self, ops, name, q, k, v)
        finally:
            self.firsts = kept

    return KVCache, "forward", forward


def block_without_it(self, x, stash):
    inner = Stash(stash.batch)
    for layer in self.layers:
        x = layer.forward(x, inner)
    return x


def later_positions(self, plain=generation.Group.batch):
    made = plain(self)
    made.positions[...] += self.fresh == 1
    return made


def exchanged_caches(worker, texts, plain=generation.deal):
    groups = plain(worker, texts)
    first, second = (group.caches for group in groups.values())
    second.update(zip(second, first.values(), strict=True))
    return groups


TWINS = {
    "padding is visible": changed_cache(lambda cache, q, k, v: (q, k, v, (0,) * len(cache.firsts))),
    "heads of keys of another rank": changed_cache(
        lambda cache, q, k, v: (q, np.roll(k, 1, axis=2), v, cache.firsts)
    ),
    "values in the order of another row": changed_cache(
        lambda cache, q, k, v: (q, k, v[::-1], cache.firsts)
    ),
    "a block without the cache": (ActivationRecompute, "forward", block_without_it),
    "positions off by one after the prompt": (generation.Group, "batch", later_positions),
    "the cache of another group": (generation, "deal", exchanged_caches),
}


@pytest.mark.parametrize("twin", TWINS)
def test_a_broken_twin_is_caught(twin, monkeypatch):
    monkeypatch.setattr(*TWINS[twin])
    worker = model("llama", recompute="block" if "block" in twin else "none")
    prompts = [[1, 2], [3, 4]] if "block" in twin or "group" in twin else PROMPTS
    with pytest.raises(AssertionError, match="logits of text"):
        assert_as_without_cache(worker, prompts, monkeypatch)


# --- where texts end


def test_each_text_ends_by_itself(gpt2, monkeypatch):
    free = [without_cache(gpt2, prompt, GREEDY)[0][len(prompt) :] for prompt in PROMPTS]
    # Of the first four tokens of the texts, one that comes up as late as can be.
    place, stop, number = max(
        (added.index(token), token, number)
        for number, added in enumerate(free)
        for token in added[:4]
    )
    sampling = GREEDY._replace(stop=(stop,))
    assert_as_without_cache(gpt2, PROMPTS, monkeypatch, sampling)
    texts = [Text(number, list(prompt)) for number, prompt in enumerate(PROMPTS)]
    rounds = [[text.number for text in grown] for grown in generate(gpt2, texts, sampling)]
    added = [sum(number in grown for grown in rounds) for number in range(len(PROMPTS))]
    assert added == [len(text.tokens) - len(PROMPTS[text.number]) for text in texts]
    assert (added[number], texts[number].end) == (place + 1, STOP)
    assert len(set(added)) > 1, "all end in one round"


def test_the_model_reads_no_more_than_seq_len(gpt2, monkeypatch):
    """One token follows the last that it reads; the others continue."""
    prompts, sampling = [list(range(15)), [1], [*range(16)]], Sampling(9)
    assert_as_without_cache(gpt2, prompts, monkeypatch, sampling)
    texts = [Text(number, list(prompt)) for number, prompt in enumerate([*prompts, [0] * 17])]
    for _ in generate(gpt2, texts, sampling):
        pass
    assert [(len(text.tokens), text.end) for text in texts] == [
        (17, FULL),
        (10, LENGTH),
        (17, FULL),
        (17, FULL),
    ]


# --- choosing a token


def test_a_text_does_not_depend_on_the_others(gpt2):
    """A draw depends on seed, number of the prompt and position alone."""
    sampling = Sampling(8, temperature=1.5, seed=5)
    together = [Text(number, list(prompt)) for number, prompt in enumerate(PROMPTS)]
    for _ in generate(gpt2, together, sampling):
        pass
    for text in together:
        alone = Text(text.number, list(PROMPTS[text.number]))
        for _ in generate(gpt2, [alone], sampling):
            pass
        assert alone.tokens == text.tokens
    again = list(continue_one(gpt2, PROMPTS[0], sampling._replace(seed=6)))
    assert again != together[0].tokens[len(PROMPTS[0]) :]


def probabilities(values, temperature):
    weights = np.exp(np.array(values) / temperature)
    return weights / weights.sum()


def test_draws_follow_temperature_and_top_p():
    values, ids = [2.0, 1.5, 1.0, -1.0], [7, 3, 9, 4]
    candidates = np.column_stack([values, ids])
    for top_p, kept in ((1.0, 4), (0.9, 3), (0.8, 2), (0.5, 1), (1e-9, 1)):
        sampling = Sampling(1, temperature=0.7, top_p=top_p)
        drawn = [draw(candidates, sampling, number, 5) for number in range(4000)]
        wanted = probabilities(values[:kept], 0.7)
        shares = np.array([drawn.count(one) for one in ids[:kept]]) / len(drawn)
        assert shares.sum() == 1
        assert np.abs(shares - wanted).max() < 0.03, "four standard deviations"
    halves = np.column_stack([[1.0, 1.0], [2, 8]])
    edge = Sampling(1, temperature=0.7, top_p=0.5)
    assert {draw(halves, edge, number, 0) for number in range(99)} == {2.0}, "0.5 is reached"


def test_top_k_limits_the_choice(gpt2):
    prompt = [1, 2, 3]
    order = np.argsort(-whole_logits(gpt2, prompt))
    for top_k in (1, 2, 5):
        drawn = {
            next(continue_one(gpt2, prompt, Sampling(1, 5.0, seed, top_k))) for seed in range(60)
        }
        assert drawn == set(order[:top_k].tolist())


# --- memory


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 2), (1, 2)])
def test_bytes_of_the_cache_are_predicted(family, pp, tp):
    """2 L_stage B S (Hkv/tp) d numbers, where shapes run the same generation without numbers."""
    config = model(family).config
    config = replace(
        config,
        grid=replace(config.grid, pp=pp, tp=tp, num_microbatches=1),
        run=replace(config.run, dtype="float32"),
    )
    ops = make("shapes", "float32")
    worker = Worker(config, Grid(0, {"pp": pp, "tp": tp}), ops, Recorder())
    texts = [Text(number, [0] * 5) for number in range(3)]
    shape, slots = config.model, 5 + GREEDY.num_tokens - 1
    wanted = 2 * shape.layers // pp * 3 * slots * shape.kv_heads // tp * shape.head_dim * 4
    live = [ops.live["cache"] for _ in generate(worker, texts, GREEDY)]
    assert live == [wanted] * GREEDY.num_tokens


# --- prompts, tokens and text; `mpipar generate` as a user starts it


OF_GPT2 = {"layers": 4, "D": 18, "F": 31, "T": 7, "tied": True}
HEADS = 6
TOO_LONG = "mpipar: the text ends here because the model reads at most 7 tokens\n"


# --- prompts


@given(st.binary(min_size=1).map(list))
@example(list("a\u20ac\U0001f600".encode()))
@example([0xE2, 0x82])
@example([0xF0, 0x9F, 65, 0xE2, 0x82, 0xAC])
def test_text_shown_piece_by_piece_is_the_whole_text(tokens):
    """A character of several bytes is shown when its last byte has come, and never taken back."""
    pieces = list(show(tokens[:1], iter(tokens[1:]), tokenizer_of(None, 256)))
    assert "".join(pieces) == tokenizer_of(None, 256).decode(tokens)


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
    tokenizer = tokenizer_of(None, 256)
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


@pytest.mark.parametrize("row", [[3.0, np.nan, 1.0, 2.0], [3.0, 1.0, np.nan, 2.0]])
def test_a_nan_on_any_rank_leaves_no_largest(row):
    ops, logits = make("cpu", "float64"), np.array([row])
    others = ops.top_forward(logits[:, 2:], 2, 4, 2)
    own = SimpleNamespace(loss=SimpleNamespace(start=0, vocab_size=4))
    worker = SimpleNamespace(
        ops=ops,
        stages=[own],
        schedule=SimpleNamespace(num_stages=1),
        comms={"tp": SimpleNamespace(all_gather=lambda mine, name: np.stack([mine, others]))},
    )
    assert np.isnan(best(worker, logits[:, :2], 2)[0, 0, 0])


def test_prompts_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert [text for _, text in read_prompts(str(tmp_path / "a.txt"))] == ["one", "two"]
    (tmp_path / "a.txt").write_text('[{"a": 1}] next\n')
    assert len(read_prompts(str(tmp_path / "a.txt"))) == 1
    for content, part in (
        ("one".encode("utf-16"), "UTF-16"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"caf\xe9", "is not UTF-8 text: byte 3 cannot be decoded"),
    ):
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
        tensors[name] = gpt2_reference.random_weights(rng, **OF_GPT2, V=vocab_size)
        config = gpt2_reference.configuration(**OF_GPT2, V=vocab_size, heads=HEADS)
        gpt2_reference.write_model(folder / name / "weights", tensors[name], config)
    return folder, tensors


def generated(models, name, *words):
    result = alone("generate", models[0] / name, "--dtype", "float64", *words).ended()
    assert result.stderr in ("", TOO_LONG)
    return result.stdout


def expected_text(models, name, prompt, count):
    tokenizer = tokenizer_of(None, {"bytes": 256, "ids": 601}[name])
    tokens = tokenizer.encode(prompt)
    count = min(count, OF_GPT2["T"] + 1 - len(tokens))
    found = gpt2_reference.greedy(models[1][name], HEADS, tokens, count, OF_GPT2["T"])
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
    ("p.txt", b"a\n\xff\n", 65, ["p.txt: ", "is not UTF-8 text: byte 2"]),
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
    with pytest.raises(DataError, match=r"not all numbers of embedding.tokens are finite"):
        checkpoint.load(worker, str(folder))


# --- training on tokens ends in tokens


@pytest.mark.parametrize(("config", "beside", "expected"), [
    ({"eos_token_id": 41}, None, (41,)), ({"eos_token_id": [41, 7]}, None, (41, 7)),
    ({"eos_token_id": 41}, {"eos_token_id": [5]}, (5,)), ({"eos_token_id": 41}, {}, (41,)),
    ({"eos_token_id": None}, None, ()), ({"eos_token_id": 601}, None, ()), ({}, None, ()),
])  # fmt: skip
def test_texts_end_as_the_files_beside_the_weights_say(config, beside, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if beside is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(beside))
    assert generation.ends_of(tmp_path, tokenizer_of(None, 601), 601) == expected


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
    found = Inputs(reading_of(*words), 1, 0)
    assert (found.tokenizer.what, found.tokenizer.files) == ("ids", {})
    assert found.prompt == [int(np.asarray(found.held_out)[0])]
    args = Arguments(str(weights), prompt="5 9")
    request = generation.Request(reading_of(), args, 1, 0)
    assert (request.prompts[0].ids, request.notes) == ([5, 9], [])
    with pytest.raises(UsageError, match="takes ids, as in --prompt '464 318'"):
        generation.Request(reading_of(), replace(args, prompt=None), 1, 0)


def test_text_with_another_vocabulary_than_256_is_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("a text of ASCII letters. " * 100)
    for size in (128, 300):
        found = Inputs(
            reading_of("--data", str(tmp_path / "a.txt"), "--vocab-size", str(size)), 1, 0
        )
        assert found.prompt == list(b"The ")
        write_tokenizer_files(found.tokenizer.files, tmp_path)
        assert tokenizer_of(tmp_path, size).encode("b") == [98]


def test_a_prompt_that_the_trained_model_cannot_read_gives_way_to_the_held_out_part(tmp_path):
    words = """--steps 1 --layers 1 --d-model 4 --heads 1 --seq-len 3 --sample-tokens 4
        --batch-size 4 --eval-tokens 9""".split()
    result = alone("train", *words, "--out", tmp_path / "run").ended()
    assert "text generated from '" in result.stdout
