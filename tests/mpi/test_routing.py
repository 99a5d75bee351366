"""--routing: every layout chooses the same experts, and shapes foresee balanced choices."""

from dataclasses import replace

import pytest
from small_model import (
    MODEL,
    WORLD,
    assert_equals_one_rank,
    real_step,
    slow_unless,
    small_config,
)
from test_records import WHAT

from mpipar.data.routing import ROUTINGS, shares
from mpipar.plan.predict import predict

EXPERTS = replace(MODEL, layers=2, seq_len=8, experts=4, expert_ffn=13, router_loss_coef=0.5)
LAYOUTS = {  # number of ranks: ((dp, pp, tp), cp, ep)
    2: [((1, 1, 1), 2, 2), ((2, 1, 1), 1, 2)],
    4: [((2, 1, 2), 1, 2), ((2, 2, 1), 1, 2), ((2, 1, 1), 2, 4)],
}
HERE = LAYOUTS.get(WORLD.size, [])


def routed(layout, routing, **changes):
    """The resolved configuration of ((dp, pp, tp), cp, ep) with a forced routing."""
    sizes, cp, ep = layout
    model = replace(EXPERTS, routing=routing)
    return small_config(sizes, model=model, cp=cp, ep=ep, **changes)


@pytest.mark.parametrize(("layout", "routing"), slow_unless(
    lambda layout, routing: layout == HERE[0] and routing == "zipf",
    [(layout, name) for layout in HERE for name in ("zipf", "one-hot", "uniform")]), ids=str)
def test_forced_experts_equal_one_rank(layout, routing):
    assert_equals_one_rank(routed(layout, routing))


@pytest.mark.parametrize(("layout", "dispatch"), slow_unless(
    lambda layout, dispatch: layout == HERE[-1] and dispatch == "all-to-all",
    [(layout, name) for layout in HERE for name in ("all-to-all", "all-gather")]), ids=str)
def test_records_of_a_balanced_routing_are_those_of_shapes(layout, dispatch):
    config = routed(layout, "uniform", expert_dispatch=dispatch)
    _, recorder = real_step(config)
    expected = predict(config, WORLD.rank).recorder
    assert list(map(WHAT, recorder.records)) == list(map(WHAT, expected.records))


@pytest.mark.parametrize(("layout", "routing"), slow_unless(
    lambda layout, routing: layout == HERE[1] and routing == "adversarial",
    [(layout, name) for layout in HERE for name in ROUTINGS if name != "uniform"]), ids=str)
def test_bytes_of_a_skewed_routing_are_its_shares(layout, routing):
    """What a rank sends is what its tokens send to experts of others, up to a token of a row."""
    config = routed(layout, routing)
    worker, recorder = real_step(config)
    expert = worker.comms["expert"]
    each = EXPERTS.experts // expert.size
    own = shares(routing, EXPERTS.experts, EXPERTS.experts_per_token, expert.index, expert.size)
    elsewhere = own.sum() - own[expert.index * each:][:each].sum()
    exchange = next(one for one in recorder.records if one.name.endswith("moe.dispatch"))
    rows = config.train.batch_size // (config.grid.dp * config.grid.num_microbatches)
    tokens = rows * EXPERTS.seq_len // config.grid.cp
    sent = exchange.payload_bytes / (EXPERTS.d_model * 8)
    assert sent == pytest.approx(elsewhere * tokens, abs=rows)
    if routing == "adversarial" and each == EXPERTS.experts_per_token:
        assert sent == EXPERTS.experts_per_token * tokens
