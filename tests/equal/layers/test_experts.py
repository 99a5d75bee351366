"""Experts on several ranks: clipped updates of AdamW, ties, and broken twins."""

import numpy as np
import pytest
from small_model import (
    EXPERTS,
    WORLD,
    assert_caught,
    assert_equals_one_rank,
    called,
    every,
    plant,
    rows_of,
    small_config,
    two_workers,
)

from mpipar.comm.grid import Grid
from mpipar.layers.parallel.expert_dispatch import ExpertDispatch
from mpipar.layers.param import Param
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.run.verify import differences, full_tensors

LAYOUTS = {  # number of ranks: ((dp, pp, tp), cp, ep)
    1: [((1, 1, 1), 1, 1)],
    2: [
        ((2, 1, 1), 1, 2),
        ((1, 1, 1), 2, 2),
        ((2, 1, 1), 1, 1),
        ((1, 1, 2), 1, 1),
        ((1, 2, 1), 1, 1),
    ],
    4: [
        ((2, 1, 2), 1, 2),
        ((2, 2, 1), 1, 2),
        ((2, 1, 1), 2, 4),
        ((1, 1, 2), 2, 2),
        ((4, 1, 1), 1, 2),
    ],
    8: [((4, 1, 2), 1, 2), ((2, 2, 1), 2, 4), ((2, 2, 2), 1, 2)],
}
HERE = LAYOUTS.get(WORLD.size, [])
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def expert_config(layout, num_microbatches=2, model=EXPERTS, **values):
    """The resolved configuration of ((dp, pp, tp), cp, ep)."""
    sizes, cp, ep = layout
    return small_config(sizes, num_microbatches, model, cp=cp, ep=ep, **values)


def some(layouts, count, quick=lambda one: True, **choices):
    """`every` with layouts, of which those up to `count` are quick: the first ones mix most."""
    return every(
        lambda one: layouts.index(one["layout"]) < count and quick(one), layout=layouts, **choices
    )


SHARING = [one for one in HERE if one[0][0] * one[1] > 1]


@pytest.mark.parametrize(
    "values",
    some(
        SHARING,
        1,
        lambda one: one["zero"] == 1,
        zero=[0, 1, 3],
        optimizer="adamw",
        lr=0.01,
        eps=1e-3,
        clip=0.05,
        warmup_steps=0,
    ),
)
def test_clipped_updates_of_adamw_equal_one_rank(values):
    """Three steps: the norm counts each expert once, and every rank scales by the same factor."""
    results, whole = [], []
    for worker in two_workers(expert_config(**values)):
        rows = rows_of(worker)
        steps = [
            worker.train_step(step, lambda mb, step=step, rows=rows: rows.train(step, mb))
            for step in (1, 2, 3)
        ]
        results.append(np.array([(one.loss, one.grad_norm) for one in steps]))
        whole.append(full_tensors(worker, "master"))
        worker.close()
    assert results[1][:, 1].min() > 2 * values["clip"]
    np.testing.assert_allclose(*results, rtol=1e-12)
    if WORLD.rank == 0:
        assert not [one for one in differences("weight", *whole) if not one.ok]


# --- broken twins: the comparisons above must fail. Those with `comm` are right on one rank.

TWO = ((2, 1, 1), 1, 2)


def summed_over_data(plain, self, group, cut):
    """Experts of other ranks are added as if they were copies."""
    return plain(self, group, cut if group == "tp" else ())


def weighted_twice(plain, self, rows, plan, weighted):
    probs = plan.probs**2 if self.comm.size > 1 else plan.probs
    return plain(self, rows, plan._replace(probs=probs), weighted=weighted)


def in_order_of_sending(plain, self, rows, plan, weighted):
    """Results are not put back to their tokens."""
    if self.comm.size > 1:
        plan = plan._replace(places=np.arange(plan.places.size).reshape(plan.places.shape))
    return plain(self, rows, plan, weighted=weighted)


def balanced_by_microbatch(plain, self, dlogits, logits, loads, factor):
    """One rank has it, too. Its microbatches have other rows than those of two."""
    plain(self, dlogits, logits, np.broadcast_to(loads.mean(axis=0), loads.shape), factor)


def router_detached(plain, self, factors, plan):
    """Its gradient does not cross the border between ranks."""
    return plain(self, factors * (self.comm.size == 1), plan)


def counts_of_another(plain, self, choice):
    """Distribute rows among this rank's experts by the counts of the previous microbatch."""
    found = plain(self, choice)
    if self.comm.size == 1:
        return found
    first = min(LAST_COUNTS.get(self.name, found.counts)[0], sum(found.counts))
    LAST_COUNTS[self.name] = found.counts
    return found._replace(counts=[first, sum(found.counts) - first])


LAST_COUNTS = {}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("owner", "name", "twin"),
    [
        (Grid, "remaining_group", summed_over_data),
        (ExpertDispatch, "combine", weighted_twice),
        (ExpertDispatch, "combine", in_order_of_sending),
        (NumpyOps, "balance_backward_input", balanced_by_microbatch),
        (ExpertDispatch, "factors_back", router_detached),
        (ExpertDispatch, "plan", counts_of_another),
    ],
    ids=called,
)
def test_a_planted_bug_is_seen(owner, name, twin, monkeypatch):
    plant(monkeypatch, owner, name, twin)
    assert_caught(expert_config(TWO))


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
    config = expert_config(TWO, experts_per_token=1)
    assert_equals_one_rank(config)
    plant(monkeypatch, NumpyOps, "choice_forward", highest_first)
    assert_caught(config)
