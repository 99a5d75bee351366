"""The simulator: every span against a second computation, latency terms, bytes; and the choice."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import compute, counts

from mpipar.errors import UsageError
from mpipar.pipeline.instructions import (
    ScheduleError,
    is_compute,
    lower,
    neighbours,
    on_wire,
    parts,
)
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.study.schedules.costs import Costs
from mpipar.study.schedules.forms import closed_form
from mpipar.study.schedules.simulate import simulate


def longest_paths(schedule, costs):
    """End of every pass: repeated relaxation over all dependencies, until nothing changes.

    A message leaves when its pass has ended and the one before it has left the link.
    """
    f, i, w = (costs.by_stage(name, schedule.num_stages) for name in "fiw")
    duration = {"F": f, "I": i, "W": w, "B": [a + b for a, b in zip(i, w, strict=True)]}
    ends, arrivals, previous = {}, {}, None
    while ends != previous:
        previous = dict(ends)
        for pp_rank in range(schedule.pp_size):
            clock, free = 0, {}
            for instr in compute(schedule, pp_rank):
                received, sent = neighbours(schedule, instr)
                start = max([clock, *(arrivals.get(message, 0) for message in received)])
                total = sum(duration[kind][stage] for kind, stage, _ in parts(instr))
                clock = start + total * (costs.overlap if len(parts(instr)) == 2 else 1)
                ends |= dict.fromkeys(parts(instr), clock)
                for message in (message for message in sent if message.is_remote):
                    leaves = max(clock, free.get(message.target, 0))
                    free[message.target] = leaves + costs.time_on_link()
                    arrivals[message] = leaves + costs.hop()
    return ends


@given(counts(max_p=4, max_m=6), st.data())
@settings(max_examples=120, deadline=None)
def test_every_span_is_a_longest_path(case, data):
    """Random costs by stage, latency, bandwidth and overlap; exact arithmetic."""
    name, p, m, chunks = case
    schedule = make_schedule(name, p, m, chunks)
    cost = st.fractions(Fraction(1, 8), 8, max_denominator=8)
    by_stage = st.tuples(*[cost] * schedule.num_stages)
    costs = Costs(
        data.draw(by_stage),
        data.draw(by_stage),
        data.draw(by_stage),
        overlap=data.draw(st.fractions(Fraction(1, 2), 1)),
        latency=data.draw(st.fractions(0, 2, max_denominator=8)),
        bandwidth=data.draw(st.none() | st.integers(1, 9)),
        message_bytes=Fraction(5),
    )
    timeline = simulate(schedule, costs)
    ends = longest_paths(schedule, costs)
    for spans, program in zip(timeline.spans, schedule.programs, strict=True):
        assert tuple(span.instr for span in spans) == program
        for span in spans:
            if is_compute(span.instr):
                assert {ends[part] for part in parts(span.instr)} == {span.end}
        assert all(a.end <= b.start for a, b in pairwise(spans))
    assert timeline.makespan == max(ends.values())
    stated = replace(
        schedule,
        explicit_comm=True,
        programs=tuple(tuple(lower(schedule, pp_rank)) for pp_rank in range(p)),
    )
    assert simulate(stated, costs).makespan == timeline.makespan


@pytest.mark.parametrize(
    "name",
    [
        "gpipe",
        "looped-bfs",
        "1f1b",
        "eager-1f1b",
        "interleaved",
        "zb-h1",
        "interleaved-zb",
        "zb-v",
        "zb-h2",
        "naive",
    ],
)
def test_latency_terms(name):
    """A constant latency c per hop lengthens the step by the published multiple of c."""
    published = {
        "naive": lambda p, m, v: 2 * m * (p - 1),
        "gpipe": lambda p, m, v: 2 * (p - 1),
        "looped-bfs": lambda p, m, v: 2 * (p - 1),
        "1f1b": lambda p, m, v: 2 * (p - 1) * m // p + 2 * (p - 2),
        "eager-1f1b": lambda p, m, v: 2 * (p - 1),
        "interleaved": lambda p, m, v: 2 * (p * v - 1),
        "zb-h1": lambda p, m, v: 4 * (p - 1),
        "interleaved-zb": lambda p, m, v: 5 * p - 4,
        "zb-v": lambda p, m, v: 5 * p - 7,
        "zb-h2": lambda p, m, v: p - 1,
    }[name]
    for p in (2, 3, 4, 5, 8):
        for m in (2 * p, 3 * p) if p == 8 else (2 * p, 3 * p, 6 * p):
            for v in (2, 3) if name == "interleaved" else (None,):
                schedule = make_schedule(name, p, m, v)
                base = simulate(schedule, Costs()).makespan
                hops = closed_form(schedule, Costs()).hops[1]
                assert hops == published(p, m, v)
                for c in (Fraction(1, 20), Fraction(1, 5), Fraction(1, 2)):
                    assert simulate(schedule, Costs(latency=c)).makespan - base == hops * c, (p, m)


def test_1f1b_against_gpipe_is_a_latency_probe():
    p, m, c = 4, 16, 2
    one, all_forward = (
        simulate(make_schedule(name, p, m), Costs(latency=c)) for name in ("1f1b", "gpipe")
    )
    assert one.makespan - all_forward.makespan == (2 * (p - 1) * m // p - 2) * c


def test_a_message_shorter_than_a_pass_meets_no_queue():
    schedule = make_schedule("1f1b", 4, 8)
    slow = simulate(schedule, Costs(latency=1, bandwidth=4, message_bytes=Fraction(2)))
    assert slow.makespan == simulate(schedule, Costs(latency=Fraction(3, 2))).makespan


def test_messages_longer_than_a_pass_queue_for_the_link():
    """The second rank of gpipe gets a microbatch every 4, not every 1, and sends back as slowly."""
    schedule, size = make_schedule("gpipe", 2, 5), 4
    queued = simulate(schedule, Costs(bandwidth=1, message_bytes=size))
    assert queued.makespan == 1 + 5 * size + 1 + 5 * 2 - 2 * 4 + 4 * size + size + 2
    assert simulate(schedule, Costs(latency=size)).makespan == 1 + size + 5 * 3 + size + 2


@given(counts(max_p=4, max_m=6), st.data())
@settings(max_examples=60, deadline=None)
def test_no_step_is_shorter_than_its_links_or_its_passes(case, data):
    """Whatever the size of a rendezvous, and however many cores the ranks share."""
    name, p, m, chunks = case
    schedule = make_schedule(name, p, m, chunks)
    cost = st.fractions(Fraction(1, 8), 8, max_denominator=8)
    costs = Costs(
        *(data.draw(st.tuples(*[cost] * schedule.num_stages)) for _ in "fiw"),
        latency=data.draw(st.fractions(0, 2, max_denominator=8)),
        message_bytes=Fraction(5),
        eager_bytes=data.draw(st.sampled_from((None, 4, 5))),
        units=data.draw(st.integers(1, 3)),
    )
    free = simulate(schedule, replace(costs, eager_bytes=None))
    on_links = Counter(
        (message.source, message.target)
        for program in schedule.programs
        for instr in program
        for message in on_wire(schedule, instr)[1]
    )
    before = None
    for bandwidth in (Fraction(1, 4), 1, 16, 10**9):
        timeline = simulate(schedule, replace(costs, bandwidth=bandwidth))
        wire = max(on_links.values(), default=0) * costs.message_bytes / bandwidth
        assert timeline.makespan >= max(wire, *timeline.busy)
        assert timeline.makespan >= free.makespan
        assert timeline.busy == free.busy
        if not costs.is_rendezvous():
            assert before is None or timeline.makespan <= before
            before = timeline.makespan
    if before is not None:
        assert before == pytest.approx(free.makespan)
    for cores in (1, 2, p):
        shared = simulate(schedule, replace(costs, bandwidth=2, cores=cores))
        assert shared.makespan >= max(sum(free.busy) / cores, *free.busy) - Fraction(1, 10**6)


@pytest.mark.parametrize("cores", [1, 2, 3, 4])
def test_ranks_that_share_cores_get_equal_shares(cores):
    """Four equal replicas take 4 / cores times as long as alone.

    Four ranks in turn take no longer: those that wait, or have ended, sleep.
    """
    own, shared = (
        simulate(make_schedule("gpipe", 1, 6), Costs(2, 3, 1, cores=share)).makespan
        for share in (1, Fraction(cores, 4))
    )
    assert shared == own * Fraction(4, cores)
    dearer = simulate(
        make_schedule("gpipe", 1, 6),
        Costs(2, 3, 1, cores=Fraction(cores, 4), sharing=Fraction(5, 4)),
    ).makespan
    assert dearer == (shared * Fraction(5, 4) if cores < 4 else own)
    in_turn = {
        simulate(make_schedule("naive", 4, 3), Costs(2, 3, 1, cores=share)).makespan
        for share in (None, cores)
    }
    assert len(in_turn) == 1


def test_a_rendezvous_waits_until_both_ranks_are_in_mpi():
    """The second message asks at 8, the receiver looks at 10, and the sender leaves MPI till 12."""
    schedule = make_schedule("gpipe", 2, 3)
    costs = Costs(f=4, bandwidth=1, message_bytes=2)
    eager, asked = (simulate(schedule, replace(costs, eager_bytes=most)) for most in (2, 1))
    starts = [[span.start for span in timeline.spans[1]][:3] for timeline in (eager, asked)]
    assert starts == [[6, 10, 14], [6, 14, 18]]
    assert [span.instr for span in asked.spans[1]] == list(schedule.programs[1])
    often = simulate(schedule, replace(costs, eager_bytes=1, units=4))  # looks after each 1
    assert [span.start for span in often.spans[1]][:3] == [6, 11, 15]


@pytest.mark.parametrize(
    ("size", "share", "starts"),
    [
        (2, 0, [[0, 4, 8, 22, 24, 26], [6, 10, 14, 18, 20, 22]]),
        # Half of the core for 2 makes a pass 1 longer. A rank that waits meanwhile loses nothing.
        (2, Fraction(1, 2), [[0, 4, 9, 24, 27, 30], [6, 11, 16, 20, 22, 25]]),
        (2, 1, [[0, 4, 10, 26, 30, 34], [6, 12, 18, 22, 24, 28]]),
        # Messages queue for longer than a pass: it takes twice as long, and the link is the limit.
        (32, Fraction(1, 2), [[0, 4, 12, 138, 170, 202], [36, 68, 100, 104, 106, 110]]),
    ],
)
def test_a_message_that_leaves_slows_the_passes_of_its_sender_down(size, share, starts):
    timeline = simulate(
        make_schedule("gpipe", 2, 3), Costs(f=4, bandwidth=1, message_bytes=size, sending=share)
    )
    assert [
        [span.start for span in spans if is_compute(span.instr)] for spans in timeline.spans
    ] == starts


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_layer_wise_workers_are_busy_one_pth_of_the_time(p):
    timeline = simulate(make_schedule("naive", p, 6), Costs(2, 3, 1))
    assert timeline.busy_share == (pytest.approx(1 / p),) * p
    assert timeline.bubble_share == pytest.approx(1 - 1 / p)
    assert timeline.makespan == 6 * p * 6


@pytest.mark.parametrize("share", [Fraction(2, 3), Fraction(5, 6), 1])
@pytest.mark.parametrize(("p", "m"), [(4, 8), (6, 14), (8, 16)])
def test_dualpipe_v_bubble_of_the_last_rank(p, m, share):
    """(p-1)(f&b + b - 3w) with f = i = w = 1, also where overlapping saves time."""
    timeline = simulate(make_schedule("dualpipe-v", p, m), Costs(overlap=share))
    assert timeline.global_bubble[p - 1] == (p - 1) * (3 * share + 2 - 3)


def test_unequal_stages():
    """One slow stage sets the pace of 1F1B: m times its cost, plus the way to it and back."""
    costs = Costs((1, 5, 1), (1, 5, 1), (1, 5, 1))
    timeline = simulate(make_schedule("1f1b", 3, 6), costs)
    assert timeline.busy == (18, 90, 18)
    assert timeline.makespan == 1 + 6 * 15 + 2
    with pytest.raises(UsageError, match="3 values of f for 4 stages"):
        simulate(make_schedule("1f1b", 4, 6), costs)


def test_peak_stash_in_bytes():
    """From I to W only what W needs is kept."""
    whole = Costs(stash_bytes=10, kept_bytes=10)
    assert simulate(make_schedule("zb-h1", 4, 8), whole).peak_stash_bytes == (40,) * 4
    assert simulate(make_schedule("1f1b", 4, 8), whole).peak_stash_bytes == (40, 30, 20, 10)
    half = Costs(stash_bytes=10, kept_bytes=4)
    part = simulate(make_schedule("zb-h1", 4, 8), half).peak_stash_bytes
    assert part == (40, 34, 28, 22)
    by_stage = simulate(make_schedule("gpipe", 2, 3), Costs(stash_bytes=(5, 7))).peak_stash_bytes
    assert by_stage == (15, 21)


def test_a_schedule_that_hangs_is_not_simulated():
    schedule = make_schedule("1f1b", 2, 2)
    swapped = list(schedule.programs[1])
    swapped[1:3] = swapped[2:0:-1]
    with pytest.raises(ScheduleError):
        simulate(replace(schedule, programs=(schedule.programs[0][:1] * 2, swapped)), Costs())


def test_costs_of_stages_from_costs_of_layers():
    layers = Costs((1, 2, 3, 4), 1, 1, stash_bytes=(1, 1, 1, 5), weight_bytes=2, message_bytes=8)
    stages = layers.merged((1, 3))
    assert stages.f == (1, 9)
    assert stages.i == (1, 3)
    assert stages.stash_bytes == (1, 7)
    assert stages.weight_bytes == (2, 6)
    assert stages.message_bytes == 8
    halves = Costs(3, (1, 2), 1, stash_bytes=5).divided(2)
    assert (halves.f, halves.i, halves.stash_bytes) == (
        Fraction(3, 2),
        (Fraction(1, 2), 1),
        Fraction(5, 2),
    )
