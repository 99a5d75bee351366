"""Generation on every layout: tokens and logits of one rank without a cache, and its barriers."""

import numpy as np
import pytest
from generation_cases import FAMILIES, PROMPTS, SHAPE, enliven, with_cache, without_cache
from helpers import assert_close
from small_model import (
    LAYOUTS,
    WORLD,
    poison_unwritten,
    slow_unless,
    small_config,
    two_workers,
    worker_of,
)

from mpipar.comm.recorder import Recorder
from mpipar.config.model import ModelConfig
from mpipar.run.generation import Sampling, Text, generate

HERE = LAYOUTS[WORLD.size]
GREEDY = Sampling(8)


def config_of(layout, family="gpt2", groups=2, **values):
    return small_config(layout, groups, ModelConfig(**SHAPE | FAMILIES[family]), **values)


def workers(config):
    made = two_workers(config)
    for worker in made:
        enliven(worker)
    return made


def assert_as_one_rank(worker, alone, monkeypatch, prompts=PROMPTS):
    """Every rank has the tokens of one rank without a cache, and its part of the logits."""
    texts, seen = with_cache(worker, prompts, GREEDY, monkeypatch)
    found = [text.tokens for text in texts]
    assert WORLD.allgather(found) == [found] * WORLD.size, "ranks saw different tokens"
    expected = [without_cache(alone, prompt, GREEDY) for prompt in prompts]
    assert found == [tokens for tokens, _ in expected]
    last = worker.stages.get(worker.schedule.num_stages - 1)
    assert last or not seen
    assert sum(WORLD.allgather(len(seen))) >= sum(len(logits) for _, logits in expected)
    for (number, place), own in seen.items():
        wanted = expected[number][1][place - len(prompts[number])]
        wanted = wanted[last.loss.start : last.loss.start + len(own)]
        assert_close(
            own[: len(wanted)],
            wanted,
            1e-12,
            f"logits of text {number}, place {place}",
            largest=1e3 * np.abs(expected[number][1][0]).max(),
        )


@pytest.mark.parametrize(
    ("layout", "family"),
    slow_unless(
        lambda layout, family: family != "qwen2" and WORLD.size < 8,
        [
            (layout, family)
            for layout in HERE
            for family in FAMILIES
            if SHAPE["heads"] % layout[2] == 0 and (family == "gpt2" or layout[2] != 3)
        ],
    ),
)
def test_texts_are_those_of_one_rank_without_a_cache(layout, family, monkeypatch):
    """Prompts of other lengths, in two groups; with two replicas, one repeats a row."""
    poison_unwritten(monkeypatch)
    worker, alone = workers(config_of(layout, family))
    assert_as_one_rank(worker, alone, monkeypatch)
    worker.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("schedule", "groups"),
    slow_unless(
        lambda schedule, groups: schedule == "zb-v",
        [("gpipe", 5), ("interleaved", 4), ("zb-h1", 2), ("zb-v", 4), ("dualpipe-v", 4)],
    ),
)
def test_every_kind_of_schedule_has_a_forward_part(schedule, groups, monkeypatch):
    worker, alone = workers(config_of((1, 2, 1), groups=groups, schedule=schedule))
    assert_as_one_rank(worker, alone, monkeypatch)
    worker.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("layout", [layout for layout in HERE if layout[0] > 1], ids=str)
def test_fewer_texts_than_replicas(layout, monkeypatch):
    worker, alone = workers(config_of(layout))
    assert_as_one_rank(worker, alone, monkeypatch, PROMPTS[:1])
    worker.close()


@pytest.mark.parametrize(
    "layout", [layout for layout in HERE if SHAPE["heads"] % layout[2] == 0], ids=str
)
def test_drawn_texts_are_those_of_one_rank(layout):
    made = workers(config_of(layout))
    for sampling in (Sampling(8, 1.0, 3, top_k=4), Sampling(8, 2.0, 4, top_k=50, top_p=0.9)):
        found = []
        for worker in made:
            texts = [Text(number, list(prompt)) for number, prompt in enumerate(PROMPTS)]
            for _ in generate(worker, texts, sampling):
                pass
            found.append([text.tokens for text in texts])
        assert found[0] == found[1]
        assert WORLD.allgather(found[0]) == [found[0]] * WORLD.size
    made[0].close()


# --- barriers


@pytest.mark.parametrize(
    "layout", [layout for layout in HERE if SHAPE["heads"] % layout[2] == 0], ids=str
)
def test_barriers_of_every_round(layout):
    """Per group: 2 all-reduces a layer over tp, one of the embedding, an all-gather of candidates.

    At each boundary of pp there is a message of B T D numbers. A round ends with one all-reduce of
    a number per text over world.
    """
    dp, pp, tp = layout
    worker = worker_of(config_of(layout), recorder=Recorder(1 << 16))
    enliven(worker)
    rows, length, groups, rounds = 2, 3, 2, 4
    texts = [Text(number, [number] * length) for number in range(dp * rows * groups)]
    worker.recorder.clear()
    for _ in generate(worker, texts, Sampling(rounds, 1.0, top_k=5)):
        pass
    found = {}
    for key, sums in worker.recorder.counters.items():
        calls, payload = found.get((key.axis, key.operation), (0, 0))
        found[key.axis, key.operation] = calls + sums.calls, payload + sums.payload_bytes
    first, last = worker.grid.group_rank("pp") == 0, worker.grid.group_rank("pp") == pp - 1
    layers, width = SHAPE["layers"] // pp, SHAPE["d_model"]
    activation = 8 * rows * width * (length + rounds - 1)  # of all rounds of a group
    wanted = {("world", "all_reduce"): (rounds, rounds * 8 * len(texts))} if WORLD.size > 1 else {}
    if tp > 1:
        each = 2 * layers + first
        wanted["tp", "all_reduce"] = each * groups * rounds, each * groups * activation
        if last:
            wanted["tp", "all_gather"] = (groups * rounds, groups * rounds * tp * rows * 5 * 2 * 8)
    if not first:
        wanted["pp", "recv"] = groups * rounds, groups * activation
    if not last:
        wanted["pp", "send"] = groups * rounds, groups * activation
    assert found == wanted
    worker.close()
