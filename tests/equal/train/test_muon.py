"""Muon: every layout gives the weights of one rank, and each wrong way to do it is seen."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from small_model import (
    EVEN,
    EXPERTS,
    MODEL,
    WORLD,
    assert_records_predicted,
    called,
    plant,
    small_config,
    worker_and_rows,
    worker_of,
)

from mpipar.run.verify import full_tensors, serial_config
from mpipar.train import muon
from mpipar.train.muon import Muon, Unit

pytestmark = pytest.mark.usefixtures("poisoned_memory")
STEPS, TOLERANCE = 3, 1e-10
LLAMA = replace(
    EVEN, layers=3, heads=4, d_model=16, kv_heads=2, norm="rms", activation="swiglu",
    positions="rope", bias="none", arch="llama", tied=False,
)  # fmt: skip
ONE_KEY = replace(LLAMA, kv_heads=1)  # every rank of tp has a copy
GATED = replace(EXPERTS, arch="llama", activation="swiglu", bias="none", shared_expert_ffn=11)
CASES = {  # ranks: (dp, pp, tp), model, further settings
    2: [
        ((2, 1, 1), MODEL, {}),
        ((2, 1, 1), MODEL, {"zero": 1}),
        ((2, 1, 1), LLAMA, {"zero": 3}),
        ((1, 2, 1), MODEL, {}),
        ((1, 1, 2), MODEL, {}),
        ((1, 1, 2), LLAMA, {}),
        ((1, 1, 2), ONE_KEY, {}),
        ((2, 1, 1), GATED, {"ep": 2}),
    ],
    4: [
        ((4, 1, 1), LLAMA, {"zero": 1}),
        ((2, 1, 2), MODEL, {}),
        ((2, 1, 2), MODEL, {"zero": 1}),
        ((2, 1, 2), MODEL, {"zero": 3, "rank_order": "tp,cp,dp,pp"}),
        ((2, 1, 2), ONE_KEY, {}),
        ((2, 1, 2), ONE_KEY, {"zero": 1}),
        ((1, 1, 4), LLAMA, {}),
        ((1, 1, 4), LLAMA, {"sequence_parallel": True}),
        ((1, 1, 4), ONE_KEY, {}),
        ((1, 2, 2), ONE_KEY, {"schedule": "zb-v", "num_microbatches": 4}),
        ((2, 2, 1), LLAMA, {"zero": 3, "num_microbatches": 4}),
        ((1, 1, 2), LLAMA, {"cp": 2, "zero": 1}),
        ((2, 1, 2), EXPERTS, {"ep": 2}),
        ((2, 1, 2), GATED, {"ep": 2, "zero": 1}),
        ((4, 1, 1), GATED, {"ep": 2, "zero": 3, "router_balance": "bias"}),
    ],
}  # fmt: skip


def config_of(layout, model, **values):
    return small_config(
        layout, model=model, optimizer="muon", lr=0.02, eps=1e-3, weight_decay=0.3, warmup_steps=0,
        **{"rows_per_mb": 2} | values,
    )  # fmt: skip


def trained(config, **made):
    """All weights after some steps, and this rank's worker. Comm: steps, and a stream."""
    worker, rows = worker_and_rows(config, spread=0.02, **made)
    for step in range(1, STEPS + 1):
        worker.train_step(step, lambda mb, step=step: rows.train(step, mb))
    weights = full_tensors(worker, "master")
    worker.close()
    return weights, worker


@functools.cache
def on_one_rank(config):
    return trained(config, alone=True)[0]


def worst(config, expected=None):
    """The largest difference from one rank's weights, relative to what changed; rank 0 knows."""
    found, _ = trained(config)
    if WORLD.rank:
        return WORLD.bcast(None)
    right = expected or on_one_rank(serial_config(config))
    start = full_tensors(worker_and_rows(config, spread=0.02, alone=True)[0], "master")
    apart = {
        name: float(np.abs(found[name] - x).max() / max(np.abs(x - start[name]).max(), 1e-4))
        for name, x in right.items()
    }
    return WORLD.bcast(max(apart.values()))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("layout", "model", "values"), CASES.get(WORLD.size, []))
def test_every_layout_gives_the_weights_of_one_rank(layout, model, values):
    assert worst(config_of(layout, model, **values)) < TOLERANCE


# --- ways to do it that are another optimizer


def shard_by_shard(_plain, self, rooms):
    """Each rank's part of a matrix is made orthogonal by itself."""
    for k, room in rooms.items():
        unit = self.units[k]
        for number in range(len(unit.shards)):
            part = room[number].reshape(unit.local_shape)
            matrix = part.reshape(len(part), -1)
            square = float((matrix**2).sum())
            wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
            wide[...] = muon.orthogonalized(self.exact, wide / np.sqrt(square))
            matrix *= muon.SCALE * np.sqrt(max(unit.sizes["i"], unit.sizes["o"]))


def fused(_plain, self, whole):
    """q, k and v are one matrix."""
    return [whole.reshape(len(whole), -1)]


def wrong_orientation(_plain, self, whole):
    """Rows are read as if they were columns."""
    x = whole.reshape(tuple(self.sizes.values()))
    return [x.reshape(x.shape[::-1])]


def summed_twice(plain, self):
    """Momentum is the same on all replicas, and summed over them nevertheless."""
    plain(self)
    for flat in self.flats:
        self.comms[flat.groups[-1]].all_reduce(flat.moments["momentum"], "muon.sum")


def per_microbatch(plain, self):
    """Momentum moves on, and its matrices are made orthogonal, for each of two microbatches."""
    summed = [x for flat in self.flats for x in flat.reduced_grads]
    halves = [x / 2 for x in summed]
    for _ in range(2):
        for x, half in zip(summed, halves, strict=True):
            x[...] = half
        plain(self)


DENSE = [case for case in CASES.get(WORLD.size, []) if not case[1].experts]
TWINS = [
    (Muon, "orthogonalize", shard_by_shard, (1, 1, 2), LLAMA),
    (Unit, "matrices", fused, (1, 1, 2), MODEL),
    (Unit, "matrices", wrong_orientation, (1, 1, 2), LLAMA),
    (Muon, "prepare", summed_twice, (2, 1, 1), MODEL),
    (Muon, "prepare", per_microbatch, (1, 1, 2), MODEL),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("owner", "name", "twin", "layout", "model"), TWINS, ids=called)
def test_another_optimizer_is_seen(monkeypatch, owner, name, twin, layout, model):
    config = config_of(layout, model)
    right = None if WORLD.rank else on_one_rank(serial_config(config))
    plant(monkeypatch, owner, name, twin)
    assert worst(config, right) > 0.01


# --- what a step sends


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("layout", "model", "values"), DENSE[::2])
def test_the_shapes_predict_every_call(layout, model, values):
    config = config_of(layout, model, **values)
    _, recorder, _ = assert_records_predicted(config)
    names = [one.name for one in recorder.records if one.axis == "muon"]
    assert names == ["muon.gather", "muon.scatter"]  # once, however many microbatches


@pytest.mark.ranks(2)
def test_copies_travel_home_once():
    """With tp 2, each matrix is cut in two, but a rank sends only what has another home."""
    config = config_of((1, 1, 2), ONE_KEY)
    worker = worker_of(config)
    rule = worker.optimizer.rules["muon"]
    sent = WORLD.allreduce(sum(view.size for _, view in rule.sent))
    whole = worker_of(config, alone=True).optimizer.rules["muon"]
    assert sent == sum(unit.size * len(unit.shards) for unit in rule.units)
    assert sum(unit.size for unit in whole.units) <= sent  # the padding of ffn
    flops = WORLD.allgather(sum(rule.units[k].flops for k in rule.own))
    assert max(flops) <= 1.2 * min(flops)
    worker.close()
