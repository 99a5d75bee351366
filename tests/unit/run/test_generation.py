"""Generation with a cache against generation without one, on one rank; broken twins; sampling.

tests/equal/models/test_generation.py has the layouts.
"""

from dataclasses import replace

import numpy as np
import pytest
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
from one_rank import fresh

from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.layers.parallel.kv_cache import KVCache
from mpipar.layers.recompute import ActivationRecompute
from mpipar.layers.stash import Stash
from mpipar.ops import make
from mpipar.run.inference import generate as generation
from mpipar.run.inference.generate import (
    FULL,
    LENGTH,
    STOP,
    Sampling,
    Text,
    continue_one,
    draw,
    generate,
)
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


def exchanged_caches(worker, texts, sampling, plain=generation.deal):
    groups = plain(worker, texts, sampling)
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
