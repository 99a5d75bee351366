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
    every,
    last,
    peaks,
    real_step,
    slow_unless,
    small_config,
)

from mpipar.comm.grid import chunk_size
from mpipar.comm.record import Sums
from mpipar.layers.norm import Residual
from mpipar.study.explain.predict import predict
from mpipar.study.measured_step import flight_ns

HERE = LAYOUTS[WORLD.size]
# Calls of a block forward and backward: all-reduces (one of them is attention's), all-gathers. Of
# two products that are cut alone, one carries F, the other D.
PER_BLOCK = {"pair": ((2, 2), (0, 0)), "gather": ((1, 3), (2, 0)), "reduce": ((3, 1), (0, 2))}


CUT = [layout for layout in HERE if layout[2] > 1]  # --sequence-parallel, --tp-matmul ring
MATMULS = ["plain", "ring"]


@pytest.mark.parametrize(
    "values",
    [
        *every(
            lambda one: (
                one["schedule"] == "1f1b" and (one["ffn_cut"] == "pair" or one["layout"] in CUT)
            ),
            layout=HERE,
            ffn_cut=[*PER_BLOCK],
            schedule=["naive", "gpipe", "1f1b"],
        ),
        *every(layout=CUT, schedule=["1f1b", "zb-h1"], sequence_parallel=True, tp_matmul=MATMULS),
    ],
)
def test_shapes_only_run_predicts_every_record(values):
    _, recorder, predicted = assert_records_predicted(small_config(**values))
    real, foreseen = (
        {key: counter[:3] for key, counter in one.counters.items()}
        for one in (recorder, predicted.recorder)
    )
    assert real == foreseen
    assert bool(real) == (WORLD.size > 1)


class Step:
    """A real step, and what its counts follow from: blocks and ends that this rank has.

    per_mb: {(operation, phase): [calls, payload bytes, wire bytes]} of tp, for one microbatch.
    """

    def __init__(self, config):
        self.worker, self.recorder = real_step(config)
        count, stages = config.grid.num_microbatches, self.worker.stages
        self.blocks = sum(
            isinstance(unit[0], Residual) for stage in stages.values() for unit in stage.units
        )
        self.first, self.last = 0 in stages, self.worker.schedule.num_stages - 1 in stages
        rows = config.train.batch_size // (config.grid.dp * count)
        self.token_bytes = 8 * rows  # of a channel, a token of each row
        self.column = self.token_bytes * MODEL.seq_len  # of a channel, all tokens
        self.stats = 3 * self.column * config.grid.tp  # of the loss
        self.per_mb = {
            key[1:]: [value / count for value in counter[:3]]
            for key, counter in self.recorder.totals("axis", "operation", "phase").items()
            if key[0] == "tp" and key[2] in "FIW"
        }

    def sent(self, what):
        """(calls, payload bytes) of the messages over pp with this name."""
        totals = self.recorder.totals("axis", "name", "operation")
        return totals.get(("pp", what, "send"), Sums())[:2]


@pytest.mark.parametrize(
    ("layout", "ffn_cut", "num_microbatches"),
    slow_unless(
        lambda layout, ffn_cut, num_microbatches: (
            (ffn_cut, num_microbatches) in (("pair", 1), ("gather", 2), ("reduce", 5))
            and (ffn_cut == "pair" or layout[2] > 1)
        ),
        itertools.product(HERE, PER_BLOCK, [1, 2, 5]),
    ),
    ids=str,
)
def test_tensor_parallel_barriers_follow_the_formula(layout, ffn_cut, num_microbatches):
    step, tp = Step(small_config(layout, num_microbatches, ffn_cut=ffn_cut)), layout[2]
    if tp == 1:
        assert not [key for key in step.recorder.totals("axis") if key == ("tp",)]
        return
    act, wide = step.column * MODEL.d_model, step.column * MODEL.ffn
    apart = (
        step.column
        * tp
        * (  # in equal chunks
            chunk_size(MODEL.d_model, tp) + chunk_size(MODEL.ffn, tp)
        )
    )
    ends = {
        "F": (step.first, step.last, step.last * step.stats),  # embedding and loss
        "I": (step.last, 0, 0),
    }  # head
    expected = {}
    for phase, sums, gathers in zip("FI", *PER_BLOCK[ffn_cut], strict=True):
        end_sums, end_gathers, gathered = ends[phase]
        calls = step.blocks * sums + end_sums
        extra = step.blocks * (wide - act) * (sums == 3)
        expected["all_reduce", phase] = [calls, calls * act + extra]
        expected["all_gather", phase] = [
            step.blocks * gathers + end_gathers,
            step.blocks * apart * (gathers == 2) + gathered,
        ]
    assert {key: found[:2] for key, found in step.per_mb.items()} == {
        key: value for key, value in expected.items() if value[0]
    }
    assert {key[1] for key in step.recorder.totals("axis", "phase") if key[0] == "tp"} <= {*"FI"}


@pytest.mark.parametrize("layout", HERE, ids=str)
def test_pipeline_and_data_parallel_messages_follow_the_formula(layout):
    dp, pp, _ = layout
    step = Step(small_config(layout, 5, schedule="1f1b"))
    worker, totals = step.worker, step.recorder.totals("axis", "name", "operation")
    mb_bytes = step.column * MODEL.d_model
    below, above = worker.grid.group_rank("pp") > 0, worker.grid.group_rank("pp") < pp - 1
    assert step.sent("activations") == (5 * above, 5 * above * mb_bytes)
    assert step.sent("gradients") == (5 * below, 5 * below * mb_bytes)
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
        sums = [
            record
            for record in recorder.records
            if (record.name, record.stage) == ("grads.bucket", stage)
        ]
        assert (len(sums) > len(one.units)) == (layout[0] > 1)
        assert all(record.posted_ns < end for record in sums)
    flight, hidden = flight_ns(recorder, "dp", ("all_reduce",))
    assert 0 < hidden < flight or flight == 0 == layout[0] - 1


@pytest.mark.parametrize("layout", last(HERE), ids=str)
def test_memory_is_predicted(layout):
    """The arrays of a step, weights to messages, are predicted within 5 % by the shapes-only run.

    Beside them the ops keep tile buffers of a fixed size: up to 2 MiB.
    """
    assert_peak(*peaks(small_config(layout, d_model=96, ffn=384, seq_len=64, rows_per_mb=1)))


# --- --sequence-parallel and --tp-matmul ring

of_several = pytest.mark.ranks(2, 3, 4, 8)


def cut_layouts(test):
    return of_several(pytest.mark.parametrize("layout", CUT, ids=str)(test))


@pytest.mark.parametrize("num_microbatches", [1, 5])
@cut_layouts
def test_barriers_of_cut_tokens_follow_the_formula(layout, num_microbatches):
    """Ten collectives a layer and microbatch, each of one whole activation.

    Only this rank's tokens of a product's input are kept. So it is gathered again for the weight
    gradient.
    """
    step, tp = Step(small_config(layout, num_microbatches, model=cut_model())), layout[2]
    # with the padding of the tokens
    act = step.token_bytes * chunk_size(MODEL.seq_len, tp) * tp * MODEL.d_model

    def barriers(count, extra=0):
        payload = count * act + (extra and step.stats)
        return [count + extra, payload, payload * (tp - 1) / tp]

    blocks, first, last = step.blocks, step.first, step.last
    expected = {
        ("all_gather", "F"): barriers(2 * blocks + last, int(last)),
        ("reduce_scatter", "F"): barriers(2 * blocks + first),
        ("all_gather", "I"): barriers(2 * blocks),
        ("reduce_scatter", "I"): barriers(2 * blocks + last),
        ("all_gather", "W"): barriers(2 * blocks + first),
    }
    assert step.per_mb == {key: value for key, value in expected.items() if value[0]}


@pytest.mark.parametrize(
    ("tp_matmul", "norm", "vectors"), [("plain", "layer", 2), ("ring", "rms", 1)]
)
@cut_layouts
def test_one_sum_of_replicated_gradients_a_step(layout, tp_matmul, norm, vectors):
    """The only partial gradients are the vectors of two norms a layer and of the last norm."""
    step = Step(small_config(layout, 5, model=cut_model(tp_matmul, norm=norm)))
    sums = step.recorder.totals("axis", "name")["tp", "grads.tp"][:2]
    assert sums == (1, 8 * vectors * (2 * step.blocks + step.last) * MODEL.d_model)


@cut_layouts
def test_ring_sends_as_many_bytes_in_pieces(layout):
    tp = layout[2]
    plain, ring = (real_step(small_config(layout, 2, model=cut_model(way)))[1] for way in MATMULS)

    def sent(recorder, kinds):
        return sum(
            counter.wire_bytes
            for key, counter in recorder.counters.items()
            if key.axis == "tp" and key.name.startswith("block") and key.operation in kinds
        )

    collectives = ("all_gather", "reduce_scatter")
    assert sent(ring, ("send",)) == sent(plain, collectives) > 0
    assert sent(ring, collectives) == sent(plain, ("send",)) == 0
    messages = Counter(
        (record.name, record.phase)
        for record in ring.records
        if record.operation == "recv" and record.name.startswith("block")
    )
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
    _, pp, tp = layout
    step = Step(small_config(layout, 5, model=cut_model()))
    size = step.token_bytes * chunk_size(MODEL.seq_len, tp) * MODEL.d_model
    above = step.worker.grid.group_rank("pp") < pp - 1
    assert step.sent("activations") == (5 * above, 5 * above * size)


@of_several
@pytest.mark.parametrize(
    ("layout", "tp_matmul"),
    slow_unless(
        lambda layout, tp_matmul: (layout, tp_matmul) == (CUT[-1], "plain"),
        itertools.product(CUT, MATMULS),
    ),
    ids=str,
)
def test_memory_of_cut_tokens_is_predicted_and_smaller(layout, tp_matmul):
    """It holds within 5 % and 2 MiB for tile buffers and Python objects; the stash shrinks."""
    sizes = {"d_model": 96, "ffn": 384, "seq_len": 64 + layout[2] * 2}
    config = small_config(layout, model=cut_model(tp_matmul, **sizes), rows_per_mb=1)
    assert_peak(*peaks(config))
    predicted = predict(config, WORLD.rank)
    whole = predict(replace(config, model=replace(MODEL, **sizes).completed()), WORLD.rank)
    assert predicted.peak_bytes["stash"] < 0.9 * whole.peak_bytes["stash"]
