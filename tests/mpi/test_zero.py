"""ZeRO: every layout equals one rank, sends what is predicted, and has its twins."""

from dataclasses import replace

import numpy as np
import pytest
from small_model import (
    WORLD,
    assert_equals_one_rank,
    computed_once,
    poison_unwritten,
    real_step,
    small_config,
    tokens,
    two_workers,
    with_sync_sends,
)

from mpipar.config.memory import MemoryConfig
from mpipar.config.model import DecoderConfig
from mpipar.data.rows import Rows
from mpipar.plan.predict import predict
from mpipar.train.verify import TOLERANCE, differences, full_tensors

pytestmark = pytest.mark.ranks(2, 4, 8)
# 4 heads of width 3; 8 tokens are 2 pieces for each of up to 4 ranks.
MODEL = DecoderConfig(layers=4, d_model=12, heads=4, ffn=31, seq_len=8, vocab_size=29)
HELD = replace(MODEL, sequence_parallel=True)
ONE, THREE = MemoryConfig(zero=1), MemoryConfig(zero=3)
PIECES, KEPT = replace(THREE, zero_grads="sharded"), replace(THREE, zero_keep="stage")
# Ranks: [((dp, pp, tp), cp, schedule, model, memory)]
CASES = {
    2: [((2, 1, 1), 1, "1f1b", MODEL, ONE), ((1, 1, 1), 2, "1f1b", MODEL, ONE),
        ((2, 1, 1), 1, "1f1b", MODEL, THREE), ((2, 1, 1), 1, "gpipe", MODEL, PIECES),
        ((1, 1, 1), 2, "1f1b", MODEL, KEPT)],
    4: [((2, 2, 1), 1, "1f1b", MODEL, ONE), ((2, 1, 2), 1, "1f1b", HELD, ONE),
        ((2, 1, 1), 2, "gpipe", MODEL, ONE), ((2, 2, 1), 1, "dualpipe", MODEL, ONE),
        ((2, 2, 1), 1, "zb-h1", MODEL, replace(ONE, recompute="block")),
        ((2, 2, 1), 1, "zb-v", MODEL, ONE), ((2, 2, 1), 1, "zb-v", MODEL, PIECES),
        ((2, 2, 1), 1, "dualpipe", MODEL, replace(KEPT, zero_grads="sharded")),
        ((2, 1, 2), 1, "1f1b", HELD, replace(PIECES, recompute="block")),
        ((1, 2, 1), 2, "interleaved", MODEL, KEPT), ((2, 2, 1), 1, "zb-h1", MODEL, THREE)],
    8: [((2, 2, 1), 2, "interleaved", MODEL, ONE), ((2, 2, 2), 1, "zb-h1", HELD, ONE)],
}
HERE = CASES.get(WORLD.size, [])
every_case = pytest.mark.parametrize("case", HERE, ids=lambda case: f"{case[:3]}")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Every newly allocated array, receive buffers included, is full of NaN."""
    poison_unwritten(monkeypatch)


def config_for(case, num_microbatches=4, **train):
    layout, cp, schedule, model, memory = case
    config = small_config(
        layout, num_microbatches, rows_per_mb=2, cp=cp, schedule=schedule, model=model)
    return replace(config, memory=memory, train=replace(config.train, **train))


@every_case
def test_layout_equals_one_rank(case):
    assert_equals_one_rank(with_sync_sends(config_for(case)), expected=computed_once)


@every_case
def test_three_steps_with_clipping_equal_one_rank(case):
    config = config_for(case, optimizer="adamw", lr=0.01, clip=0.05)
    found = []
    for worker in two_workers(config):
        rows = Rows(worker.ops, tokens(), worker.config, worker.grid)
        results = [worker.train_step(step, lambda mb, rows=rows, step=step: rows.train(step, mb))
                   for step in (1, 2, 3)]
        assert results[0].grad_norm > 0.05
        found.append(({"losses and norms": np.array([[one.loss, one.grad_norm]
                                                     for one in results])},
                      full_tensors(worker, "master")))
        worker.close()
    wrong = [one for here, alone in zip(*found, strict=True) if here and alone
             for one in differences("", here, alone) if one.error > 100 * TOLERANCE]
    assert not WORLD.bcast([f"{one.name}: {one.error:.1e}" for one in wrong])


@every_case
def test_shapes_only_run_predicts_every_record(case):
    config = config_for(case)
    _, recorder = real_step(config)
    shown = [[(one.operation, one.name, one.axis, one.peer, one.payload_bytes, one.wire_bytes,
               one.dtype, one.phase, one.mb, one.site, one.cut) for one in records]
             for records in (recorder.records, predict(config, WORLD.rank).recorder.records)]
    assert shown[0] == shown[1]
