"""Whole lives over combinations of choices: each has the numbers and the text of one plain rank.

The broken twins plant a fault into the lives, but not into their truths. See tests/helpers/lives.
"""

from contextlib import contextmanager

import pytest
from small_model import WORLD, called, plant

from mpipar.comm.hosts import quiet_barrier
from mpipar.layers.recompute import ActivationRecompute
from mpipar.layers.stash import Stash
from mpipar.run import training
from mpipar.run.data import parts
from mpipar.train import worker
from tests.helpers.lives import kept
from tests.helpers.lives.life import live_all

FEW = 7  # parts of the fixed part
MANY = 20  # the first cases of all pairs live here: 87 % of the pairs, and each value
PARTS = 4  # of these, each well below the limit of a test, also where others take the cores


def few():
    """The fixed part: some cases in which each value occurs."""
    return kept.read()["few"]


def many():
    """Cases in which each pair of values occurs, without kernels that are compiled first."""
    return [
        {**case, "kernels": "numpy"} if case["kernels"] == "numba" else case
        for case in kept.read()["pairs"]
    ]


def plain_case(**values):
    """The case of first choices but for these values, on world rank 0."""
    return [] if WORLD.rank else [{**few()[0], **values}]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, FEW))]
)
def test_every_value_lives(part, folder):
    assert live_all(WORLD, folder, few()[part::FEW] if WORLD.rank == 0 else None) == []


@pytest.mark.ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_cases_of_all_pairs_live(part, folder):
    """The first of them: all take the cores for ten minutes."""
    cases = many()[part:MANY:PARTS] if WORLD.rank == 0 else None
    quiet_barrier(WORLD)
    assert live_all(WORLD, folder, cases) == []


# --- broken twins


def without_cache(_plain, self, x, stash):
    """A recomputed block that makes a stash of its own, and forgets the cache."""
    stash[self, "x"] = x
    inner = Stash(stash.batch)
    for layer in self.layers:
        x = layer.forward(x, inner)
    return x


def whole_part(_plain, part, config):
    """An evaluation that forgets --eval-tokens."""
    return part


def without_evaluations(plain, folder, step):
    """Resume a run in its folder, and forget its held-out losses."""
    (folder / "evaluations.jsonl").unlink()
    return plain(folder, step)


def larger_steps(plain, config, step):
    """Each learning rate is half too large."""
    return 1.5 * plain(config, step)


def planting(monkeypatch, *what):
    """What plants a fault into a life, but not into its truth."""

    @contextmanager
    def planted():
        with monkeypatch.context() as patch:
            plant(patch, *what)
            yield

    return planted


TWINS = [  # what is replaced, by what, the values of the life that must find it, what it says
    (
        ActivationRecompute,
        "forward",
        without_cache,
        {"recompute": "block"},
        "the logits of token",
    ),
    (parts, "evaluated", whole_part, {"eval_tokens": 50}, "held_out_loss of step 3"),
    (
        training,
        "truncate_after",
        without_evaluations,
        {"resume": "auto"},
        "evaluations.jsonl: has steps",
    ),
    (worker, "learning_rate", larger_steps, {}, "of its movement"),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("owner", "name", "twin", "values", "message"),
    TWINS,
    ids=[called(twin) for _, _, twin, *_ in TWINS],
)
def test_a_life_finds(owner, name, twin, values, message, folder, monkeypatch):
    found = live_all(
        WORLD, folder, plain_case(**values), planted=planting(monkeypatch, owner, name, twin)
    )
    assert any(message in text for text in found), found


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "dtype",
    ["float16", *(pytest.param(n, marks=pytest.mark.slow) for n in ("float32", "bfloat16"))],
)
def test_a_narrow_type_is_close_enough_to_find_a_wrong_step(dtype, folder, monkeypatch):
    planted = planting(monkeypatch, worker, "learning_rate", larger_steps)
    cases = plain_case(dtype=dtype)
    assert live_all(WORLD, folder / "right", cases) == []
    found = live_all(WORLD, folder / "wrong", cases, planted=planted)
    assert any("of its movement" in text for text in found), found
