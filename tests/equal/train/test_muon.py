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
    small_config,
    worker_and_rows,
)

from mpipar.run.verify import full_tensors, serial_config

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
