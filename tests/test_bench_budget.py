"""The budget of a command chooses sizes and rounds; a planted clock stands in for the time."""

from types import SimpleNamespace

import pytest

from bench.interconnect import budget
from bench.interconnect.budget import Budget
from bench.interconnect.plans import world_sections

SIZES = tuple(8 << k for k in range(10))


class Alone:
    """A world of one rank."""

    def Bcast(self, x):
        """Leave x as it is: no other rank exists."""


class Clock:
    """Stands in for `time`: it moves only when something is measured."""

    now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(budget, "time", clock)
    return clock


def measured(clock, seconds, cost):
    """The sizes that a budget chooses, where measuring a size takes cost(size) seconds."""
    found = []
    for size in Budget(Alone(), seconds).sizes(SIZES):
        found.append(size)
        clock.now += cost(size)
    return found


def test_every_size_is_measured_when_there_is_time(clock):
    found = measured(clock, 60, lambda size: 0.1)
    assert sorted(found) == list(SIZES)
    assert found == [16, 256, 4096, 64, 1024, 8, 32, 128, 512, 2048]


def test_large_sizes_of_a_slow_cable_are_left_out(clock):
    """4 KiB take 1 s: what is measured stays inside the budget, and small sizes are complete."""
    found = measured(clock, 3, lambda size: 0.01 + size / 4096)
    assert 1 < clock.now - 1000 <= 3
    assert sorted(found) == list(SIZES[: SIZES.index(max(found)) + 1])


def test_three_sizes_are_measured_however_long_they_take(clock):
    assert measured(clock, 0.1, lambda size: 5) == [16, 256, 4096]


def test_one_size_is_enough_for_what_has_no_more(clock):
    assert list(Budget(Alone(), 1).sizes((0,))) == [0]


@pytest.mark.parametrize(("seconds", "rounds"), [(0.5, 1), (3.9, 3), (100, 5)])
def test_rounds_that_would_not_end_in_time_are_not_begun(clock, seconds, rounds):
    found = []
    for number in Budget(Alone(), seconds).rounds(5):
        found.append(number)
        clock.now += 1.3
    assert found == list(range(rounds))


def test_what_one_thing_leaves_goes_to_the_others(clock):
    parts = {}
    for thing, own in Budget(Alone(), 12).shares("abc"):
        parts[thing] = own.left()
        clock.now += 1 if thing == "a" else parts[thing]
    assert parts == {"a": 4, "b": 5.5, "c": 5.5}


class SlowLink:
    """Stands in for a Bench: an iteration takes a latency and its bytes over a rate."""

    world = SimpleNamespace(rank=0, Bcast=lambda x: None)

    def __init__(self, clock, latency, rate, messages=64):
        self.clock, self.latency, self.rate, self.messages = clock, latency, rate, messages
        self.latest, self.end, self.refused = [], None, []

    def run(self, sizes):
        for size in sizes:
            iteration = self.messages * (self.latency + size / self.rate)
            self.clock.now += max(0.05, budget.LEAST_ITERATIONS * iteration)
            ended = self.clock.now > self.end
            self.latest = (
                []
                if ended and iteration > 1
                else [
                    {
                        "via": "mpi4py",
                        "median_us": iteration * 1e6 / self.messages,
                        "per_sample": self.messages,
                    }
                ]
            )


@pytest.mark.parametrize(
    ("latency", "rate", "measured"),
    [(1e-6, 1e10, 64), (1e-4, 1e7, 48), (1e-4, 1e6, 32), (1e-4, 1e5, 17), (2e-2, 1e9, 9)],
)
def test_a_quick_run_ends_in_time_on_any_link(clock, capsys, latency, rate, measured):
    """16 sections of four sizes; what does not fit is named, and all the rest is measured."""
    sections = world_sections(["ring"] * 16, 2, budget.QUICK_SIZES)
    sections = [one._replace(title=f"ring {number}") for number, one in enumerate(sections)]
    bench = SlowLink(clock, latency, rate)
    limited = budget.Quick(bench, sections, 60.0)
    for _, sizes in limited.turns():
        bench.run(sizes)
    limited.conclude()
    assert clock.now - 1000 <= 60
    assert 64 - sum(len(sizes) for _, sizes in limited.waiting) >= measured
    said = capsys.readouterr().err
    assert "quick run: 16 parts, ends within 60 s" in said
    assert ("not measured, for lack of time: ring" in said) == bool(limited.waiting)


def test_sizes_that_wait_for_time_come_later(clock):
    """The first of two sections gets half of the time, and what the second leaves of its half."""
    sections = world_sections(["ring", "barrier"], 2, (64, 1 << 20))
    bench = SlowLink(clock, 0.0, 3e7, messages=1)
    seconds = 2.5 * budget.LEAST_ITERATIONS * (1 << 20) / 3e7
    limited, order = budget.Quick(bench, sections, seconds), []
    for section, sizes in limited.turns():
        order.append(section.title)
        bench.run(sizes)
    assert order == ["ring", "barrier", "ring"]
    assert limited.waiting == []
