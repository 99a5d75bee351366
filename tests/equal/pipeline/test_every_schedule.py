"""Every schedule: ties of embedding and head, postponed weight gradients, sums that start early.

That its gradients and weights equal one rank's, and its records those predicted, is in
train/test_law.py.
"""

import functools
from collections import Counter

import pytest
from small_model import LAYOUTS as ALL
from small_model import (
    MODEL,
    WORLD,
    real_step,
    slow_unless,
    small_config,
    worker_of,
)

from mpipar.comm.grid import chunk_size
from mpipar.layers.norm import Residual
from mpipar.pipeline.schedules.catalog import SCHEDULES, schedule_problems
from mpipar.study.explain.predict import predict

LAYOUTS = {1: [(1, 1, 1)], 2: [(1, 2, 1)], 4: [(1, 4, 1), (1, 2, 2), (2, 2, 1)], 8: [(2, 2, 2)]}
pytestmark = pytest.mark.ranks(*LAYOUTS)
HERE = LAYOUTS.get(WORLD.size, [])
ONE_OF_EACH_PLACEMENT = ("1f1b", "interleaved", "zb-v")


def config_for(name, layout, num_microbatches, **more):
    """Every stage has a block, of four stages on two ranks one has two."""
    return small_config(
        layout,
        num_microbatches,
        rows_per_mb=4,
        schedule=name,
        layers=max(MODEL.layers, 2 * layout[1]),
        **more,
    )


def counts(name, layout):
    """Microbatch counts that are accepted below, at and above the pipeline's depth."""
    return [m for m in (1, 2, 5, 8) if not schedule_problems(name, layout[1], m)]


def enough(name, layout):
    """The least of these counts that fills the pipeline."""
    return min(m for m in counts(name, layout) if m > layout[1])


PIPELINE_ALONE = (1, WORLD.size, 1)
FULL = [
    (name, layout, enough(name, layout))
    for name in SCHEDULES
    for layout in HERE
    if counts(name, layout) and (WORLD.size < 8 or name in ONE_OF_EACH_PLACEMENT)
]
of_every_schedule = pytest.mark.parametrize(
    ("name", "layout", "num_microbatches"),
    slow_unless(
        lambda name, layout, _: name in ONE_OF_EACH_PLACEMENT or layout == PIPELINE_ALONE, FULL
    ),
    ids=str,
)


one_step = functools.cache(real_step)  # the same for every test that looks at it


@functools.cache
def predicted(config):
    return predict(config, WORLD.rank)


@of_every_schedule
def test_tie_sums(name, layout, num_microbatches):
    """V placements tie by a local sum without messages, others by one all-reduce of the ends."""
    config = config_for(name, layout, num_microbatches)
    worker, recorder = one_step(config)
    schedule, pp = worker.schedule, layout[1]
    ends = tuple(sorted({schedule.stage_to_rank[0], schedule.stage_to_rank[-1]}))
    ties = [counter for key, counter in recorder.counters.items() if key.axis == "tie"]
    member = len(ends) > 1 and worker.grid.group_rank("pp") in ends
    assert [counter.calls for counter in ties] == [1] * member
    if schedule.placement == "v":
        assert len(ends) == 1
    if pp > 1 and schedule.placement != "v":
        assert ends == (0, pp - 1)
    # Copies count once: the owned elements of all ranks add up to one model.
    owned = sum(
        param.size
        for stage in worker.stages.values()
        for param in stage.params
        if param.owner and worker.grid.group_rank("dp") == 0
    )
    total = WORLD.allreduce(owned)
    alone = sum(flat.size for flat in worker_of(config, alone=True).flats)
    tp, D = layout[2], MODEL.d_model
    ffn = config.model.layers * (-MODEL.ffn % tp) * (2 * D + 1)  # up, down, bias of up
    assert total == alone + ffn + (-MODEL.vocab_size % tp) * D


@of_every_schedule
def test_weight_gradients_are_really_postponed(name, layout, num_microbatches):
    """If a schedule has W, its I spans do no weight gradient: FLOPs per phase prove it."""
    config = config_for(name, layout, num_microbatches)
    prediction = predicted(config)
    worker, recorder = one_step(config)
    kinds = Counter(span[0] for span in recorder.spans)
    program = Counter(instr.kind for instr in worker.program)
    overlaps = program["OVERLAP_F_B"]
    assert kinds["I"] == program["I"]
    assert kinds["W"] == program["W"]
    assert kinds["F"] == program["F"] + overlaps
    assert kinds["B"] == program["B"] + overlaps
    blocks = sum(
        isinstance(unit[0], Residual) for stage in worker.stages.values() for unit in stage.units
    )
    dp, _, tp = layout
    tokens_done = config.train.batch_size * MODEL.seq_len // dp
    D, T = MODEL.d_model, MODEL.seq_len
    F, V = (chunk_size(width, tp) * tp for width in (MODEL.ffn, MODEL.vocab_size))
    products = 2 * tokens_done * (4 * D * D + 2 * D * F) // tp
    scores = 4 * tokens_done * T * D // tp
    first = worker.schedule.num_stages - 1 in worker.stages
    head = 2 * tokens_done * D * V // tp * first
    assert prediction.flops["F"] == blocks * (products + scores) + head
    assert prediction.flops["I"] == blocks * (products + 2 * scores) + head
    assert prediction.flops["W"] == blocks * products + head


@pytest.mark.parametrize("layout", ALL[WORLD.size], ids=str)
def test_sums_of_units_start_inside_the_last_backward(layout):
    worker, recorder = real_step(small_config(layout, schedule="1f1b"))
    for stage, one in worker.stages.items():
        end = max(span.end_ns for span in recorder.spans if (span.kind, span.stage) == ("B", stage))
        sums = [
            record
            for record in recorder.records
            if (record.name, record.stage) == ("grads.bucket", stage)
        ]
        assert (len(sums) > len(one.units)) == (layout[0] > 1)
        assert all(record.posted_ns < end for record in sums)
