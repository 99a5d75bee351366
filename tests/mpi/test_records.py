"""What a real step records equals what the shapes-only step predicts, and both equal the
formulas.
"""

from dataclasses import replace

import pytest
from small_model import LAYOUTS, MODEL, WORLD, real_step, small_config, tokens

from mpipar import ops as ops_module
from mpipar.data.rows import Rows
from mpipar.grid import Grid
from mpipar.plan.predict import predict
from mpipar.report.memory import PeakMemory
from mpipar.trace import (
    AXIS,
    DTYPE,
    MB,
    NAME,
    OPERATION,
    PAYLOAD,
    PEER,
    PHASE,
    STAGE,
    TAG,
    WIRE,
    Recorder,
)
from mpipar.train import Worker

HERE = LAYOUTS[WORLD.size]
WHAT = (OPERATION, NAME, AXIS, PEER, TAG, PAYLOAD, WIRE, DTYPE, STAGE, MB, PHASE)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize("ffn_cut", ["pair", "gather", "reduce"])
@pytest.mark.parametrize("layout", HERE, ids=str)
def test_shapes_only_run_predicts_every_record(layout, ffn_cut, schedule):
    config = small_config(layout, schedule=schedule, model=replace(MODEL, ffn_cut=ffn_cut))
    _, recorder = real_step(config)
    real = [[record[i] for i in WHAT] for record in recorder.records]
    predicted = predict(config, WORLD.rank).recorder
    assert real == [[record[i] for i in WHAT] for record in predicted.records]
    counts = {key: counter[:3] for key, counter in recorder.counters.items()}
    assert counts == {key: counter[:3] for key, counter in predicted.counters.items()}
    assert bool(real) == (WORLD.size > 1)


@pytest.mark.parametrize("layout", HERE, ids=str)
@pytest.mark.parametrize("ffn_cut", ["pair", "gather"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_tensor_parallel_barriers_follow_the_formula(layout, ffn_cut, num_microbatches):
    config = small_config(layout, num_microbatches, model=replace(MODEL, ffn_cut=ffn_cut))
    dp, _, tp = layout
    worker, recorder = real_step(config)
    blocks = sum(len(config_blocks) for config_blocks in blocks_of(worker))
    first, last = 0 in worker.stages, worker.schedule.num_stages - 1 in worker.stages
    num_rows = config.train.batch_size // (dp * num_microbatches)
    act = 8 * num_rows * MODEL.seq_len * MODEL.d_model  # bytes of one activation, A
    wide = 8 * num_rows * MODEL.seq_len * MODEL.ffn
    totals = recorder.totals((0, 2, 3))
    per_mb = {key: [value / num_microbatches for value in counter[:2]]
              for key, counter in totals.items() if key[0] == "tp"}
    if tp == 1:
        assert not per_mb
        return
    gather = ffn_cut == "gather"
    # per layer: forward 2 all-reduces of A (attention, ffn); backward 2. Gathered ffn: two
    # all-gathers take the place of the ffn's forward all-reduce, and two all-reduces (of F and D
    # width) that of its backward one.
    forward = blocks * (1 if gather else 2) + first
    backward = blocks * (3 if gather else 2) + last
    assert per_mb.get(("tp", "all_reduce", "F"), [0, 0]) == [forward, forward * act]
    extra = blocks * (wide - act) if gather else 0
    assert per_mb.get(("tp", "all_reduce", "I"), [0, 0]) == [
        backward, backward * act + extra]
    gathers = blocks * 2 * gather + last
    stats = 3 * 8 * num_rows * MODEL.seq_len * tp
    gathered = blocks * (wide + act) * gather + last * stats
    assert per_mb.get(("tp", "all_gather", "F"), [0, 0]) == [gathers, gathered]
    assert not [key for key in per_mb if key[2] not in "FI"]


def blocks_of(worker):
    return [[layer for layer in stage.layers if hasattr(layer, "ffn")]
            for stage in worker.stages.values()]


@pytest.mark.parametrize("layout", HERE, ids=str)
def test_pipeline_and_data_parallel_messages_follow_the_formula(layout):
    dp, pp, _ = layout
    config = small_config(layout, 5, schedule="1f1b")
    worker, recorder = real_step(config)
    totals = recorder.totals((0, 1, 2))
    mb_bytes = 8 * config.train.batch_size // (dp * 5) * MODEL.seq_len * MODEL.d_model
    below, above = worker.grid.pp_rank > 0, worker.grid.pp_rank < pp - 1
    sends = totals.get(("pp", "activations", "send"), [0, 0])[:2]
    assert sends == [5 * above, 5 * above * mb_bytes]
    sends = totals.get(("pp", "gradients", "send"), [0, 0])[:2]
    assert sends == [5 * below, 5 * below * mb_bytes]
    tie = totals.get(("tie", "grads.tie", "all_reduce"), [0])[0]
    assert tie == (pp > 1 and (not below or not above))
    grads = sum(stage.flat.grad.nbytes for stage in worker.stages.values())
    reduced = sum(counter[1] for key, counter in totals.items() if key[0] == "dp")
    assert reduced == (grads if dp > 1 else 0)
    world = [counter[0] for key, counter in totals.items() if key[0] == "world"]
    assert world == ([1] if WORLD.size > 1 else [])


@pytest.mark.parametrize("layout", HERE, ids=str)
def test_memory_is_predicted(layout):
    """The arrays of a step, weights to messages, take what the shapes-only run says, within 5 %.

    Beside them the ops keep tile buffers of a fixed size, and Python its objects: 2 MiB.
    """
    model = replace(MODEL, d_model=96, ffn=384, seq_len=64)
    config = small_config(layout, model=model, rows_per_mb=1)
    ops = ops_module.make("cpu", config.run.dtype)
    memory = PeakMemory(ops)
    memory.start()
    worker = Worker(config, Grid.of(config.grid, WORLD.rank), ops, Recorder(), WORLD)
    worker.initialize()
    rows = Rows(ops, tokens(), config, worker.grid.dp_rank)
    worker.train_step(1, lambda mb: rows.train(1, mb))
    worker.close()
    memory.stop()
    predicted = predict(config, WORLD.rank).peak_total
    assert 0.95 * predicted <= memory.peak <= 1.05 * predicted + 2**21, (memory.peak, predicted)
