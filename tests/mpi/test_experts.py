"""Experts on several ranks equal those of one rank to 1e-12, whatever else cuts the model."""

from dataclasses import replace

import numpy as np
import pytest
from small_model import (
    MODEL,
    WORLD,
    assert_equals_known,
    assert_equals_one_rank,
    assert_records_predicted,
    real_step,
    slow_unless,
    small_config,
    tokens,
    two_workers,
    with_sync_sends,
)

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.config.memory import MemoryConfig
from mpipar.data.routing import ROUTINGS, shares
from mpipar.data.rows import Rows
from mpipar.layers.param import Param
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.partition import experts_all_to_all, experts_gather
from mpipar.plan import measure
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
pytestmark = pytest.mark.usefixtures("poisoned_memory")


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
    assert_equals_known(expert_config(layout, model=model))


@pytest.mark.parametrize(("layout", "dispatch"), product_of(
    HERE, ("all-gather",), lambda place, _: place < 2), ids=str)
def test_gathered_rows_equal_one_rank(layout, dispatch):
    config = expert_config(layout, expert_dispatch=dispatch)
    assert_equals_known(config)


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
    assert_equals_known(config)


# The number of microbatches of each; a bidirectional one holds every expert twice.
SCHEDULES = {"dualpipe": 4, "zb-h1": 4, "zb-v": 4, "interleaved": 4, "naive": 1, "gpipe": 5}


@pytest.mark.parametrize(("layout", "schedule"), product_of(
    [one for one in HERE if one[0][1] > 1], SCHEDULES,
    lambda place, name: place == 0 and name in ("dualpipe", "zb-v")), ids=str)
def test_schedules_equal_one_rank(layout, schedule):
    model = replace(EXPERTS, layers=4, router_balance="bias" if schedule == "dualpipe" else "loss")
    config = expert_config(layout, SCHEDULES[schedule], model=model, schedule=schedule)
    assert_equals_known(with_sync_sends(config))


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
    assert_equals_known(config)


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


# --- broken twins: the comparisons above must fail. Those with `comm` are right on one rank.

TWO = ((2, 1, 1), 1, 2)


def summed_over_data(monkeypatch):
    """Experts of other ranks are added as if they were copies."""
    plain = Grid.uncut
    monkeypatch.setattr(Grid, "uncut", lambda self, group, cut: plain(
        self, group, cut if group == "tp" else ()))


def with_another_plan(monkeypatch, change):
    """Combine the rows of ranks by change(plan)."""
    plain = experts_all_to_all.combine
    monkeypatch.setattr(
        experts_all_to_all, "combine", lambda ops, rows, plan, weighted, comm, name: plain(
            ops, rows, change(plan) if comm.size > 1 else plan, weighted, comm, name))


def weighted_twice(monkeypatch):
    with_another_plan(monkeypatch, lambda plan: plan._replace(probs=plan.probs**2))


def in_order_of_sending(monkeypatch):
    """Results are not put back to their tokens."""
    with_another_plan(monkeypatch, lambda plan: plan._replace(
        places=np.arange(plan.places.size).reshape(plan.places.shape)))


def balanced_by_microbatch(monkeypatch):
    """One rank has it, too. Its microbatches have other rows than those of two."""
    plain = NumpyOps.balance_backward_input

    def balance(self, dlogits, logits, loads, factor):
        plain(self, dlogits, logits, np.broadcast_to(loads.mean(axis=0), loads.shape), factor)

    monkeypatch.setattr(NumpyOps, "balance_backward_input", balance)


def router_detached(monkeypatch):
    """Its gradient does not cross the border between ranks."""
    plain = experts_all_to_all.factors_back

    def factors_back(ops, factors, plan, comm, name):
        return plain(ops, factors * (comm.size == 1), plan, comm, name)

    monkeypatch.setattr(experts_all_to_all, "factors_back", factors_back)


def router_unsummed(monkeypatch):
    """Keep on each rank what its own experts tell the router, as after a plain all-gather."""
    def factors_back(ops, factors, plan, comm, name):
        whole = ops.embedding_forward(plan.places, factors.reshape(-1, 1), plan.start)
        return whole.reshape(comm.size, -1, *plan.places.shape[1:])[comm.index][:plan.length]

    monkeypatch.setattr(experts_gather, "factors_back", factors_back)


def counts_of_another(monkeypatch):
    """Distribute rows among this rank's experts by the counts of the previous microbatch."""
    plain, last = experts_all_to_all.plan, {}

    def plan(ops, choice, experts, comm, name):
        found = plain(ops, choice, experts, comm, name)
        if comm.size == 1:
            return found
        first = min(last.get(name, found.counts)[0], sum(found.counts))
        last[name] = found.counts
        return found._replace(counts=[first, sum(found.counts) - first])

    monkeypatch.setattr(experts_all_to_all, "plan", plan)


TWINS = {
    summed_over_data: {}, weighted_twice: {}, in_order_of_sending: {}, balanced_by_microbatch: {},
    router_detached: {}, router_unsummed: {"expert_dispatch": "all-gather"}, counts_of_another: {}}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.__name__)
def test_a_planted_bug_is_seen(twin, monkeypatch):
    twin(monkeypatch)
    with pytest.raises(AssertionError, match="tensors differ"):
        assert_equals_one_rank(expert_config(TWO, **TWINS[twin]))


@pytest.mark.ranks(2)
def test_ties_are_broken_alike_on_all_ranks(monkeypatch):
    """The router's weights of two experts are equal, so that each token likes both as much."""
    plain, choose = Param.initial_rows, NumpyOps.choice_forward

    def initial_rows(self, *given):
        first = None
        for row, values in plain(self, *given):
            first = values if row % 2 == 0 else first
            yield row, first if "router" in self.name else values

    def highest_first(self, logits, count, bias=None):
        if WORLD.rank == 0:
            return choose(self, logits, count, bias)
        ids, probs = choose(self, np.ascontiguousarray(logits[:, ::-1]), count, bias)
        return logits.shape[1] - 1 - ids, probs

    monkeypatch.setattr(Param, "initial_rows", initial_rows)
    config = expert_config(TWO, model=replace(EXPERTS, experts_per_token=1))
    assert_equals_one_rank(config)
    monkeypatch.setattr(NumpyOps, "choice_forward", highest_first)
    with pytest.raises(AssertionError, match="tensors differ"):
        assert_equals_one_rank(config)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", [
    ((2, 2, 1), 1, 2), ((1, 1, 2), 2, 2), ((2, 1, 1), 2, 2)], ids=str)
def test_ranks_that_exchange_rows_are_measured_at_the_same_time(layout, monkeypatch):
    """Costs are measured in turns; a rank must not wait for one whose turn comes later."""
    turns = []

    def in_turns(mpi_world, group, num_groups, cores_each, run):
        turns.append((group, num_groups, cores_each))
        return {kind: dict.fromkeys(range(EXPERTS.layers + 2), (1.0, 1.0)) for kind in "fiw"}

    monkeypatch.setattr(measure, "in_turns", in_turns)
    config = expert_config(layout)
    grid = Grid.of(config.grid, WORLD.rank)
    costs = measure.measure_costs(
        config, grid, ops_module.make("cpu", "float64"), WORLD, repeats=0)
    assert (costs is None) == (WORLD.rank > 0)
    (group, num_groups, cores_each), = turns
    assert num_groups * cores_each == WORLD.size
    groups = WORLD.allgather(group)
    assert sorted(groups) == sorted([*range(num_groups)] * cores_each)
    for name in ("expert", "tp", "cp"):
        assert {groups[rank] for rank in grid.group(name)} == {group}, name


# --- --routing: every layout chooses the same experts, and shapes foresee balanced choices

ROUTED = {2: HERE[1::-1], 4: HERE[:3]}.get(WORLD.size, [])


def routed(layout, routing, **changes):
    """The configuration of a layout with a forced routing."""
    return expert_config(layout, model=replace(EXPERTS, routing=routing), **changes)


@pytest.mark.parametrize(("layout", "routing"), slow_unless(
    lambda layout, routing: layout == ROUTED[0] and routing == "zipf",
    [(layout, name) for layout in ROUTED for name in ("zipf", "one-hot", "uniform")]), ids=str)
def test_forced_experts_equal_one_rank(layout, routing):
    assert_equals_one_rank(routed(layout, routing))


@pytest.mark.parametrize(("layout", "dispatch"), slow_unless(
    lambda layout, dispatch: layout == ROUTED[-1] and dispatch == "all-to-all",
    [(layout, name) for layout in ROUTED for name in ("all-to-all", "all-gather")]), ids=str)
def test_records_of_a_balanced_routing_are_those_of_shapes(layout, dispatch):
    assert_records_predicted(routed(layout, "uniform", expert_dispatch=dispatch))


@pytest.mark.parametrize(("layout", "routing"), slow_unless(
    lambda layout, routing: layout == ROUTED[1] and routing == "adversarial",
    [(layout, name) for layout in ROUTED for name in ROUTINGS if name != "uniform"]), ids=str)
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
