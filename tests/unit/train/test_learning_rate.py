"""The learning rate of each step, and the loss scale of float16 with its float32 masters."""

import math
from itertools import pairwise

import numpy as np
import pytest
from config_helpers import changed, reading_of
from hypothesis import given
from hypothesis import strategies as st
from one_rank import fresh

from mpipar.config.train import TrainConfig
from mpipar.errors import NonFiniteError
from mpipar.layers.loss import CrossEntropy
from mpipar.run.checks import evaluate, train_step
from mpipar.run.console.tables import short_warm_up
from mpipar.run.data.rows import Rows
from mpipar.run.files.settings import to_toml, values_of
from mpipar.run.resume import resumed
from mpipar.train.gradsync import GradSync
from mpipar.train.loss_scale import LossScale
from mpipar.train.optim import (
    DECAY_RATIO,
    Sgd,
    fall_start,
    learning_rate,
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


@pytest.mark.parametrize("steps", [3, 5, 10])
def test_a_run_that_ends_within_its_warm_up_says_so(steps):
    found = short_warm_up(TrainConfig(steps=steps, warmup_steps=5, lr=0.1)) or ""
    said = "warm-up of 5 steps: the learning rate rises to 0.06 and never reaches 0.1"
    assert (said in found) == (steps < 5) == bool(found)


# --- the loss scale of float16, and the float32 masters of 16-bit weights: in one process


TOKENS = np.random.default_rng(2).integers(0, 17, 500).astype(np.uint8)


def scale_of(**values):
    return LossScale(changed(**values).run)


def test_halves_at_an_overflow_and_doubles_after_enough_good_steps():
    scale = scale_of(dtype="float16", loss_scale=1024.0)
    scale.interval = 3
    seen = []
    for overflow in [0, 0, 1, 0, 0, 0, 0, 0, 0, 1]:
        scale.adapt(math.inf if overflow else 1.0)
        seen.append(scale.value)
    assert seen == [1024, 1024, 512, 512, 512, 1024, 1024, 1024, 2048, 1024]
    assert scale.skipped == 2


def test_types_with_the_range_of_float32_have_none():
    for dtype in ("float32", "float64", "bfloat16"):
        scale = scale_of(dtype=dtype)
        assert (scale.value, scale.dynamic) == (1.0, False)
    assert scale_of(dtype="float16").value == LossScale.FIRST


def steps(worker, count, first=1):
    rows = Rows(worker.ops, TOKENS, worker.config, worker.grid)
    return [
        train_step(worker, step, lambda mb, step=step: rows.train(step, mb))
        for step in range(first, first + count)
    ]


def masters(worker):
    return np.concatenate([flat.master for flat in worker.flats])


def test_gradients_do_not_depend_on_the_scale():
    """Powers of two round nothing, as long as nothing over- or underflows."""
    found = []
    for scale in (1024.0, 65536.0):
        worker = fresh(dtype="float16", loss_scale=scale, optimizer="sgd")
        result = steps(worker, 1)[0]
        assert (result.loss_scale, result.skipped) == (scale, False)
        found.append((result.grad_norm, masters(worker)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3)
    assert np.allclose(found[0][1], found[1][1], rtol=0, atol=1e-5)


def test_without_a_scale_small_gradients_are_lost():
    """This is why a scale exists: gradients below 6e-8 are zero in float16."""
    worker = fresh(dtype="float16", loss_scale=2.0**-24)
    reference = fresh(dtype="float32")
    lost, norm = steps(worker, 1)[0].grad_norm, steps(reference, 1)[0].grad_norm
    assert lost == 0 < norm


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_skipped_steps_leave_weights_moments_and_adam_s_count_alone(optimizer):
    worker = fresh(dtype="float16", loss_scale=2.0**30, optimizer=optimizer)
    before = masters(worker).copy()
    results = steps(worker, 13)
    skipped = [result.skipped for result in results]
    count = sum(skipped)
    assert 0 < count < 13
    assert skipped == [True] * count + [False] * (13 - count)
    assert [result.loss_scale for result in results] == [
        2.0 ** (30 - min(i, count)) for i in range(13)
    ]
    config = worker.config.train
    assert config.warmup_steps > 13 - count, "a skipped step uses up none of it"
    for number, result in enumerate(results):
        assert result.lr == config.lr * max(1, number + 1 - count) / config.warmup_steps
    good = fresh(dtype="float16", loss_scale=2.0 ** (30 - count), lr=3e-3, optimizer=optimizer)
    assert (masters(good) == before).all()
    good.loss_scale.skipped = count  # the same learning rates and rows; Adam begins at 1
    steps(good, 13 - count, first=count + 1)
    assert (masters(good) == masters(worker)).all()


def test_what_a_smaller_scale_can_not_mend_stops_the_run(monkeypatch):
    plain = GradSync.finish

    def finish(self):
        plain(self)
        self.flats[0].grad[0] = math.nan

    monkeypatch.setattr(GradSync, "finish", finish)
    worker = fresh(dtype="float16", loss_scale=4.0)
    assert [result.skipped for result in steps(worker, 2)] == [True, True]
    with pytest.raises(NonFiniteError, match="step 3"):
        steps(worker, 1, first=3)
    with pytest.raises(NonFiniteError, match="step 1"):
        steps(fresh(dtype="bfloat16"), 1)


def test_a_loss_that_is_not_finite_stops_the_run(monkeypatch):
    monkeypatch.setattr(CrossEntropy, "forward", lambda self, logits, stash: math.inf)
    monkeypatch.setattr(CrossEntropy, "backward_input", lambda self, dy, stash: 1 / 0)
    worker = fresh(dtype="float16")
    monkeypatch.setattr(worker.engine, "run", lambda program, get_batch: {0: math.inf})
    with pytest.raises(NonFiniteError, match=r"loss inf.*or --dtype bfloat16"):
        steps(worker, 1)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_weights_that_the_last_update_ruined_do_not_pass_for_trained(dtype):
    """No further step can find them, so the held-out loss must."""
    worker = fresh(dtype=dtype, lr=1e30, warmup_steps=0, optimizer="sgd")
    assert math.isfinite(steps(worker, 1)[0].grad_norm)
    with np.errstate(all="ignore"), pytest.raises(NonFiniteError, match=r"held-out loss.*--lr"):
        evaluate(worker, Rows(worker.ops, TOKENS, worker.config, worker.grid))


def test_masters_start_as_in_float32_and_layers_read_them_rounded():
    wide, narrow = fresh(dtype="float32"), fresh(dtype="bfloat16")
    assert (masters(wide) == masters(narrow)).all()
    flat = narrow.flats[0]
    assert flat.data.dtype == narrow.ops.dtype
    assert (flat.data == flat.master.astype(narrow.ops.dtype)).all()
    assert wide.flats[0].master is wide.flats[0].data


def way(dtype):
    """The change of the weights over 40 small plain steps."""
    worker = fresh(dtype=dtype, optimizer="sgd", lr=1e-3, warmup_steps=0, min_lr_ratio=1.0)
    before = masters(worker).copy()
    steps(worker, 40)
    return masters(worker) - before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_updates_are_kept_in_the_masters(dtype, monkeypatch):
    expected = way("float32")

    def astray():
        """The distance from the float32 run's end, as a share of that run's change."""
        return np.linalg.norm(way(dtype) - expected) / np.linalg.norm(expected)

    rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    assert astray() < 2 * rounding
    plain = Sgd.update

    def update_rounded_weights(self, flat, *rest):  # without master weights
        plain(self, flat, *rest)
        self.ops.copy(flat.master, flat.data)

    monkeypatch.setattr(Sgd, "update", update_rounded_weights)
    assert astray() > 20 * rounding
