"""The learning rate of each step: its ends, its formulas, and a resumed run."""

import math
from itertools import pairwise

import pytest
from config_helpers import changed, reading_of
from hypothesis import given
from hypothesis import strategies as st

from mpipar.config.reading import to_toml, values_of
from mpipar.config.train import TrainConfig
from mpipar.run.resume import resumed
from mpipar.train.optim import (
    DECAY_RATIO,
    fall_start,
    learning_rate,
    of_new_length,
    warm_up_notes,
)

FALLING = ("cosine", "linear", "wsd")
configs = st.builds(
    TrainConfig,
    steps=st.integers(2, 400),
    warmup_steps=st.integers(0, 50),
    lr=st.floats(1e-6, 10),
    min_lr_ratio=st.floats(0, 1),
    lr_schedule=st.sampled_from([*FALLING, "constant"]),
)


def rates(config):
    return [learning_rate(config, step) for step in range(1, config.steps + 1)]


@given(configs)
def test_the_ends_are_exact_and_nothing_rises_behind_the_warm_up(config):
    found, warmup = rates(config), config.warmup_steps
    assert all(0 < rate <= config.lr * (1 + 1e-15) for rate in found[:-1])
    for step in range(1, min(warmup, config.steps) + 1):
        assert found[step - 1] == config.lr * step / warmup
    after = found[warmup:]
    assert all(later <= earlier * (1 + 1e-15) for earlier, later in pairwise(after))
    if warmup < config.steps:
        last = config.lr * (1 if config.lr_schedule == "constant" else config.min_lr_ratio)
        assert found[-1] == pytest.approx(last, rel=1e-14, abs=0)


@given(configs)
def test_the_peak_lasts_up_to_the_fall(config):
    found, start = rates(config), fall_start(config)
    if config.lr_schedule == "constant":
        start = config.steps
    assert set(found[config.warmup_steps : start]) <= {config.lr}
    if config.lr_schedule == "wsd":
        share = max(1, round(DECAY_RATIO * config.steps))
        assert start == max(config.warmup_steps, config.steps - share)


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("cosine", [0.5 * (1 + math.cos(math.pi * part)) for part in (0.25, 0.5, 0.75, 1)]),
        ("linear", [0.75, 0.5, 0.25, 0]),
        ("constant", [1, 1, 1, 1]),
        ("wsd", [1 - math.sqrt(part) for part in (0.25, 0.5, 0.75, 1)]),
    ],
)
def test_formulas(name, left):
    """The last four steps, from 2 down to 1."""
    config = TrainConfig(
        steps=20 if name == "wsd" else 10,
        warmup_steps=0 if name == "wsd" else 6,
        lr=2.0,
        min_lr_ratio=0.5,
        lr_schedule=name,
    )
    assert rates(config)[-4:] == pytest.approx([1 + one for one in left], rel=1e-15)


def test_a_longer_run_with_wsd_keeps_the_rates_that_it_had():
    short, long = (
        TrainConfig(steps=steps, lr_schedule="wsd", warmup_steps=3) for steps in (20, 40)
    )
    assert rates(short)[:16] == rates(long)[:16]
    assert rates(long)[16:32] == [short.lr] * 16


def test_a_run_that_goes_on_keeps_its_schedule():
    saved = values_of(to_toml(changed(lr_schedule="wsd")))
    (problem,) = resumed(reading_of("--lr-schedule", "cosine"), saved, 1).problems
    assert problem == (
        "--lr-schedule cosine: can't change in a resumed run, which has wsd;"
        " leave --lr-schedule out, or start a new run"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cosine", "the learning rate of each further step follows the schedule of the new length"),
        ("constant", "the learning rate stays constant"),
        ("wsd", "the learning rate stays at its peak up to step 80, then falls"),
    ],
)
def test_more_steps_are_explained(name, text):
    assert of_new_length(TrainConfig(steps=100, lr_schedule=name)) == text


@pytest.mark.parametrize("steps", [3, 5, 10])
def test_a_run_that_ends_within_its_warm_up_says_so(steps):
    found = warm_up_notes(TrainConfig(steps=steps, warmup_steps=5, lr=0.1))
    said = "warm-up of 5 steps: the learning rate rises to 0.06 and never reaches 0.1"
    assert [said in note for note in found] == [True] * (steps < 5)
