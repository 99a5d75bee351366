"""Experts on several ranks equal those of one rank to 1e-12, whatever else cuts the model."""

from dataclasses import replace

import pytest
from small_model import (
    MODEL,
    WORLD,
    assert_equals_one_rank,
    computed_once,
    poison_unwritten,
    slow_unless,
    small_config,
    with_sync_sends,
)

EXPERTS = replace(MODEL, layers=2, seq_len=8, experts=4, expert_ffn=13, router_loss_coef=0.5)
LAYOUTS = {  # number of ranks: ((dp, pp, tp), cp, ep)
    1: [((1, 1, 1), 1, 1)],
    2: [((2, 1, 1), 1, 2), ((1, 1, 1), 2, 2), ((2, 1, 1), 1, 1), ((1, 1, 2), 1, 1),
        ((1, 2, 1), 1, 1)],
    4: [((2, 1, 1), 2, 4), ((2, 1, 2), 1, 2), ((2, 2, 1), 1, 2), ((4, 1, 1), 1, 2),
        ((1, 1, 2), 2, 2)],
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


@pytest.mark.parametrize("balance", ["none", "loss", "bias"])
@pytest.mark.parametrize("layout", HERE, ids=str)
def test_experts_equal_one_rank(layout, balance):
    model = replace(EXPERTS, router_balance=balance)
    assert_equals_one_rank(expert_config(layout, model=model), expected=computed_once)


@pytest.mark.parametrize("layout", HERE, ids=str)
def test_gathered_rows_equal_one_rank(layout):
    config = expert_config(layout, expert_dispatch="all-gather")
    assert_equals_one_rank(config, expected=computed_once)
