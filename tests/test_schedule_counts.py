"""The counts that schedules take or refuse; stash and step of the V schedules over many p."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import compute, counts

from mpipar.errors import UsageError
from mpipar.pipeline.check import check
from mpipar.pipeline.costs import Costs
from mpipar.pipeline.schedules.catalog import (
    FAMILIES,
    SCHEDULES,
    make_schedule,
    schedule_problems,
    with_reduce_grad,
)
from mpipar.pipeline.simulate import simulate


@pytest.mark.parametrize("p", [
    *range(1, 13), 17, *(pytest.param(p, marks=pytest.mark.slow) for p in (24, 31)), 32])
@pytest.mark.parametrize(("name", "cap"), [("v-min", lambda p: 2 * ((p + 4) // 3)),
                                           ("v-half", lambda p: 2 * ((p + 2) // 2))])
def test_v_min_and_v_half_are_accepted(name, cap, p):
    """They have a small stash, and never a longer step than 1F1B on stages of twice the length."""
    for m in {1, 2, 3, p, p + 1, 2 * p, 3 * p + 2}:
        timeline = simulate(make_schedule(name, p, m), Costs())
        assert max(timeline.peak_stash) <= cap(p), m
        plain = simulate(make_schedule("1f1b", p, m), Costs(2, 2, 2))
        assert timeline.makespan <= plain.makespan, m


def test_v_min_block_offsets():
    """Far from the ends a microbatch's passes repeat every 6 with the published offsets."""
    for p in (2, 3, 4, 5, 6, 7):
        late = 2 if p % 3 == 0 else 0
        schedule = make_schedule("v-min", p, 6 * p)
        for r in range(p):
            mb = 3 * p
            order = compute(schedule, r)
            at = {instr[:3]: position for position, instr in enumerate(order)}
            passes = {
                ("F", r, mb): r, ("F", 2 * p - 1 - r, mb): 2 * p - 1 - r,
                ("I", 2 * p - 1 - r, mb): 2 * p + r + late, ("I", r, mb): 4 * p - 1 - r + late,
            }
            first = at["F", r, mb] - r  # in the steady state every slot is filled
            assert {key: at[key] - first for key in passes} == passes


def test_ties_on_v_and_mirror_placements():
    """On a V the first and last stage share rank 0; dualpipe holds both on ranks 0 and p-1."""
    for name in ("zb-v", "v-half", "v-min", "dualpipe-v"):
        schedule = make_schedule(name, 4, 8)
        assert schedule.rank_of(0, 5) == schedule.rank_of(7, 5) == 0
        assert schedule.stages_of(0) == (0, 7)
        assert schedule.stages_of(3) == (3, 4)
    schedule = make_schedule("dualpipe", 4, 8)
    assert schedule.stages_of(0) == schedule.stages_of(3) == (0, 3)
    assert [schedule.rank_of(1, mb) for mb in range(8)] == [1] * 4 + [2] * 4
    assert make_schedule("interleaved", 4, 8, 3).stages_of(1) == (1, 5, 9)


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n != "dualpipe"])
def test_one_rank_runs_every_schedule_but_dualpipe(name):
    for m in (2, 5):
        schedule = make_schedule(name, 1, m)
        timeline = simulate(schedule, Costs())
        assert timeline.messages == (0,)
        assert timeline.global_bubble == (0,)
        assert schedule.programs[0][-1].kind == "REDUCE_GRAD"


def offered(name, problem):
    """The values of a flag that a refusal offers."""
    found = re.search(rf"; use --{name} ([0-9, or]+)", problem)
    return [int(value) for value in re.findall("[0-9]+", found[1])] if found else []


@given(st.integers(1, 6), st.integers(1, 20), st.integers(1, 4), st.integers(1, 22))
@settings(max_examples=150, deadline=None)
def test_groups_of_interleaved_schedules(p, m, v, g):
    for name in ("interleaved", "interleaved-zb"):
        found = schedule_problems(name, p, m, v, g)
        if g >= m or (g >= p and (m % g == 0 or m % g >= p)):
            assert not found
            check(make_schedule(name, p, m, v, g))
        else:
            assert len(found) == 1
            assert f"--group-size {g}" in found[0]
            for size in offered("group-size", found[0]):
                check(make_schedule(name, p, m, v, size))


def test_a_short_group_really_deadlocks():
    """The rule for groups is needed: without it these counts would hang."""
    order = FAMILIES["interleaved"].order
    programs = tuple(with_reduce_grad(order(4, r, 5, 3, 4)) for r in range(4))
    with pytest.raises(UsageError, match="deadlock"):
        check(replace(make_schedule("interleaved", 4, 5, 3), programs=programs))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("dualpipe", 3, 8), ["--pp 3 with --schedule dualpipe", "use --pp 2 or 4"]),
        (("dualpipe", 1, 2), ["--pp 1 with --schedule dualpipe", "use --pp 2"]),
        (("dualpipe", 4, 6), ["use --num-microbatches 8 or 10"]),
        (("dualpipe", 2, 7), ["use --num-microbatches 8 or 10"]),
        (("dualpipe", 3, 5), ["--pp 3 with", "--num-microbatches 5 with"]),
        (("dualpipe-v", 4, 5), ["use --num-microbatches 8 or 9"]),
        (("1f1b", 4, 8, 2), ["--chunks 2 with --schedule 1f1b", "leave --chunks out"]),
        (("zb-v", 4, 8, 3), ["--chunks 3 with --schedule zb-v"]),
        (("gpipe", 4, 8, None, 4), ["leave --group-size out"]),
        (("interleaved", 4, 9, 2, 4), ["--group-size 4", "use --group-size 5 or 9"]),
        (("interleavd", 4, 9), ["use --schedule interleaved"]),
        (("1f1b", 0, 0), ["--pp 0: must be at least 1", "--num-microbatches 0: must be"]),
        (("interleaved", 2, 4, 0), ["--chunks 0: must be at least 1"]),
    ],
)
def test_counts_that_a_schedule_cannot_take(arguments, expected):
    with pytest.raises(UsageError) as caught:
        make_schedule(*arguments)
    assert caught.value.exit_code == 2
    for text in expected:
        assert text in str(caught.value)


@given(counts())
@settings(max_examples=100, deadline=None)
def test_next_valid_counts_are_valid(case):
    """The counts that a refusal offers are accepted."""
    _, p, m, _ = case
    for name in ("dualpipe", "dualpipe-v"):
        for problem in schedule_problems(name, p, m):
            for value in offered("num-microbatches", problem):
                assert not [text for text in schedule_problems(name, p, value)
                            if text.startswith("--num-microbatches")]
            for value in offered("pp", problem):
                assert not [text for text in schedule_problems(name, value, m)
                            if text.startswith("--pp")]
            assert offered("pp", problem) + offered("num-microbatches", problem)
