"""A real step's records equal those of the shapes-only step, and both equal the formulas."""

import itertools
from dataclasses import replace
from operator import attrgetter

import pytest
from small_model import (
    LAYOUTS,
    MODEL,
    WORLD,
    assert_peak,
    last,
    peaks,
    real_step,
    slow_unless,
    small_config,
)

from mpipar.comm.grid import share
from mpipar.comm.record import Sums
from mpipar.layers.norm import Residual
from mpipar.plan.predict import predict

HERE = LAYOUTS[WORLD.size]
WHAT = attrgetter("operation", "name", "axis", "peer", "tag", "payload_bytes", "wire_bytes",
                  "dtype", "stage", "mb", "phase", "site", "cut")
# Calls of a block forward and backward: all-reduces (one of them is attention's), all-gathers. Of
# two products that are cut alone, one carries F, the other D.
PER_BLOCK = {"pair": ((2, 2), (0, 0)), "gather": ((1, 3), (2, 0)), "reduce": ((3, 1), (0, 2))}


@pytest.mark.parametrize(("layout", "ffn_cut", "schedule"), slow_unless(
    lambda layout, ffn_cut, schedule: schedule == "1f1b" and (ffn_cut == "pair" or layout[2] > 1),
    itertools.product(HERE, PER_BLOCK, ["naive", "gpipe", "1f1b"])), ids=str)
def test_shapes_only_run_predicts_every_record(layout, ffn_cut, schedule):
    config = small_config(layout, schedule=schedule, model=replace(MODEL, ffn_cut=ffn_cut))
    _, recorder = real_step(config)
    real = list(map(WHAT, recorder.records))
    predicted = predict(config, WORLD.rank).recorder
    assert real == list(map(WHAT, predicted.records))
    counts = {key: counter[:3] for key, counter in recorder.counters.items()}
    assert counts == {key: counter[:3] for key, counter in predicted.counters.items()}
    assert bool(real) == (WORLD.size > 1)


@pytest.mark.parametrize(("layout", "ffn_cut", "num_microbatches"), slow_unless(
    lambda layout, ffn_cut, num_microbatches: (
        (ffn_cut, num_microbatches) in (("pair", 1), ("gather", 2), ("reduce", 5))
        and (ffn_cut == "pair" or layout[2] > 1)),
    itertools.product(HERE, PER_BLOCK, [1, 2, 5])), ids=str)
def test_tensor_parallel_barriers_follow_the_formula(layout, ffn_cut, num_microbatches):
    config = small_config(layout, num_microbatches, model=replace(MODEL, ffn_cut=ffn_cut))
    dp, _, tp = layout
    worker, recorder = real_step(config)
    blocks = sum(len(config_blocks) for config_blocks in blocks_of(worker))
    first, last = 0 in worker.stages, worker.schedule.num_stages - 1 in worker.stages
    num_rows = config.train.batch_size // (dp * num_microbatches)
    column = 8 * num_rows * MODEL.seq_len  # bytes of a channel
    act, wide = column * MODEL.d_model, column * MODEL.ffn
    apart = column * tp * (share(MODEL.d_model, tp) + share(MODEL.ffn, tp))  # in equal pieces
    totals = recorder.totals("axis", "operation", "phase")
    per_mb = {key: [value / num_microbatches for value in counter[:2]]
              for key, counter in totals.items() if key[0] == "tp"}
    if tp == 1:
        assert not per_mb
        return
    stats = last * 3 * column * tp  # of the loss
    ends = {"F": (first, last, stats), "I": (last, 0, 0)}  # embedding and loss; head
    for phase, sums, gathers in zip("FI", *PER_BLOCK[ffn_cut], strict=True):
        end_sums, end_gathers, gathered = ends[phase]
        calls = blocks * sums + end_sums
        extra = blocks * (wide - act) * (sums == 3)
        assert per_mb.get(("tp", "all_reduce", phase), [0, 0]) == [calls, calls * act + extra]
        assert per_mb.get(("tp", "all_gather", phase), [0, 0]) == [
            blocks * gathers + end_gathers, blocks * apart * (gathers == 2) + gathered]
    assert not [key for key in per_mb if key[2] not in "FI"]


def blocks_of(worker):
    return [[unit for unit in stage.units if isinstance(unit[0], Residual)]
            for stage in worker.stages.values()]


@pytest.mark.parametrize("layout", HERE, ids=str)
def test_pipeline_and_data_parallel_messages_follow_the_formula(layout):
    dp, pp, _ = layout
    config = small_config(layout, 5, schedule="1f1b")
    worker, recorder = real_step(config)
    totals = recorder.totals("axis", "name", "operation")
    mb_bytes = 8 * config.train.batch_size // (dp * 5) * MODEL.seq_len * MODEL.d_model
    below, above = worker.grid.place("pp") > 0, worker.grid.place("pp") < pp - 1
    sends = totals.get(("pp", "activations", "send"), Sums())[:2]
    assert sends == (5 * above, 5 * above * mb_bytes)
    sends = totals.get(("pp", "gradients", "send"), Sums())[:2]
    assert sends == (5 * below, 5 * below * mb_bytes)
    tie = totals.get(("tie", "grads.tie", "all_reduce"), Sums()).calls
    assert tie == (pp > 1 and (not below or not above))
    grads = sum(flat.size * flat.grad.itemsize for flat in worker.flats)
    reduced = sum(counter.payload_bytes for key, counter in totals.items() if key[0] == "dp")
    assert reduced == (grads if dp > 1 else 0)
    world = [counter.calls for key, counter in totals.items() if key[0] == "world"]
    assert world == ([1] if WORLD.size > 1 else [])


@pytest.mark.parametrize("layout", HERE, ids=str)
def test_sums_of_units_start_inside_the_last_backward(layout):
    worker, recorder = real_step(small_config(layout, schedule="1f1b"))
    for stage, one in worker.stages.items():
        end = max(span.end_ns for span in recorder.spans if (span.kind, span.stage) == ("B", stage))
        sums = [record for record in recorder.records
                if (record.name, record.stage) == ("grads.bucket", stage)]
        assert (len(sums) > len(one.units)) == (layout[0] > 1)
        assert all(record.posted_ns < end for record in sums)
    flight, hidden = recorder.flight_ns("dp", ("all_reduce",))
    assert 0 < hidden < flight or flight == 0 == layout[0] - 1


@pytest.mark.parametrize("layout", last(HERE), ids=str)
def test_memory_is_predicted(layout):
    """The arrays of a step, weights to messages, are predicted within 5 % by the shapes-only run.

    Beside them the ops keep tile buffers of a fixed size: up to 2 MiB.
    """
    model = replace(MODEL, d_model=96, ffn=384, seq_len=64)
    assert_peak(*peaks(small_config(layout, model=model, rows_per_mb=1)))
