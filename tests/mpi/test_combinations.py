"""Whole lives over combinations of choices: each has the numbers and the text of one plain rank.

The broken twins plant a fault into the lives, but not into their truths. See bench/combinations.
"""

from contextlib import contextmanager

import pytest
from small_model import WORLD

from bench.combinations import kept
from bench.combinations.life import live_all
from mpipar.comm.hosts import quiet_barrier
from mpipar.commands import training
from mpipar.data import rows
from mpipar.layers.recompute import Recomputed
from mpipar.layers.stash import Stash
from mpipar.train import worker

EACH = 3  # every third case of all pairs lives here; python -m bench.combinations runs them all
PARTS = 8  # of these, each well below the limit of a test, also where others take the cores


def few():
    """The fixed part: some cases in which each value occurs."""
    return kept.read()["few"]


def many():
    """Cases in which each pair of values occurs, without kernels that are compiled first."""
    return [{**case, "kernels": "numpy"} if case["kernels"] == "numba" else case
            for case in kept.read()["pairs"]]


def lives(folder, cases, **named):
    """(case, Check) of the lives, and all that is wrong, on every rank. Comm: a broadcast."""
    wrong = []
    for case, check in live_all(WORLD, folder, cases, where=lambda text: None, **named):
        if check:
            wrong += [f"case {case['number']}, {text}" for text in check.wrong]
    return WORLD.bcast(wrong)


def first(cases=few, **values):
    """The first case with these values, on world rank 0; values may be functions."""
    if WORLD.rank:
        return []
    return [next(case for case in cases() if all(
        value(case[name]) if callable(value) else case[name] == value
        for name, value in values.items()))]


@pytest.mark.ranks(2)
def test_every_value_lives(folder):
    assert lives(folder, few() if WORLD.rank == 0 else None) == []


@pytest.mark.ranks(4)
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_cases_of_all_pairs_live(part, folder):
    """A third of them: all take the cores for ten minutes."""
    cases = many()[EACH * part::EACH * PARTS] if WORLD.rank == 0 else None
    quiet_barrier(WORLD)
    assert lives(folder, cases) == []


# --- broken twins


def without_cache(monkeypatch):
    """A recomputed block that makes a stash of its own, and forgets the cache."""
    def forward(self, x, stash):
        stash[self, "x"] = x
        inner = Stash(stash.batch)
        for layer in self.layers:
            x = layer.forward(x, inner)
        return x

    monkeypatch.setattr(Recomputed, "forward", forward)


def whole_part(monkeypatch):
    """An evaluation that forgets --eval-tokens."""
    monkeypatch.setattr(rows, "evaluated", lambda part, config: part)


def without_evaluations(monkeypatch):
    """Resume a run in its folder, and forget its held-out losses."""
    plain = training.truncate_after

    def truncate_after(folder, step):
        (folder / "evaluations.jsonl").unlink()
        return plain(folder, step)

    monkeypatch.setattr(training, "truncate_after", truncate_after)


def larger_steps(monkeypatch):
    """Each learning rate is half too large."""
    plain = worker.learning_rate
    monkeypatch.setattr(worker, "learning_rate", lambda config, step: 1.5 * plain(config, step))


TWINS = {  # fault -> (values of the case that must find it, what it says)
    without_cache: ({"recompute": "block", "model": None, "sample_tokens": lambda n: n != 0},
                    "the logits of token"),
    whole_part: ({"eval_tokens": 50}, "held_out_loss of step 3"),
    without_evaluations: ({"resume": "auto"}, "evaluations.jsonl: has steps"),
    larger_steps: ({"model": None}, "of its movement"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.__name__)
def test_the_fixed_part_finds(twin, folder, monkeypatch):
    @contextmanager
    def planted():
        with monkeypatch.context() as patch:
            twin(patch)
            yield

    values, message = TWINS[twin]
    found = lives(folder, first(**values), planted=planted)
    assert any(message in text for text in found), found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_narrow_type_is_close_enough_to_find_a_wrong_step(dtype, folder, monkeypatch):
    @contextmanager
    def planted():
        with monkeypatch.context() as patch:
            larger_steps(patch)
            yield

    cases = [{**case, "dtype": dtype} for case in first(model=None)]
    assert lives(folder / "right", cases) == []
    found = lives(folder / "wrong", cases, planted=planted)
    assert any("of its movement" in text for text in found), found
