"""Wait states, efficiencies and shares of traces made by hand, where every number is known."""

import re
import subprocess
import sys
from collections import Counter

import hypothesis
import numpy as np
import pytest
from helpers import REPOSITORY, find_launcher, run_command
from hypothesis import strategies as st
from program import LIMIT, TEXT, environment
from trace_cases import MS, blocking, pipeline_trace, record, span, trace, with_operations
from trace_cases import waits_and_segments as analyse

from bench.claims import time_shares
from mpipar.comm.record import Record, Span
from mpipar.run.trace import trace_file
from mpipar.run.trace.clock import CommonClock, Sample, best_sample
from mpipar.study.measured_step import share_facts, share_table
from mpipar.study.trace import pop, segments, waits
from mpipar.study.trace.analysis import Analysis
from mpipar.study.trace.causes import Causes
from mpipar.study.trace.waits import totals


def states(found):
    """(wait, transfer, rank waited for), times in ms, by rank and call."""
    return [
        [(call.wait_ns / MS, call.transfer_ns / MS, call.late) for call in own]
        for own in found.calls
    ]


def test_collective_wait_is_last_arrival_minus_own_arrival():
    case = trace([[blocking("all_reduce", "a", "tp", 10, 34)],
                  [blocking("all_reduce", "a", "tp", 30, 33)],
                  [blocking("all_reduce", "a", "tp", 25, 35)]])  # fmt: skip
    found, _ = analyse(case)
    assert states(found) == [[(20, 4, 1)], [(0, 3, -1)], [(5, 5, 1)]]
    (event,) = found.events
    assert (event.last, event.arrival_ns, event.ranks) == (1, 30 * MS, (0, 1, 2))


def test_a_wait_ends_with_the_call_at_the_latest():
    """Clocks are not perfect: an arrival after the end of a call does not make its wait longer."""
    case = trace([[blocking("all_reduce", "a", "tp", 10, 20)],
                  [blocking("all_reduce", "a", "tp", 21, 30)]])  # fmt: skip
    assert states(waits.find(case)) == [[(10, 0, 1)], [(0, 9, -1)]]


def test_non_blocking_collective_waits_only_where_it_blocks():
    """Posted at 10, waited for from 40 on, when the last one (posted at 50) is still missing."""
    case = trace([[record("all_reduce", "grads.bucket", "tp", 10, 40, 60)],
                  [record("all_reduce", "grads.bucket", "tp", 50, 55, 62)]])  # fmt: skip
    assert states(waits.find(case)) == [[(10, 10, 1)], [(0, 7, -1)]]
    case = trace([[record("all_reduce", "grads.bucket", "tp", 10, 60, 60)],
                  [record("all_reduce", "grads.bucket", "tp", 50, 55, 62)]])  # fmt: skip
    assert states(waits.find(case))[0] == [(0, 0, -1)]  # a test found it done


def test_only_the_root_of_a_broadcast_is_waited_for():
    root = {"peer": 1}
    case = trace([[blocking("broadcast", "text", "world", 10, 41, **root)],
                  [blocking("broadcast", "text", "world", 30, 31, **root)],
                  [blocking("broadcast", "text", "world", 40, 42, **root)]])  # fmt: skip
    found, _ = analyse(case)
    assert states(found) == [[(20, 11, 1)], [(0, 1, -1)], [(0, 2, -1)]]
    assert found.events[0].last == 1


def message(send, receive):
    """A trace with one message; times (posted, waited, done) in ms."""
    return trace([[record("send", "activations", "pp", *send, peer=1, tag=7)],
                  [record("recv", "activations", "pp", *receive, peer=0, tag=7)]])  # fmt: skip


@pytest.mark.parametrize(("send", "receive", "sender", "receiver", "last"), [
    # late sender: the receiver is blocked from 10 on, the message is posted at 30
    ((30, 40, 40), (5, 10, 34), (0, 0, -1), (20, 4, 0), 0),
    # late receiver, rendezvous: the sender is blocked from 20 on, the receive is posted at 50
    ((15, 20, 56), (50, 50, 55), (30, 6, 1), (0, 5, -1), 1),
    # buffered: the send had completed before the receive was posted: nobody was late
    ((15, 20, 22), (50, 50, 51), (0, 2, -1), (0, 1, -1), -1),
    # both in time
    ((15, 20, 20), (10, 30, 30), (0, 0, -1), (0, 0, -1), -1),
])  # fmt: skip
def test_late_sender_and_late_receiver(send, receive, sender, receiver, last):
    found, _ = analyse(message(send, receive))
    assert states(found) == [[sender], [receiver]]
    assert found.events[0].last == last


def test_messages_match_by_tag_sender_receiver_and_order():
    both = {"tag": 1, "peer": 1}, {"tag": 1, "peer": 0}
    case = trace([[record("send", "x", "pp", 10, 90, 90, **both[0]),
                   record("recv", "x", "pp", 11, 12, 50, **both[0]),
                   record("send", "x", "pp", 60, 91, 91, **both[0])],
                  [record("recv", "x", "pp", 5, 5, 15, **both[1]),
                   record("send", "x", "pp", 40, 92, 92, **both[1]),
                   record("recv", "x", "pp", 41, 41, 66, **both[1])]])  # fmt: skip
    found, _ = analyse(case)
    assert not found.unmatched
    assert states(found)[1] == [(5, 5, 0), (0, 0, -1), (19, 6, 0)]
    assert states(found)[0][1] == (28, 10, 1)


def test_what_has_no_partner_is_said_and_counts_as_transfer():
    case = trace([[blocking("all_reduce", "a", "tp", 10, 20)], []])
    found, pieces = analyse(case)
    assert [call.record.name for call in found.unmatched] == ["a"]
    assert segments.by_kind(pieces[0])["transfer"] == 10 * MS
    case = trace([[blocking("all_reduce", "a", "tp", 10, 20)],
                  [blocking("all_gather", "b", "tp", 10, 20)]])  # fmt: skip
    assert len(waits.find(case).unmatched) == 2


def test_segments_cover_all_time_and_take_waiting_out_of_spans():
    case = trace([[blocking("all_reduce", "a", "tp", 20, 50)],
                  [blocking("all_reduce", "a", "tp", 45, 49)]],
                 [[span("F", 10, 60), span("opt", 90, 95)], [span("F", 40, 55)]])  # fmt: skip
    _, pieces = analyse(case)
    assert segments.by_kind(pieces[0]) == {
        "other": 45 * MS,
        "F": 20 * MS,
        "wait": 25 * MS,
        "transfer": 5 * MS,
        "opt": 5 * MS,
    }
    assert all(piece.span.kind == "F" for piece in pieces[0] if piece.kind in ("wait", "transfer"))
    assert segments.by_step(pieces[0], [(1, 0, 30 * MS)])[0] == {
        "other": 10 * MS,
        "F": 10 * MS,
        "wait": 10 * MS,
    }


def chain():
    """Rank 2 computes until 60; rank 1 waits for it, then computes 10; rank 0 waits for rank 1."""
    groups = [{"tp": (0, 1), "dp": (0,)}, {"tp": (0, 1), "dp": (1, 2)}, {"tp": (2,), "dp": (1, 2)}]
    return trace(
        [[blocking("all_reduce", "b", "tp", 0, 72)],
         [blocking("all_reduce", "a", "dp", 5, 61), blocking("all_reduce", "b", "tp", 71, 73)],
         [blocking("all_reduce", "a", "dp", 60, 62)]],
        [[], [span("F", 61, 71, stage=1)], [span("B", 0, 60, stage=2)]], groups=groups)  # fmt: skip


def test_a_wait_that_was_handed_on_is_charged_to_where_the_time_went():
    found, pieces = analyse(chain())
    costs = Causes(chain(), found, pieces).costs()
    readable = {cause.text(): cost.wait_ns / MS for cause, cost in costs.items()}
    assert readable == {
        "rank 2: backward of stage 2": 55 + 55,  # rank 1 at a, and rank 0 while rank 1 waited
        "rank 1: forward of stage 1": 10,
        "rank 1: between spans (Python, posting, logging)": 5,
        "transfer of a (dp) between ranks 1-2": 1,
    }
    worst = next(iter(costs))
    assert worst.ranks == (2,)
    assert (costs[worst].rank, costs[worst].barrier) == (0, ("tp", "b"))


def test_totals_add_up_and_say_who_was_last():
    found, _ = analyse(chain())
    by_axis = totals(found, lambda call: call.record.axis)
    assert by_axis["tp"].wait_ns == 71 * MS
    assert by_axis["tp"].last == {1: 1}
    assert (by_axis["dp"].wait_ns, by_axis["dp"].calls, by_axis["dp"].payload) == (55 * MS, 2, 2048)
    by_rank = totals(found, lambda call: call.rank)
    assert [by_rank[rank].wait_ns / MS for rank in (0, 1, 2)] == [71, 55, 0]


def test_efficiencies_by_hand():
    """Two ranks run 100 ms. Useful: rank 0 100-32, rank 1 100-2.

    On an ideal network the 2 ms of transfer are gone, so both ranks end 2 ms earlier.
    """
    case = trace([[blocking("all_reduce", "a", "tp", 10, 42)],
                  [blocking("all_reduce", "a", "tp", 40, 42)]])  # fmt: skip
    found, pieces = analyse(case)
    shares = [value for _, value, _ in pop.efficiencies(case, found, pieces)]
    assert shares == pytest.approx([0.83, 83 / 98, 0.98, 1.0, 0.98])


def test_serialization_is_what_an_ideal_network_does_not_cure():
    """Rank 1 computes only after rank 0's message, and rank 0 only before: half is lost."""
    case = trace([[record("send", "x", "pp", 50, 50, 50, peer=1)],
                  [record("recv", "x", "pp", 0, 0, 50, peer=0)]])  # fmt: skip
    case.ranks[0].steps = [(1, 0, 50 * MS)]
    found, pieces = analyse(case)
    *_, serialization, transfer = [one[1] for one in pop.efficiencies(case, found, pieces)]
    assert (serialization, transfer) == pytest.approx((0.5, 1.0))


@st.composite
def programs(draw):
    """Ranks that go through the same barriers with random work before each, on a real network."""
    ranks, barriers = draw(st.integers(2, 4)), draw(st.integers(1, 5))
    clock, records = [0] * ranks, [[] for _ in range(ranks)]
    for _ in range(barriers):
        work = [draw(st.integers(0, 9)) for _ in range(ranks)]
        arrivals = [now + one for now, one in zip(clock, work, strict=True)]
        for rank in range(ranks):
            clock[rank] = max(arrivals) + draw(st.integers(0, 4))
            records[rank].append(blocking("all_reduce", "a", "tp", arrivals[rank], clock[rank]))
    return trace(records, end=max(clock) + 1)


@hypothesis.given(programs())
def test_what_must_hold_of_any_trace(case):
    found, pieces = analyse(case)
    assert not found.unmatched
    for own in found.calls:
        for call in own:
            assert call.wait_ns >= 0
            assert call.transfer_ns >= 0
            assert (call.late == -1) == (call.wait_ns == 0)
            assert call.wait_ns == max(0, call.event.arrival_ns - call.record.posted_ns), (
                "last arrival - own arrival"
            )
    waited = sum(call.wait_ns for own in found.calls for call in own)
    charged = sum(cost.wait_ns for cost in Causes(case, found, pieces).costs().values())
    assert charged == waited
    assert all(value <= 1 for _, value, _ in pop.efficiencies(case, found, pieces))


# --- shares of a step without a trace: useful, in communication, rest


class Past:
    """Stands in for a recorder: spans and records, here in milliseconds."""

    def __init__(self, spans, calls):
        self.spans = [
            Span(kind, *(int(t * 1e6) for t in times), step, 0, 0) for kind, times, step in spans
        ]
        self.records = [
            Record(
                int(waited * 1e6),
                int(waited * 1e6),
                int(done * 1e6),
                "all_reduce",
                "x",
                "tp",
                1,
                -1,
                -1,
                8,
                8,
                "float32",
                step,
                0,
                0,
                "F",
                "a.py:1",
                "",
            )
            for waited, done, step in calls
        ]


# Of a step: a pass of 10 ms with 4 ms of an all-reduce inside, a message of 3 ms behind it, an
# optimizer of 2 ms, and 5 ms of nothing in between.
SPANS = [("F", (0, 10), 1), ("opt", (18, 20), 1), ("pipeline", (0, 13), 1)]
CALLS = [(2, 6, 1), (10, 13, 1)]


def test_communication_inside_a_pass_is_not_useful():
    facts = share_facts(Past(SPANS, CALLS))
    assert facts == pytest.approx({"useful": 8e-3, "communication": 7e-3, "rest": 5e-3})
    row = share_table([facts], ["pp0"]).splitlines()[1]
    assert row.split() == ["0", "pp0", "40.0%", "35.0%", "25.0%"]


def test_only_whole_steps_count():
    """The ring of the records is full sooner, so of step 1 only spans are left, of step 2 a part.

    Saving follows a step, and step 4 is not over.
    """
    spans = [
        (kind, (start + 30 * step, end + 30 * step), step)
        for step in (1, 2, 3)
        for kind, (start, end), _ in SPANS
    ]
    calls = [
        (start + 30 * step, end + 30 * step, step) for step in (2, 3) for start, end, _ in CALLS
    ]
    past = Past([*spans[1:], ("F", (120, 121), 4)], [*calls[1:], (112, 119, 3)])
    found = share_facts(past)
    assert found == pytest.approx({"useful": 8e-3, "communication": 7e-3, "rest": 5e-3})


def test_shares_of_a_trace_add_to_one():
    analysis = Analysis(with_operations(pipeline_trace("1f1b", ranks=2, microbatches=2)))
    shares = time_shares(analysis)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["useful"] > 0.3
    kinds = sum(
        (Counter({one.kind: one.length}) for own in analysis.segments for one in own), Counter()
    )
    assert shares["waiting"] == pytest.approx(kinds["wait"] / kinds.total())


# --- the common clock: planted offset and drift come back within the error bar that is printed


SECOND = 10**9


class Network:
    """Two clocks and a message between them: rank 0's time is the true one."""

    def __init__(self, offset_ns, drift, random):
        self.offset_ns, self.drift, self.random = offset_ns, drift, random
        self.now = 5 * SECOND

    def other(self, true_ns):
        """What the other clock shows at a true time."""
        return round(true_ns + self.offset_ns + self.drift * true_ns)

    def trip(self):
        """One ping-pong: each way takes its own time, at least 2 us."""
        sent = self.now
        at = sent + self.random.randint(2_000, 50_000)
        self.now = at + self.random.randint(2_000, 50_000)
        return sent, self.other(at), self.now


@hypothesis.given(
    offset_ns=st.integers(-(10**15), 10**15),
    drift=st.floats(-1e-4, 1e-4),
    random=st.randoms(use_true_random=False),
)
def test_planted_offset_and_drift_are_found_within_the_error_bar(offset_ns, drift, random):
    network = Network(offset_ns, drift, random)
    trips = [network.trip() for _ in range(20)]
    before = best_sample(trips)
    assert before.error_ns == min(came - sent for sent, _, came in trips) / 2, "the shortest counts"
    first = network.now
    network.now += 30 * SECOND
    last = network.now
    after = best_sample([network.trip() for _ in range(20)])
    clock = CommonClock((0, 1), {1: before}, {1: after})
    error = clock.error_ns(1)
    assert error >= 2_000  # half of the shortest possible round trip
    for true_ns in (first, (first + last) // 2, last):
        found = clock.common_ns(1, network.other(true_ns))
        assert abs(found - true_ns) <= error + 2, "more off than the error bar says"
        assert clock.common_ns(0, true_ns) == true_ns
    assert clock.drift(1) == pytest.approx(drift, abs=2 * error / (30 * SECOND))
    times = np.array([network.other(first), network.other(last)])
    assert clock.common_ns(1, times).tolist() == [clock.common_ns(1, int(one)) for one in times]


def test_without_the_second_measurement_a_drift_is_seen_as_error():
    """The test above can fail: with the drift ignored, times are off by more than the bar."""
    clock = CommonClock((0, 1), {1: Sample(0, 0.0, 5_000)}, {})
    assert "drift unknown" in clock.describe()
    assert abs(clock.common_ns(1, 30 * SECOND + 30 * SECOND // 10**4) - 30 * SECOND) > 5_000


def test_the_error_bar_between_two_ranks_adds_both():
    clock = CommonClock((0, 1, 2), {1: Sample(0, 0.0, 3.0), 2: Sample(0, 0.0, 4.0)}, {})
    assert clock.largest_error_ns() == 7.0
    assert CommonClock((0, 0, 0), {}, {}).largest_error_ns() == 0


def can_make_time_namespaces():
    command = ["unshare", "-r", "--time", "--monotonic", "1000", "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except OSError:
        return False


needs_namespaces = pytest.mark.skipif(
    find_launcher() is None or not can_make_time_namespaces(),
    reason="needs mpiexec and unshare --time (root or user namespaces)")  # fmt: skip


@needs_namespaces
def test_ranks_in_their_own_time_namespaces_share_one_time(tmp_path):
    """Rank 1's clock is 5000 s ahead: in the trace, no message arrives before it was sent."""
    train = [*(sys.executable, "-m", "mpipar", "train", "--layout", "pp=2", "--steps", "4"),
             *("--layers", "2", "--d-model", "16", "--heads", "2", "--seq-len", "8"),
             *("--batch-size", "8", "--trace", "2:4", "--sample-tokens", "0"),
             *TEXT, *("--out", str(tmp_path / "run"))]  # fmt: skip
    apart = ["unshare", "-r", "--time", "--monotonic", "5000"]
    command = [find_launcher(), "-n", "1", *train, ":", "-n", "1", *apart, *train]
    # MPICH copies big messages between processes directly, which user namespaces forbid.
    env = environment({"MPIR_CVAR_CH4_CMA_ENABLE": "0"})
    result = run_command(command, LIMIT, env, cwd=REPOSITORY)
    assert result.returncode == 0, result.tail()
    trace = trace_file.read(tmp_path / "run")
    assert trace.clock.owners == (0, 1)
    ahead = trace.clock.before[1].offset_ns - 5000 * SECOND
    error = trace.clock.largest_error_ns()
    assert abs(ahead) <= error, "the planted 5000 s came back"
    assert trace.clock.before[1].error_ns > 0
    assert re.fullmatch(
        r"2 clocks: offsets by ping-pong .* good to \+-[\d.]+ us", trace.clock.describe()
    )
    found = waits.find(trace)
    messages = [event for event in found.events if event.operation == "message"]
    assert len(messages) == 3 * 4 * 2  # steps x microbatches x directions
    for event in messages:
        send, receive = (call.record for call in event.calls)
        assert receive.done_ns >= send.posted_ns - error
