"""Experts on several ranks equal those of one rank to 1e-12, whatever else cuts the model."""

from dataclasses import replace

import pytest
from small_model import (
    MODEL,
    WORLD,
    assert_equals_one_rank,
    computed_once,
    poison_unwritten,
    small_config,
    with_sync_sends,
)

from mpipar.config.memory import MemoryConfig

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


SCHEDULES = {"naive": 1, "gpipe": 5, "zb-h1": 4, "zb-v": 4, "interleaved": 4, "dualpipe": 4}
MORE = {
    "sequence parallel": {"model": replace(EXPERTS, sequence_parallel=True)},
    "ring": {"model": replace(EXPERTS, sequence_parallel=True, tp_matmul="ring"),
             "expert_dispatch": "all-gather"},
    "swiglu": {"model": replace(EXPERTS, arch="llama", activation="swiglu", norm="rms", bias="none",
                                shared_expert_ffn=11, expert_interval=2)},
    "one expert": {"model": replace(EXPERTS, experts_per_token=1)},
    "all experts": {"model": replace(EXPERTS, experts_per_token=4)},
    "ulysses": {"cp_attention": "ulysses"},
    "rank order": {"rank_order": "tp,cp,dp,pp"},
}


@pytest.mark.parametrize("change", MORE)
@pytest.mark.parametrize("layout", HERE, ids=str)
def test_another_model_equals_one_rank(layout, change):
    changes = dict(MORE[change])
    if layout[1] == 1:
        changes.pop("cp_attention", None)
    assert_equals_one_rank(expert_config(layout, **changes))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", [one for one in HERE if one[0][1] > 1], ids=str)
def test_schedules_equal_one_rank(layout, schedule):
    model = replace(EXPERTS, layers=4, router_balance="bias" if schedule == "dualpipe" else "loss")
    config = expert_config(layout, SCHEDULES[schedule], model=model, schedule=schedule)
    assert_equals_one_rank(with_sync_sends(config), expected=computed_once)


MEMORY = {
    "zero 1": {"zero": 1}, "zero 3": {"zero": 3},
    "pieces": {"zero": 3, "zero_grads": "sharded", "zero_keep": "stage", "recompute": "block"},
    "block": {"recompute": "block"}, "scores": {"recompute": "attention", "recompute_layers": 1},
}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("layout", HERE, ids=str)
def test_less_memory_equals_one_rank(layout, memory):
    settings = MEMORY[memory]
    if layout[0][0] * layout[1] == 1:
        settings = {name: value for name, value in settings.items() if "zero" not in name}
    model = replace(EXPERTS, router_balance="bias" if memory == "pieces" else "loss")
    config = expert_config(layout, model=model)
    config = replace(config, memory=MemoryConfig(**settings))
    assert_equals_one_rank(config, expected=computed_once)
