"""Records and memory of --sequence-parallel and --tp-matmul ring.

They equal the prediction on shapes and the formulas.
"""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from small_model import (
    LAYOUTS,
    MODEL,
    WORLD,
    assert_peak,
    cut_model,
    peaks,
    real_step,
    slow_unless,
    small_config,
)
from test_records import WHAT, blocks_of

from mpipar.comm.grid import share
from mpipar.comm.record import Sums
from mpipar.plan.predict import predict

HERE = [layout for layout in LAYOUTS[WORLD.size] if layout[2] > 1]
MATMULS = ("plain", "ring")
pytestmark = pytest.mark.ranks(2, 3, 4, 8)
both_matmuls = pytest.mark.parametrize("tp_matmul", MATMULS)
all_layouts = pytest.mark.parametrize("layout", HERE, ids=str)


@both_matmuls
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@all_layouts
def test_shapes_only_run_predicts_every_record(layout, schedule, tp_matmul):
    config = small_config(layout, schedule=schedule, model=cut_model(tp_matmul))
    _, recorder = real_step(config)
    predicted = predict(config, WORLD.rank).recorder
    assert list(map(WHAT, recorder.records)) == list(map(WHAT, predicted.records))


@pytest.mark.parametrize("num_microbatches", [1, 5])
@all_layouts
def test_barriers_follow_the_formula(layout, num_microbatches):
    """Ten collectives a layer and microbatch, each of one whole activation.

    Only this rank's tokens of a product's input are kept. So it is gathered again for the weight
    gradient.
    """
    config = small_config(layout, num_microbatches, model=cut_model())
    dp, _, tp = layout
    worker, recorder = real_step(config)
    blocks = sum(len(stage) for stage in blocks_of(worker))
    first, last = 0 in worker.stages, worker.schedule.num_stages - 1 in worker.stages
    num_rows = config.train.batch_size // (dp * num_microbatches)
    act = 8 * num_rows * share(MODEL.seq_len, tp) * tp * MODEL.d_model  # with its padding
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
@all_layouts
def test_one_sum_of_replicated_gradients_a_step(layout, tp_matmul, norm, vectors):
    """The only partial gradients are the vectors of two norms a layer and of the last norm."""
    config = small_config(layout, 5, model=cut_model(tp_matmul, norm=norm))
    worker, recorder = real_step(config)
    blocks = sum(len(stage) for stage in blocks_of(worker))
    last = worker.schedule.num_stages - 1 in worker.stages
    sums = [counter[:2] for key, counter in recorder.totals("axis", "name").items()
            if key == ("tp", "grads.tp")]
    assert sums == [(1, 8 * vectors * (2 * blocks + last) * MODEL.d_model)]


@all_layouts
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


@all_layouts
def test_pipeline_messages_carry_a_share(layout):
    dp, pp, tp = layout
    config = small_config(layout, 5, model=cut_model())
    worker, recorder = real_step(config)
    size = 8 * config.train.batch_size // (dp * 5) * share(MODEL.seq_len, tp) * MODEL.d_model
    above = worker.grid.place("pp") < pp - 1
    totals = recorder.totals("axis", "name", "operation")
    sends = totals.get(("pp", "activations", "send"), Sums())[:2]
    assert sends == (5 * above, 5 * above * size)


@pytest.mark.parametrize(("layout", "tp_matmul"), slow_unless(
    lambda layout, tp_matmul: (layout, tp_matmul) == (HERE[-1], "plain"),
    itertools.product(HERE, MATMULS)), ids=str)
def test_memory_is_predicted_and_smaller(layout, tp_matmul):
    """It holds within 5 % and 2 MiB for tile buffers and Python objects; the stash shrinks."""
    sizes = {"d_model": 96, "ffn": 384, "seq_len": 64 + layout[2] * 2}
    config = small_config(layout, model=cut_model(tp_matmul, **sizes), rows_per_mb=1)
    assert_peak(*peaks(config))
    predicted = predict(config, WORLD.rank)
    whole = predict(replace(config, model=replace(MODEL, **sizes).completed()), WORLD.rank)
    assert predicted.peak_bytes["stash"] < 0.9 * whole.peak_bytes["stash"]
