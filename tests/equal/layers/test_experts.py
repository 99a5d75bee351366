"""Experts on several ranks: clipped updates of AdamW, and ties."""

import itertools

import numpy as np
import pytest
from small_model import (
    EXPERTS,
    WORLD,
    assert_caught,
    assert_equals_one_rank,
    plant,
    rows_of,
    slow_unless,
    small_config,
    two_workers,
)

from mpipar.layers.param import Param
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.run.verify import differences, full_tensors

# Ranks: [((dp, pp, tp), cp, ep)] in which ranks read different data.
HERE = {
    2: [((2, 1, 1), 1, 2), ((1, 1, 1), 2, 2), ((2, 1, 1), 1, 1)],
    4: [
        ((2, 1, 2), 1, 2),
        ((2, 2, 1), 1, 2),
        ((2, 1, 1), 2, 4),
        ((1, 1, 2), 2, 2),
        ((4, 1, 1), 1, 2),
    ],
    8: [((4, 1, 2), 1, 2), ((2, 2, 1), 2, 4), ((2, 2, 2), 1, 2)],
}
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def expert_config(layout, **values):
    """The resolved configuration of ((dp, pp, tp), cp, ep)."""
    sizes, cp, ep = layout
    return small_config(sizes, 2, EXPERTS, cp=cp, ep=ep, **values)


@pytest.mark.ranks(*HERE)
@pytest.mark.parametrize(
    ("layout", "zero"),
    slow_unless(
        lambda layout, zero: layout == HERE[WORLD.size][0] and zero == 1,
        itertools.product(HERE.get(WORLD.size, []), [0, 1, 3]),
    ),
)
def test_clipped_updates_of_adamw_equal_one_rank(layout, zero):
    """Three steps: the norm counts each expert once, and every rank scales by the same factor."""
    adamw = {"optimizer": "adamw", "lr": 0.01, "eps": 1e-3, "warmup_steps": 0, "clip": 0.05}
    results, whole = [], []
    for worker in two_workers(expert_config(layout, zero=zero, **adamw)):
        rows = rows_of(worker)
        steps = [
            worker.train_step(step, lambda mb, step=step, rows=rows: rows.train(step, mb))
            for step in (1, 2, 3)
        ]
        results.append(np.array([(one.loss, one.grad_norm) for one in steps]))
        whole.append(full_tensors(worker, "master"))
        worker.close()
    assert results[1][:, 1].min() > 2 * adamw["clip"]
    np.testing.assert_allclose(*results, rtol=1e-12)
    if WORLD.rank == 0:
        assert not [one for one in differences("weight", *whole) if not one.ok]


@pytest.mark.ranks(2)
def test_ties_are_broken_alike_on_all_ranks(monkeypatch):
    """The router's weights of two experts are equal, so that each token likes both as much."""

    def initial_rows(plain, self, *given):
        first = None
        for row, values in plain(self, *given):
            first = values if row % 2 == 0 else first
            yield row, first if "router" in self.name else values

    def highest_first(plain, self, logits, count, bias=None):
        if WORLD.rank == 0:
            return plain(self, logits, count, bias)
        ids, probs = plain(self, np.ascontiguousarray(logits[:, ::-1]), count, bias)
        return logits.shape[1] - 1 - ids, probs

    plant(monkeypatch, Param, "initial_rows", initial_rows)
    config = expert_config(HERE[2][0], experts_per_token=1)
    assert_equals_one_rank(config)
    plant(monkeypatch, NumpyOps, "choice_forward", highest_first)
    assert_caught(config)
