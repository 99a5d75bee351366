"""Experts on several ranks equal those of one rank to 1e-12, whatever else cuts the model."""

from dataclasses import replace

import numpy as np
import pytest
from small_model import (
    MODEL,
    WORLD,
    assert_equals_one_rank,
    computed_once,
    poison_unwritten,
    slow_unless,
    small_config,
    tokens,
    two_workers,
    with_sync_sends,
)

from mpipar.config.memory import MemoryConfig
from mpipar.data.rows import Rows
from mpipar.train.verify import differences, full_tensors

EXPERTS = replace(MODEL, layers=2, seq_len=8, experts=4, expert_ffn=13, router_loss_coef=0.5)
LAYOUTS = {  # number of ranks: ((dp, pp, tp), cp, ep)
    1: [((1, 1, 1), 1, 1)],
    2: [((2, 1, 1), 1, 2), ((1, 1, 1), 2, 2), ((2, 1, 1), 1, 1), ((1, 1, 2), 1, 1),
        ((1, 2, 1), 1, 1)],
    4: [((2, 1, 2), 1, 2), ((2, 2, 1), 1, 2), ((2, 1, 1), 2, 4), ((1, 1, 2), 2, 2),
        ((4, 1, 1), 1, 2)],
    8: [((4, 1, 2), 1, 2), ((2, 2, 1), 2, 4), ((2, 2, 2), 1, 2)],
}
HERE = LAYOUTS.get(WORLD.size, [])


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Every newly allocated array, receive buffers included, is full of NaN."""
    poison_unwritten(monkeypatch)


def expert_config(layout, num_microbatches=2, model=EXPERTS, **grid):
    """The resolved configuration of ((dp, pp, tp), cp, ep)."""
    sizes, cp, ep = layout
    return small_config(sizes, num_microbatches, model=model, cp=cp, ep=ep, **grid)


def product_of(layouts, changes, chosen):
    """(layout, name of a change) of all; slow but for what chosen(place of the layout, name) takes.

    The first layouts mix most.
    """
    return slow_unless(lambda layout, name: chosen(layouts.index(layout), name),
                       [(layout, name) for layout in layouts for name in changes])


@pytest.mark.parametrize(("layout", "balance"), product_of(
    HERE, ("none", "loss", "bias"), lambda place, name: name == "loss" and place < 4), ids=str)
def test_experts_equal_one_rank(layout, balance):
    model = replace(EXPERTS, router_balance=balance)
    assert_equals_one_rank(expert_config(layout, model=model), expected=computed_once)


@pytest.mark.parametrize(("layout", "dispatch"), product_of(
    HERE, ("all-gather",), lambda place, _: place < 2), ids=str)
def test_gathered_rows_equal_one_rank(layout, dispatch):
    config = expert_config(layout, expert_dispatch=dispatch)
    assert_equals_one_rank(config, expected=computed_once)


GATED = {"arch": "llama", "activation": "swiglu", "norm": "rms", "bias": "none"}
MODELS = {
    "sequence parallel": {"sequence_parallel": True},
    "ring": {"sequence_parallel": True, "tp_matmul": "ring"},
    "shared": {**GATED, "shared_expert_ffn": 11, "expert_interval": 2},
    "one expert": {"experts_per_token": 1},
    "all experts": {"experts_per_token": 4},
}


@pytest.mark.parametrize(("layout", "change"), product_of(
    HERE, MODELS, lambda place, name: place == 0 and name in ("sequence parallel", "shared")),
    ids=str)
def test_another_model_equals_one_rank(layout, change):
    model = replace(EXPERTS, **MODELS[change])
    assert_equals_one_rank(expert_config(layout, model=model))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [one for one in HERE if one[0][2] == 1 < one[1]], ids=str)
def test_exchanged_heads_equal_one_rank(layout):
    config = expert_config(layout, cp_attention="ulysses", rank_order="tp,cp,dp,pp")
    assert_equals_one_rank(config, expected=computed_once)


# The number of microbatches of each; a bidirectional one holds every expert twice.
SCHEDULES = {"dualpipe": 4, "zb-h1": 4, "zb-v": 4, "interleaved": 4, "naive": 1, "gpipe": 5}


@pytest.mark.parametrize(("layout", "schedule"), product_of(
    [one for one in HERE if one[0][1] > 1], SCHEDULES,
    lambda place, name: place == 0 and name in ("dualpipe", "zb-v")), ids=str)
def test_schedules_equal_one_rank(layout, schedule):
    model = replace(EXPERTS, layers=4, router_balance="bias" if schedule == "dualpipe" else "loss")
    config = expert_config(layout, SCHEDULES[schedule], model=model, schedule=schedule)
    assert_equals_one_rank(with_sync_sends(config), expected=computed_once)


MEMORY = {
    "zero 1": {"zero": 1}, "zero 3": {"zero": 3},
    "pieces": {"zero": 3, "zero_grads": "sharded", "zero_keep": "stage", "recompute": "block"},
    "block": {"recompute": "block"}, "scores": {"recompute": "attention", "recompute_layers": 1},
}


@pytest.mark.parametrize(("layout", "memory"), product_of(
    [one for one in HERE if one[0][0] * one[1] > 1], MEMORY,
    lambda place, name: place == 0 and name in ("pieces", "zero 3")), ids=str)
def test_less_memory_equals_one_rank(layout, memory):
    model = replace(EXPERTS, router_balance="bias" if memory == "pieces" else "loss")
    config = expert_config(layout, model=model)
    config = replace(config, memory=MemoryConfig(**MEMORY[memory]))
    assert_equals_one_rank(config, expected=computed_once)


@pytest.mark.parametrize(("layout", "zero"), product_of(
    [one for one in HERE if one[0][0] * one[1] > 1], (0, 1, 3),
    lambda place, zero: place == 0 and zero == 1), ids=str)
def test_clipped_updates_of_adamw_equal_one_rank(layout, zero):
    """Three steps: the norm counts each expert once, and every rank scales by the same factor."""
    config = expert_config(layout)
    train = replace(config.train, optimizer="adamw", lr=0.01, eps=1e-3, clip=0.05, warmup_steps=0)
    config = replace(config, train=train, memory=MemoryConfig(zero=zero))
    results, whole = [], []
    for worker in two_workers(config):
        rows = Rows(worker.ops, tokens(), worker.config, worker.grid)
        steps = [worker.train_step(step, lambda mb, step=step, rows=rows: rows.train(step, mb))
                 for step in (1, 2, 3)]
        results.append(np.array([(one.loss, one.grad_norm) for one in steps]))
        whole.append(full_tensors(worker, "master"))
        worker.close()
    assert results[1][:, 1].min() > 2 * train.clip
    np.testing.assert_allclose(*results, rtol=1e-12)
    if WORLD.rank == 0:
        assert not [one for one in differences("weight", *whole) if not one.ok]
