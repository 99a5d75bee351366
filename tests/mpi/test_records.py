"""A real step's records equal those of the shapes-only step, and both equal the formulas."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from small_model import (
    LAYOUTS,
    MODEL,
    WORLD,
    assert_peak,
    assert_records_predicted,
    cut_model,
    last,
    peaks,
    real_step,
    slow_unless,
    small_config,
)

from mpipar.comm.grid import chunk_size
from mpipar.comm.record import Sums
from mpipar.layers.norm import Residual
from mpipar.plan.predict import predict

HERE = LAYOUTS[WORLD.size]
# Calls of a block forward and backward: all-reduces (one of them is attention's), all-gathers. Of
# two products that are cut alone, one carries F, the other D.
PER_BLOCK = {"pair": ((2, 2), (0, 0)), "gather": ((1, 3), (2, 0)), "reduce": ((3, 1), (0, 2))}


@pytest.mark.parametrize(("layout", "ffn_cut", "schedule"), slow_unless(
    lambda layout, ffn_cut, schedule: schedule == "1f1b" and (ffn_cut == "pair" or layout[2] > 1),
    itertools.product(HERE, PER_BLOCK, ["naive", "gpipe", "1f1b"])), ids=str)
def test_shapes_only_run_predicts_every_record(layout, ffn_cut, schedule):
    config = small_config(layout, schedule=schedule, model=replace(MODEL, ffn_cut=ffn_cut))
    _, recorder, predicted = assert_records_predicted(config)
    real, foreseen = ({key: counter[:3] for key, counter in one.counters.items()}
                      for one in (recorder, predicted.recorder))
    assert real == foreseen
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
    blocks = blocks_of(worker)
    first, last = 0 in worker.stages, worker.schedule.num_stages - 1 in worker.stages
    num_rows = config.train.batch_size // (dp * num_microbatches)
    column = 8 * num_rows * MODEL.seq_len  # bytes of a channel
    act, wide = column * MODEL.d_model, column * MODEL.ffn
    apart = column * tp * (  # in equal chunks
        chunk_size(MODEL.d_model, tp) + chunk_size(MODEL.ffn, tp))
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


def blocks_of(worker) -> int:
    return sum(isinstance(unit[0], Residual) for stage in worker.stages.values()
               for unit in stage.units)


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


# --- --sequence-parallel and --tp-matmul ring

CUT = [layout for layout in HERE if layout[2] > 1]
MATMULS = ("plain", "ring")
both_matmuls = pytest.mark.parametrize("tp_matmul", MATMULS)
of_several = pytest.mark.ranks(2, 3, 4, 8)


def cut_layouts(test):
    return of_several(pytest.mark.parametrize("layout", CUT, ids=str)(test))


@both_matmuls
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@cut_layouts
def test_shapes_only_run_predicts_every_record_of_cut_tokens(layout, schedule, tp_matmul):
    assert_records_predicted(
        small_config(layout, schedule=schedule, model=cut_model(tp_matmul)))


@pytest.mark.parametrize("num_microbatches", [1, 5])
@cut_layouts
def test_barriers_of_cut_tokens_follow_the_formula(layout, num_microbatches):
    """Ten collectives a layer and microbatch, each of one whole activation.

    Only this rank's tokens of a product's input are kept. So it is gathered again for the weight
    gradient.
    """
    config = small_config(layout, num_microbatches, model=cut_model())
    dp, _, tp = layout
    worker, recorder = real_step(config)
    blocks = blocks_of(worker)
    first, last = 0 in worker.stages, worker.schedule.num_stages - 1 in worker.stages
    num_rows = config.train.batch_size // (dp * num_microbatches)
    act = 8 * num_rows * chunk_size(MODEL.seq_len, tp) * tp * MODEL.d_model  # with its padding
    stats = 3 * 8 * num_rows * MODEL.seq_len * tp
    found = {key[1:]: [value / num_microbatches for value in counter[:3]]
             for key, counter in recorder.totals("axis", "operation", "phase").items()
             if key[0] == "tp" and key[2] in "FIW"}

    def barriers(count, extra=0):
        payload = count * act + (extra and stats)
        return [count + extra, payload, payload * (tp - 1) / tp]

    expected = {
        ("all_gather", "F"): barriers(2 * blocks + last, int(last)),
        ("reduce_scatter", "F"): barriers(2 * blocks + first),
        ("all_gather", "I"): barriers(2 * blocks),
        ("reduce_scatter", "I"): barriers(2 * blocks + last),
        ("all_gather", "W"): barriers(2 * blocks + first),
    }
    assert found == {key: value for key, value in expected.items() if value[0]}


@pytest.mark.parametrize(("tp_matmul", "norm", "vectors"), [
    ("plain", "layer", 2), ("ring", "rms", 1)])
@cut_layouts
def test_one_sum_of_replicated_gradients_a_step(layout, tp_matmul, norm, vectors):
    """The only partial gradients are the vectors of two norms a layer and of the last norm."""
    config = small_config(layout, 5, model=cut_model(tp_matmul, norm=norm))
    worker, recorder = real_step(config)
    blocks = blocks_of(worker)
    last = worker.schedule.num_stages - 1 in worker.stages
    sums = [counter[:2] for key, counter in recorder.totals("axis", "name").items()
            if key == ("tp", "grads.tp")]
    assert sums == [(1, 8 * vectors * (2 * blocks + last) * MODEL.d_model)]


@cut_layouts
def test_ring_sends_as_many_bytes_in_pieces(layout):
    tp = layout[2]
    plain, ring = (real_step(small_config(layout, 2, model=cut_model(way)))[1] for way in MATMULS)

    def sent(recorder, kinds):
        return sum(counter.wire_bytes for key, counter in recorder.counters.items()
                   if key.axis == "tp" and key.name.startswith("block") and key.operation in kinds)

    collectives = ("all_gather", "reduce_scatter")
    assert sent(ring, ("send",)) == sent(plain, collectives) > 0
    assert sent(ring, collectives) == sent(plain, ("send",)) == 0
    messages = Counter((record.name, record.phase) for record in ring.records
                       if record.operation == "recv" and record.name.startswith("block"))
    # qkv and up: one ring each way and one for the weight gradient; proj and down: one each way.
    per_layer = {("attn.qkv", "FIW"), ("ffn.up", "FIW"), ("attn.proj", "FI"), ("ffn.down", "FI")}
    names = {name for name, _ in messages}
    for name in names:
        phases = next(p for part, p in per_layer if name.endswith(part))
        assert {p: messages[name, p] for p in phases} == dict.fromkeys(phases, 2 * (tp - 1))
    for record in ring.records:
        if record.operation == "recv":
            assert record.posted_ns <= record.waited_ns <= record.done_ns


@cut_layouts
def test_pipeline_messages_carry_a_share(layout):
    dp, pp, tp = layout
    config = small_config(layout, 5, model=cut_model())
    worker, recorder = real_step(config)
    size = 8 * config.train.batch_size // (dp * 5) * chunk_size(MODEL.seq_len, tp) * MODEL.d_model
    above = worker.grid.place("pp") < pp - 1
    totals = recorder.totals("axis", "name", "operation")
    sends = totals.get(("pp", "activations", "send"), Sums())[:2]
    assert sends == (5 * above, 5 * above * size)


@of_several
@pytest.mark.parametrize(("layout", "tp_matmul"), slow_unless(
    lambda layout, tp_matmul: (layout, tp_matmul) == (CUT[-1], "plain"),
    itertools.product(CUT, MATMULS)), ids=str)
def test_memory_of_cut_tokens_is_predicted_and_smaller(layout, tp_matmul):
    """It holds within 5 % and 2 MiB for tile buffers and Python objects; the stash shrinks."""
    sizes = {"d_model": 96, "ffn": 384, "seq_len": 64 + layout[2] * 2}
    config = small_config(layout, model=cut_model(tp_matmul, **sizes), rows_per_mb=1)
    assert_peak(*peaks(config))
    predicted = predict(config, WORLD.rank)
    whole = predict(replace(config, model=replace(MODEL, **sizes).completed()), WORLD.rank)
    assert predicted.peak_bytes["stash"] < 0.9 * whole.peak_bytes["stash"]
