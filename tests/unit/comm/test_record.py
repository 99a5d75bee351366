"""A barrier's place in the source: the line of the layer, and the line of the cut."""

import sys
from itertools import pairwise

import numpy as np
import pytest
from config_helpers import changed
from helpers import REPOSITORY

from bench.matmul import flight_ns
from mpipar.comm.grid import Grid
from mpipar.comm.groups import Comms
from mpipar.comm.record import Span
from mpipar.comm.recorder import Recorder
from mpipar.comm.transport import Done
from mpipar.config.resolve import resolve
from mpipar.layers.context import Context
from mpipar.layers.flat import FlatParams
from mpipar.layers.parallel.row import RowLinear
from mpipar.layers.stash import Stash
from mpipar.ops import make
from mpipar.study.explain.predict import predict

LAYERS = {
    "attn.qkv": "self.qkv.",
    "attn.proj": "self.proj.",
    "ffn.up": "self.up.",
    "ffn.down": "self.down.",
}


def line_of(place):
    path, line = place.split(":")
    return (REPOSITORY / path).read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize(
    "change",
    [{}, {"sequence_parallel": True}, {"sequence_parallel": True, "tp_matmul": "ring"}],
    ids=str,
)
def test_every_barrier_of_a_product_is_on_its_layer_s_line(change):
    config, _ = resolve(changed(tp=2, pp=1, dp=1, **change), 2)
    found = {}
    for record in predict(config, 1).recorder.records:
        if not record.name.startswith("block"):
            continue
        layer = record.name.split(".", 1)[1]
        assert LAYERS[layer] in line_of(record.site), record
        assert record.cut.startswith("mpipar/layers/parallel/"), record
        assert "comm." in line_of(record.cut), record
        found.setdefault(layer, set()).add(record.site)
    assert {"attn.proj", "ffn.down"} <= found.keys()
    for one, other in pairwise(found):
        assert not found[one] & found[other]


def test_who_calls_the_group_itself_has_no_cut():
    config, _ = resolve(changed(tp=1, pp=2, dp=2), 4)
    places = {
        record.name: (record.site, record.cut) for record in predict(config, 3).recorder.records
    }
    assert places["activations"][0].startswith("mpipar/pipeline/engine.py:")
    assert places["grads.bucket"][0].startswith("mpipar/train/gradsync.py:")
    assert {cut for _, cut in places.values()} == {""}


def test_one_barrier_that_is_crossed_from_two_lines_shows_each():
    ops, recorder = make("shapes", "float64"), Recorder()
    comms = Comms.solo(ops, Grid(0, {"tp": 2}), recorder)
    layer = RowLinear(Context(ops, comms), "y", (4,), (5,), std=0.0)
    FlatParams(ops, layer.params)
    x = ops.empty((1, 3, 2))

    def cross():
        return layer.forward(x, Stash())

    for _ in range(2):
        cross()
        layer.forward(x, Stash())
    first, second, *rest = [record.site for record in recorder.records]
    assert first != second
    assert rest == [first, second]
    assert "test_record.py:" in first
    assert len({record.cut for record in recorder.records}) == 1


def test_a_send_that_blocks_is_known_before_it_is_done():
    comm, seen = Comms.solo(make("cpu", "float32"), Grid(0, {"pp": 2}))["pp"], []

    def blocked(x, peer, tag):
        seen.append(comm.recorder.records[-1])
        return Done()

    comm.transport.isend = blocked
    for step in (1, 2):
        comm.recorder.step = step
        comm.send(np.zeros(3, np.float32), 1, 7, "bench")
    for step, (during, after) in enumerate(zip(seen, comm.recorder.records, strict=True), 1):
        assert (during.done_ns, during.step, during.seq) == (0, step, step)
        assert after.done_ns >= after.posted_ns > 0
        assert during == after._replace(done_ns=0)
        assert after[3:5] + after[8:11] == ("send", "bench", 7, 12, 12)
        assert "comm.send(np.zeros(3" in line_of(after.site)
    (counter,) = comm.recorder.counters.values()
    assert counter.calls == 2
    comm.recorder.reset_counters()
    assert comm.recorder.counters == {}
    assert len(comm.recorder.records) == 2


def recorded(records, spans):
    """A recorder that holds records (posted, waited, done) of one axis, and spans (kind, ends)."""
    recorder = Recorder()
    tally = recorder.tally("dp", 2, "", "all_reduce", "grads.bucket", sys._getframe())
    recorder.entries.extend([*times, 1, -1, -1, 8, 8, 1, 0, 0, tally] for times in records)
    recorder._spans.extend((*one, 1, 0, 0) for one in spans)
    return recorder


@pytest.mark.parametrize(("records", "spans", "flight", "hidden"), [
    # Three buckets start after the last pass. The wait for one is no computing beside the others.
    ([(10, 12, 40), (11, 40, 60), (12, 60, 70)], [("B", 0, 9)], 60, 0),
    # A pass of another stage covers 20 of the flight, of which a barrier inside it blocks 5.
    ([(10, 40, 50), (22, 22, 27)], [("B", 15, 35)], 40, 15),
    # A test found it done: it flew at most until then. "pipeline" is no computing.
    ([(10, 30, 30)], [("F", 20, 30), ("pipeline", 0, 99)], 20, 10),
    ([(10, 10, 90)], [("F", 0, 99)], 0, 0),  # blocking
])  # fmt: skip
def test_only_computing_hides_a_flight(records, spans, flight, hidden):
    recorder = recorded(records, spans)
    assert flight_ns(recorder, "dp", ("all_reduce",)) == (flight, hidden)
    assert flight_ns(recorder, "tp", ("all_reduce",)) == (0, 0)


def test_a_place_lasts_as_long_as_its_block():
    recorder = Recorder()

    def place():
        return recorder.phase, recorder.stage, recorder.mb

    with recorder.at("I", 2, 5):
        assert place() == ("I", 2, 5)
        with recorder.at("W"):
            assert place() == ("W", 2, 5)
        assert place() == ("I", 2, 5)
    assert place() == ("setup", -1, -1)
    with pytest.raises(ValueError, match="an error"), recorder.at("F", 1, 0), recorder.at("sync"):
        raise ValueError("an error")
    assert place() == ("sync", 1, 0), "the report of the error says where it happened"


def test_a_line_has_one_tally_whatever_the_sizes():
    """2,000 sizes, phases and types that are equal but not the same objects, and one other line."""
    ops, recorder = make("shapes", "float32"), Recorder()
    comm, sizes = Comms.solo(ops, Grid(0, {"tp": 3}), recorder)["tp"], range(1, 2001)
    recorder.resize(None)
    for size in sizes:
        with recorder.at("".join("FW"[0])):
            comm.all_reduce(ops.zeros(size, np.dtype("float32", copy=True)), "y" * (size > 0))
    with recorder.at("F"):
        comm.all_reduce(ops.zeros(7), "y")
    first, second = recorder.tallies.values()
    assert (first.calls, second.calls) == (2000, 1)
    payloads = [record.payload_bytes for record in recorder.records]
    assert payloads == [*(4 * size for size in sizes), 28]
    assert [record.wire_bytes for record in recorder.records] == [
        4 * payload // 3 for payload in payloads
    ]
    ((key, sums),) = recorder.counters.items()
    assert (key.name, key.operation, key.phase, key.dtype) == ("y", "all_reduce", "F", "float32")
    assert sums[:3] == (2001, sum(payloads), sum(4 * payload // 3 for payload in payloads))
    recorder.clear()
    comm.all_reduce(ops.zeros(5), "y")
    assert [sums[:3] for sums in recorder.counters.values()] == [(1, 20, 26)]


def test_other_phases_and_types_of_one_line_are_counted_apart():
    ops, recorder = make("shapes", "float32"), Recorder()
    comm = Comms.solo(ops, Grid(0, {"tp": 2}), recorder)["tp"]
    for phase in ("F", "I", "F"):
        for dtype in ("float32", "float64"):
            with recorder.at(phase):
                comm.all_gather(ops.zeros(4, np.dtype(dtype)), "y")
    assert {(key.phase, key.dtype): sums[:3] for key, sums in recorder.counters.items()} == {
        ("F", "float32"): (2, 64, 32),
        ("F", "float64"): (2, 128, 64),
        ("I", "float32"): (1, 32, 16),
        ("I", "float64"): (1, 64, 32),
    }


def test_messages_and_collectives_are_numbered_apart():
    """Ranks of a pipeline send unlike many messages; their collectives have the same numbers."""
    ops, recorder = make("shapes", "float32"), Recorder()
    comm, x = Comms.solo(ops, Grid(0, {"pp": 2}), recorder)["pp"], ops.zeros(3)
    comm.barrier("first")
    comm.isend(x, 1, 7, "message")
    comm.recv(x, 1, 7, "message")
    comm.barrier("second")
    assert [(record.operation, record.seq) for record in recorder.records] == [
        ("barrier", 1),
        ("send", 1),
        ("recv", 2),
        ("barrier", 2),
    ]


def test_spans_between_marks_come_when_a_device_has_told_their_times():
    recorder, asked = Recorder(), []
    recorder.step = 3
    recorder.span("F", "begun", 1, 2, "ended")
    recorder.step = 4
    recorder.span("data", 0)
    assert [span.kind for span in recorder.spans] == ["data"]

    def nanoseconds(marks):
        asked.append(marks)
        return [{"begun": 5, "ended": 9}[mark] for mark in marks]

    for _ in range(2):  # nothing is left for the second
        recorder.settle(nanoseconds)
    assert asked == [["begun", "ended"]]
    assert recorder.spans[1:] == [Span("F", 5, 9, 3, 1, 2)]
    assert recorder.busy_ns["F"] == 4
