"""Every schedule trains: its gradients and weights equal one rank's.

Cases have tp and dp, tied weights, and synchronous sends.
"""

import functools
from collections import Counter
from dataclasses import replace

import pytest
from small_model import (
    MODEL,
    WORLD,
    assert_equals_one_rank,
    computed_once,
    real_step,
    small_config,
    with_sync_sends,
)

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid, share
from mpipar.comm.record import Recorder
from mpipar.pipeline.schedules.catalog import SCHEDULES, schedule_problems
from mpipar.plan.predict import predict
from mpipar.train.worker import Worker, holders

LAYOUTS = {1: [(1, 1, 1)], 2: [(1, 2, 1)], 4: [(1, 4, 1), (1, 2, 2), (2, 2, 1)], 8: [(2, 2, 2)]}
pytestmark = pytest.mark.ranks(*LAYOUTS)
HERE = LAYOUTS.get(WORLD.size, [])
DEEP = replace(MODEL, layers=8)


def config_for(name, layout, num_microbatches, tied=True):
    return small_config(layout, num_microbatches, rows_per_mb=4, schedule=name,
                        model=replace(DEEP, tied=tied))


def counts(name, layout):
    """Microbatch counts that are accepted below, at and above the pipeline's depth."""
    pp = layout[1]
    every = [m for m in (1, 2, 5, 8) if not schedule_problems(name, pp, m)]
    return every if WORLD.size < 8 else every[-1:]


CASES = [(name, layout, m) for name in SCHEDULES for layout in HERE
         for m in counts(name, layout)]


LARGEST = [case for case in CASES if case[2] == max(m for n, _, m in CASES if n == case[0])]


@pytest.mark.parametrize("case", [
    case if case in LARGEST or case[1] == HERE[0] else pytest.param(case, marks=pytest.mark.slow)
    for case in CASES], ids=str)
def test_schedule_equals_one_rank(case):
    """By default with every number of microbatches on the first layout, the largest on others."""
    assert_equals_one_rank(with_sync_sends(config_for(*case)), expected=computed_once)


@pytest.mark.parametrize("case", LARGEST, ids=str)
def test_schedule_equals_one_rank_untied(case):
    assert_equals_one_rank(config_for(*case, tied=False), expected=computed_once)


one_step = functools.cache(real_step)  # the same for every test that looks at it


@pytest.mark.parametrize("case", LARGEST, ids=str)
def test_tie_and_mirror_sums(case):
    """V placements tie by a local sum without messages, others by one all-reduce of the ends."""
    _, layout, _ = case
    config = config_for(*case)
    worker, recorder = one_step(config)
    schedule, pp = worker.schedule, layout[1]
    ends = holders(schedule, (0, schedule.num_stages - 1))
    ties = [counter for key, counter in recorder.counters.items() if key.axis == "tie"]
    member = len(ends) > 1 and worker.grid.pp_rank in ends
    assert [counter.calls for counter in ties] == [1] * member
    if schedule.placement == "v":
        assert len(ends) == 1
    mirrored = schedule.placement == "mirror"
    if pp > 1 and schedule.placement != "v":
        assert ends == (0, pp - 1)
    mirror = [counter for key, counter in recorder.counters.items() if key.axis == "mirror"]
    assert bool(mirror) == mirrored
    # Copies count once: the owned elements of all ranks add up to one model.
    owned = sum(param.size for stage in worker.stages.values() for param in stage.flat.params
                if param.owner and worker.grid.dp_rank == 0)
    total = WORLD.allreduce(owned)
    alone, _ = one_rank_worker(config)
    tp, D = layout[2], MODEL.d_model
    ffn = config.model.layers * (-MODEL.ffn % tp) * (2 * D + 1)  # up, down, bias of up
    assert total == alone + ffn + (-MODEL.vocab_size % tp) * D


def one_rank_worker(config):
    from mpipar.train.verify import serial_config

    worker = Worker(serial_config(config), Grid(0), ops_module.make("cpu", "float64"), Recorder())
    return sum(stage.flat.size for stage in worker.stages.values()), worker


@pytest.mark.parametrize("case", LARGEST, ids=str)
def test_predicted_records(case):
    """The shapes-only run of every schedule makes the real run's records, in the same order."""
    config = config_for(*case)
    _, recorder = one_step(config)
    real = [record[3:] for record in recorder.records]
    assert real == [record[3:] for record in predict(config, WORLD.rank).recorder.records]


@pytest.mark.parametrize("case", LARGEST, ids=str)
def test_weight_gradients_are_really_postponed(case):
    """If a schedule has W, its I spans do no weight gradient: FLOPs per phase prove it."""
    config = config_for(*case)
    prediction = predict(config, WORLD.rank)
    worker, recorder = one_step(config)
    kinds = Counter(span[0] for span in recorder.spans)
    program = Counter(instr.kind for instr in worker.program)
    overlaps = program["OVERLAP_F_B"]
    assert kinds["I"] == program["I"]
    assert kinds["W"] == program["W"]
    assert kinds["F"] == program["F"] + overlaps
    assert kinds["B"] == program["B"] + overlaps
    blocks = sum(
        hasattr(layer, "ffn") for stage in worker.stages.values() for layer in stage.layers)
    mirrored = 2 if worker.schedule.placement == "mirror" else 1
    dp, _, tp = case[1]
    tokens_done = config.train.batch_size * MODEL.seq_len // dp // mirrored
    D, T = MODEL.d_model, MODEL.seq_len
    F, V = (share(width, tp) * tp for width in (MODEL.ffn, MODEL.vocab_size))
    products = 2 * tokens_done * (4 * D * D + 2 * D * F) // tp
    scores = 4 * tokens_done * T * D // tp
    first = worker.schedule.num_stages - 1 in worker.stages
    head = 2 * tokens_done * D * V // tp * first
    assert prediction.flops["F"] == blocks * (products + scores) + head
    assert prediction.flops["I"] == blocks * (products + 2 * scores) + head
    assert prediction.flops["W"] == blocks * products + head
