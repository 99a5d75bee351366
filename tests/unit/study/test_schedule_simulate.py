"""The simulator, every span against a second computation; how far each schedule is from the best.

The best is found by an exact search under a memory cap, with unit costs (f = i = w = 1).
Microbatches are interchangeable, so a state is how many F, I and W each stage has done. Time goes
in steps of one pass; what a step makes can be used from the next step on.
"""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import compute, counts

from mpipar.pipeline.instructions import (
    ScheduleError,
    is_compute,
    neighbours,
    parts,
)
from mpipar.pipeline.schedules.catalog import FAMILIES, make_schedule, schedule_problems
from mpipar.study.schedules.simulate import Costs, simulate


def longest_paths(schedule, costs):
    """End of every pass: repeated relaxation over all dependencies, until nothing changes."""
    f, i, w = (costs.by_stage(name, schedule.num_stages) for name in "fiw")
    duration = {"F": f, "I": i, "W": w, "B": [a + b for a, b in zip(i, w, strict=True)]}
    ends, arrivals, previous = {}, {}, None
    while ends != previous:
        previous = dict(ends)
        for pp_rank in range(schedule.pp_size):
            clock = 0
            for instr in compute(schedule, pp_rank):
                received, sent = neighbours(schedule, instr)
                start = max([clock, *(arrivals.get(message, 0) for message in received)])
                total = sum(duration[kind][stage] for kind, stage, _ in parts(instr))
                clock = start + total * (costs.overlap if len(parts(instr)) == 2 else 1)
                ends |= dict.fromkeys(parts(instr), clock)
                for message in sent:
                    arrivals[message] = clock + costs.latency * message.is_remote
    return ends


@given(counts(max_p=4, max_m=6), st.data())
@settings(max_examples=120, deadline=None)
def test_every_span_is_a_longest_path(case, data):
    """Random costs by stage, latency and overlap; exact arithmetic."""
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
                for c in (Fraction(1, 20), Fraction(1, 5), Fraction(1, 2)):
                    added = simulate(schedule, Costs(latency=c)).makespan - base
                    assert added == published(p, m, v) * c, (p, m)


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


def test_a_schedule_that_hangs_is_not_simulated():
    schedule = make_schedule("1f1b", 2, 2)
    swapped = list(schedule.programs[1])
    swapped[1:3] = swapped[2:0:-1]
    with pytest.raises(ScheduleError):
        simulate(replace(schedule, programs=(schedule.programs[0][:1] * 2, swapped)), Costs())


# How far each schedule is from the optimum.


def best_step(ranks, m, cap, limit):
    """Fewest steps in which all passes can be run, or None if more than `limit` are needed.

    ranks: the stages of each rank. cap: chunk-activations a rank may hold, from F until W.
    """
    start = tuple((0, 0, 0) for rank in ranks for _ in rank)
    done = tuple((m, m, m) for _ in start)
    layer = {start}
    for step in range(limit + 1):
        if done in layer:
            return step
        following = set()
        for state in layer:
            for moves in product(*(possible(state, stages, m, cap) for stages in ranks)):
                after = list(state)
                for stage, kind in moves:
                    if stage is not None:
                        counts = list(after[stage])
                        counts[kind] += 1
                        after[stage] = tuple(counts)
                if step + 1 + least_left(after, ranks, m) <= limit:
                    following.add(tuple(after))
        layer = undominated(following, one_chunk=len(start) == len(ranks))
    return None


def possible(state, stages, m, cap):
    """The (stage, kind) a rank can run now; idling is a choice only where it can save memory."""
    held = sum(state[stage][0] - state[stage][2] for stage in stages)
    moves = []
    for stage in stages:
        f, i, w = state[stage]
        if f < m and held < cap and (stage == 0 or state[stage - 1][0] > f):
            moves.append((stage, 0))
        if i < f and (stage == len(state) - 1 or state[stage + 1][1] > i):
            moves.append((stage, 1))
        if w < i:
            moves.append((stage, 2))
    forwards_only = all(kind == 0 for _, kind in moves)
    if not moves or (len(stages) > 1 and forwards_only):
        moves.append((None, None))
    return moves


def least_left(state, ranks, m):
    """A lower bound for the steps still needed: a rank's work, and the last microbatch's way."""
    work = max(sum(3 * m - sum(state[stage]) for stage in stages) for stages in ranks)
    last = len(state) - 1
    ways = [0]
    for stage, (f, i, _) in enumerate(state):
        if i < m:
            ways.append((m - i) + stage + 1)  # down to stage 0, then its W
        if f < m:
            ways.append((m - f) + (last - stage) + last + 1 + 1)
    return max(work, *ways)


def undominated(states, one_chunk):
    """Drop a state if another one is ahead of it: that one could do the same from there on, or
    idle.

    With several chunks on a rank, being ahead in one chunk's F takes memory from the other's. So
    only states with equal F are compared.
    """
    groups = {}
    for state in states:
        key = None if one_chunk else tuple(f for f, _, _ in state)
        groups.setdefault(key, []).append(tuple(count for counts in state for count in counts))
    kept = set()
    for group in groups.values():
        front = []
        for flat in sorted(group, key=sum, reverse=True):
            if not any(all(a >= b for a, b in zip(other, flat, strict=True)) for other in front):
                front.append(flat)
        kept |= {tuple(zip(*[iter(flat)] * 3, strict=True)) for flat in front}
    return kept


def exhaustive(ranks, m, cap):
    """The fewest steps by plain breadth-first search over every choice, idling included."""
    stages = sum(map(len, ranks))
    done = tuple((m, m, m) for _ in range(stages))
    layer, step = {tuple((0, 0, 0) for _ in range(stages))}, 0
    while done not in layer:
        following = set()
        for state in layer:
            moves = [{(None, None), *possible(state, stages, m, cap)} for stages in ranks]
            for choice in product(*moves):
                after = [list(counts) for counts in state]
                for stage, kind in choice:
                    if stage is not None:
                        after[stage][kind] += 1
                following.add(tuple(map(tuple, after)))
        layer, step = following, step + 1
    return step


ONE_CHUNK = [(0,), (1,)]
V = [(0, 3), (1, 2)]
LOOP = [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("ranks", "m", "caps"),
    [
        (ONE_CHUNK, 3, (1, 2, 3)),
        ([(0,), (1,), (2,)], 2, (1, 2)),
        (V, 1, (1, 2)),
        (LOOP, 1, (2,)),
        ([(0, 1)], 3, (2, 3, 6)),
        (V, 2, (2, 3)),
        (LOOP, 2, (2, 3)),
    ],
)
def test_the_search_leaves_nothing_out(ranks, m, caps):
    for cap in caps:
        if cap < len(ranks[0]):
            assert best_step(ranks, m, cap, 60) is None  # a microbatch does not fit
        else:
            assert best_step(ranks, m, cap, 60) == exhaustive(ranks, m, cap)


# Unit passes by which a schedule's step is longer than the best with the same stash, at most, over
# p <= 4, m <= 6 with one stage a rank and p <= 2, m <= 4 with two.
WORST_GAP = {
    "naive": 18,
    "gpipe": 6,
    "1f1b": 6,
    "eager-1f1b": 6,
    "interleaved": 3,
    "looped-bfs": 3,
    "zb-h1": 0,
    "zb-h2": 1,
    "interleaved-zb": 0,
    "zb-v": 1,
    "v-half": 2,
    "v-min": 2,
    "dualpipe-v": 1,
}


@pytest.mark.parametrize("name", WORST_GAP)
def test_distance_from_the_best(name):
    """No schedule beats the search; -s prints how far each one is from it."""
    one_chunk = FAMILIES[name].stages_per_rank == 1
    most_p, most_m = (4, 6) if one_chunk else (2, 4)
    worst = 0
    for p, m in product(range(1, most_p + 1), range(1, most_m + 1)):
        if schedule_problems(name, p, m):
            continue
        schedule = make_schedule(name, p, m)
        timeline = simulate(schedule, Costs())
        ranks, cap = [schedule.stages_by_rank[r] for r in range(p)], max(timeline.peak_stash)
        best = best_step(ranks, m, cap, timeline.makespan)
        assert best is not None, f"shorter than the shortest: p = {p}, m = {m}"
        print(f"{name:15} p {p} m {m} stash {cap:2}: {timeline.makespan:3}, best {best:3}")
        worst = max(worst, timeline.makespan - best)
    assert worst == WORST_GAP[name]


def test_zero_bubble_is_the_best_there_is():
    """The makespan 3m + p - 1 cannot be beaten with any stash; 1F1B is 2(p-1) above it."""
    for p, m in ((2, 4), (3, 6), (4, 6)):
        ranks = [(r,) for r in range(p)]
        assert best_step(ranks, m, m, 60) == best_step(ranks, m, p, 60) == 3 * m + p - 1
        assert simulate(make_schedule("zb-h1", p, m), Costs()).makespan == 3 * m + p - 1
        assert simulate(make_schedule("1f1b", p, m), Costs()).makespan == 3 * m + 3 * (p - 1)
        assert best_step(ranks, m, p - 1, 60) > 3 * m + p - 1
