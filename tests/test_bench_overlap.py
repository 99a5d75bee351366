"""bench.interconnect --overlap distinguishes hidden from exposed communication; no MPI."""

from unittest.mock import Mock

import pytest
from bench_rows import BARE, COMM, row

from bench import plot, table
from bench.interconnect import findings
from bench.interconnect.overlap import BESIDE, COMPUTING, Work, completed, percent
from mpipar import ops as ops_module

NUM_TESTS, PRODUCTS = 4, 30
PRODUCT_SECONDS = 1e-6


class Clock:
    """Time passes only where this file says so, so that nothing else on the machine counts."""

    now = 0.0

    def until(self, moment):
        self.now = max(self.now, moment)


class Background:
    """An operation that progresses by itself."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.tests = clock, seconds, 0

    def post(self):
        return [self.clock.now + self.seconds]

    def test(self, end):
        self.tests += 1
        return self.clock.now >= end

    def wait_all(self, ends):
        for end in ends:
            self.clock.until(end)


class InWait(Background):
    """An operation that does not progress until it is waited for."""

    def test(self, end):
        self.tests += 1
        return False

    def wait_all(self, ends):
        self.clock.until(self.clock.now + self.seconds)


@pytest.mark.parametrize(
    ("operation", "length", "overlap", "tests"),
    [
        (Background, 1.0, 100, NUM_TESTS),
        (Background, 0.5, 100, 3),
        (Background, 2.0, 50, NUM_TESTS),
        (InWait, 1.0, 0, NUM_TESTS),
    ],
)
def test_overlap_of_a_planted_operation(operation, length, overlap, tests):
    """length: the operation's, as a multiple of the computing's."""
    clock = Clock()
    work = Work(ops_module.make("cpu", "float32"), NUM_TESTS)
    work.slices = [PRODUCTS] * (NUM_TESTS + 1)
    work.compute = lambda count: clock.until(clock.now + count * PRODUCT_SECONDS)
    work.alone()
    computing = clock.now
    case = operation(clock, length * computing)
    work.beside(case)
    together = clock.now - computing
    assert percent(length * computing, computing, together) == pytest.approx(overlap)
    assert case.tests == tests


def test_computing_is_calibrated_in_nearly_equal_slices(monkeypatch):
    work = Work(ops_module.make("cpu", "float32"), 6)
    disturbed = iter([9.0, 2.0, 5.0, 3.0, 4.0] * 99)  # the quickest is twice as long as undisturbed
    monkeypatch.setattr(work, "seconds", lambda count: count * 1e-6 * next(disturbed))
    work.calibrate(1e-3)
    assert work.slices == [71, 71, 72, 71, 72, 71, 72]
    work.calibrate(0.0)
    assert work.slices == [0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("together", "expected"), [(10.0, 100.0), (15.0, 50.0), (20.0, 0.0), (27.0, 0.0), (9.0, 100.0)]
)
def test_percent_is_that_of_osu(together, expected):
    assert percent(10.0, 10.0, together) == expected


def rows_of_a_ring():
    times = {COMM: 10.0, BARE: 8.0, COMPUTING: 12.0, COMM + BESIDE: 14.0, BARE + BESIDE: 20.0}
    rows = {via: row("ring overlapped K=3", via, median=time) for via, time in times.items()}
    return completed(rows, 3)


def test_rows_beside_computing_say_what_was_overlapped():
    rows = {one["via"]: one for one in rows_of_a_ring()}
    assert {one["num_tests"] for one in rows.values()} == {3}
    together = rows[COMM + BESIDE]
    assert (together["alone_us"], together["computing_us"]) == (10.0, 12.0)
    assert together["overlap_percent"] == pytest.approx(80)
    assert rows[BARE + BESIDE]["overlap_percent"] == 0
    assert "overlap_percent" not in rows[COMM]
    assert rows[COMM]["busbw_GBps"] > 0 == together["busbw_GBps"]
    assert rows[COMPUTING]["algbw_GBps"] == rows[COMPUTING]["bytes_on_wire_per_rank"] == 0
    plain = row()
    assert completed({COMM: plain}, None) == [plain]


def test_way_that_was_refused_has_no_overlap():
    rows = {via: row("ring", via) for via in (COMPUTING, COMM + BESIDE)}
    assert all("overlap_percent" not in one for one in completed(rows, 0))


def test_table_has_the_columns_of_overlap_and_findings_leave_its_rows_out():
    rows = rows_of_a_ring()
    names, *lines = table.text(rows).splitlines()
    assert names.split()[-3:] == ["alone_us", "computing_us", "overlap_percent"]
    (line,) = [line for line in lines if COMM + BESIDE in line]
    assert line.split()[-3:] == ["10.00", "12.00", "80.00"]
    slow = [
        one
        | {"size_bytes": 2 * one["size_bytes"]}
        | dict.fromkeys(("low_us", "median_us", "high_us"), 100.0)
        for one in rows
    ]
    assert findings.guidelines(rows + slow) == []


def test_picture_of_rates_has_no_point_for_times_that_computing_is_in():
    axes = Mock()
    plot.draw_bandwidth(axes, rows_of_a_ring())
    labels = [call.kwargs["label"] for call in axes.plot.call_args_list]
    assert labels == [f"{via}, {rate}" for via in (COMM, BARE) for rate in ("algbw", "busbw")]


def test_the_index_page_shows_every_picture_once_and_no_markup_of_a_file():
    page = plot.index_page("<b>.jsonl", [("a-time", "ring & co"), ("a-late", "ring & co")])
    assert page.count("<section>") == 1
    assert page.count('src="a-time.svg"') == page.count('src="a-late.svg"') == 1
    assert "<b>" not in page
    assert "ring &amp; co: late" in page
