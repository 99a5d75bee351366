"""Shares of a step without a trace: useful, in communication, rest."""

from collections import Counter

import pytest
from trace_cases import pipeline_trace, with_operations

from bench.claims.measured import time_shares
from mpipar.comm.record import Record, Span
from mpipar.run.console.time_shares import share_facts, share_table
from mpipar.study.trace.analysis import Analysis


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
    """The oldest of several steps may have lost its first spans; saving follows a step."""
    later = [(kind, (start + 30, end + 30), 2) for kind, (start, end), _ in SPANS]
    calls = [*CALLS[1:], *((start + 30, end + 30, 2) for start, end, _ in CALLS), (60, 90, 2)]
    facts = share_facts(Past([*SPANS[1:], *later, ("F", (60, 61), 3)], calls))
    assert facts == pytest.approx({"useful": 8e-3, "communication": 7e-3, "rest": 5e-3})


def test_steps_that_have_lost_records_do_not_count():
    """The ring of the records is full sooner: of step 1 only spans are left, of step 2 a part."""
    spans = [
        (kind, (start + 30 * step, end + 30 * step), step)
        for step in (1, 2, 3)
        for kind, (start, end), _ in SPANS
    ]
    calls = [
        (start + 30 * step, end + 30 * step, step) for step in (2, 3) for start, end, _ in CALLS
    ][1:]
    facts = share_facts(Past(spans, calls))
    assert facts == pytest.approx({"useful": 8e-3, "communication": 7e-3, "rest": 5e-3})


def test_shares_of_a_trace_add_to_one():
    analysis = Analysis(with_operations(pipeline_trace("1f1b", ranks=2, microbatches=2)))
    shares = time_shares(analysis)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["useful"] > 0.3
    kinds = sum(
        (Counter({one.kind: one.length}) for own in analysis.segments for one in own), Counter()
    )
    assert shares["waiting"] == pytest.approx(kinds["wait"] / kinds.total())
