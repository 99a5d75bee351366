"""Every schedule by name: order, lowering, published integers, closed forms, messages."""

import itertools
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import compute, counts, emulate

from mpipar import models
from mpipar.config.grid import GridConfig
from mpipar.config.model import ModelConfig
from mpipar.config.sections import Config
from mpipar.errors import UsageError
from mpipar.models import split as splits
from mpipar.models.split import UnitFlops, balanced_layers, stage_flops
from mpipar.pipeline.check import check
from mpipar.pipeline.instructions import is_compute, parts
from mpipar.pipeline.lowering import lower, receives
from mpipar.pipeline.schedules.catalog import (
    FAMILIES,
    make_schedule,
    num_stages,
    schedule_problems,
)
from mpipar.study.schedules.draw import label
from mpipar.study.schedules.forms import FORMS, closed_form
from mpipar.study.schedules.simulate import Costs, simulate

ANCHORS = {  # f = i = w = 1, f&b = 3: (p, m) -> name, chunks -> makespan (global)
    (2, 4): (24, 15, 27, 39, 27, 13, 13, 25, 25, 26),
    (4, 8): (96, 33, 57, 81, 57, 27, 27, 51, 51, 54),
    (4, 12): (144, 45, 81, 117, 81, 39, 39, 75, 75, 78),
    (8, 16): (384, 69, 117, 165, 117, 55, 55, 103, 103, 110),
    (4, 4): (48, 21, 33, 45, 33, 15, 16, 27, 30, None),
}
ANCHOR_COLUMNS = (
    ("naive", None),
    ("gpipe", None),
    ("interleaved", 2),
    ("interleaved", 3),
    ("looped-bfs", 2),
    ("zb-h1", None),
    ("zb-h2", None),
    ("interleaved-zb", 2),
    ("zb-v", None),
    ("dualpipe-v", None),
)
SENDS_4_8 = {
    ("naive", None): [8, 16, 16, 8],
    ("gpipe", None): [8, 16, 16, 8],
    ("1f1b", None): [8, 16, 16, 8],
    ("interleaved", 2): [24, 32, 32, 24],
    ("looped-bfs", 3): [40, 48, 48, 40],
    ("zb-v", None): [16, 32, 32, 16],
    ("dualpipe-v", None): [16, 32, 32, 16],
}
DRAWING = re.compile(r"p = (\d+),.* m = (\d+)\n((?: +rank \d .*\n)+)")
DRAWN = {
    name: drawing
    for name, family in FAMILIES.items()
    if (drawing := DRAWING.search(family.order.__doc__))
}


@pytest.mark.parametrize(
    ("name", "p", "m", "expected"),
    [
        ("naive", 2, 2, ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"]),
        ("gpipe", 2, 3, ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]),
        (
            "1f1b",
            3,
            3,
            ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2", "2F0 2B0 2F1 2B1 2F2 2B2"],
        ),
        (
            "eager-1f1b",
            2,
            4,
            ["0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"],
        ),
        (
            "zb-h1",
            2,
            3,
            ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"],
        ),
        (
            "zb-h2",
            2,
            3,
            ["0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"],
        ),
        (
            "interleaved",
            2,
            2,
            ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"],
        ),
        (
            "looped-bfs",
            2,
            2,
            ["0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0", "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0"],
        ),
        ("zb-v", 1, 2, ["0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1"]),
        (
            "v-min",
            2,
            2,
            [
                "0F0 3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0I1 0W1",
                "1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 2W1 1W1",
            ],
        ),
    ],
)
def test_orders_worked_out_by_hand(name, p, m, expected):
    schedule = make_schedule(name, p, m)
    assert [text.split() for text in expected] == [
        [str(instr) for instr in compute(schedule, pp_rank)] for pp_rank in range(p)
    ]


@pytest.mark.parametrize("name", DRAWN)
def test_an_order_is_drawn_as_it_runs(name):
    """A cell of the drawing in its docstring is a unit of time: a pass, or dots for none."""
    p, m, rows = DRAWN[name].groups()
    half = 1 if FAMILIES[name].split else Fraction(1, 2)
    schedule = make_schedule(name, int(p), int(m))
    timeline = simulate(schedule, Costs(1, half, half))
    for row, spans in zip(rows.splitlines(), timeline.spans, strict=True):
        drawn = [(time, cell) for time, cell in enumerate(row.split()[2:]) if cell.strip(".")]
        ran = [(one.start, label(schedule, one.instr)) for one in spans if is_compute(one.instr)]
        assert drawn == ran


@given(counts())
@settings(max_examples=150, deadline=None)
def test_every_schedule_is_complete_and_can_run(case):
    """By the proof, and acted out with its messages; each receive is posted one pass ahead."""
    name, p, m, chunks = case
    schedule = make_schedule(name, p, m, chunks)
    check(schedule)
    assert schedule.num_stages == num_stages(name, p, chunks)
    programs = [lower(schedule, pp_rank) for pp_rank in range(p)]
    emulate(schedule, programs)
    kinds = {
        kind for program in schedule.programs for instr in program for kind, *_ in parts(instr)
    }
    assert kinds <= {"F", "B", "I", "W", "REDUCE_GRAD"}
    assert ("B" not in kinds) == FAMILIES[name].split
    for program in programs:
        for position, instr in enumerate(program):
            for wire in receives(schedule, instr) if is_compute(instr) else ():
                ahead = sum(map(is_compute, program[program.index(wire) : position]))
                assert ahead == any(map(is_compute, program[:position]))


@pytest.mark.parametrize(("p", "m"), ANCHORS)
def test_makespan_integers(p, m):
    for (name, chunks), expected in zip(ANCHOR_COLUMNS, ANCHORS[p, m], strict=True):
        if expected is None:
            assert schedule_problems(name, p, m, chunks), name
        else:
            assert simulate(make_schedule(name, p, m, chunks), Costs()).makespan == expected, name
    assert simulate(make_schedule("1f1b", p, m), Costs()).makespan == ANCHORS[p, m][1]


@pytest.mark.parametrize(
    ("p", "m", "h2", "v"), [(2, 4, 12, 24), (4, 8, 24, 48), (4, 12, 36, 72), (8, 16, 48, 96)]
)
def test_zero_bubble_is_about_the_span_of_a_rank(p, m, h2, v):
    """In ZB-H2 and ZB-V no rank waits between its first and last pass; overall p-1 are lost."""
    for name, span in (("zb-h2", h2), ("zb-v", v)):
        timeline = simulate(make_schedule(name, p, m), Costs())
        assert timeline.span_bubble == (0,) * p
        assert timeline.busy == (span,) * p
        assert timeline.global_bubble == (p - 1,) * p


@pytest.mark.parametrize(("name", "chunks"), SENDS_4_8)
def test_messages_by_rank(name, chunks):
    found = simulate(make_schedule(name, 4, 8, chunks), Costs()).messages
    assert list(found) == SENDS_4_8[name, chunks]


@given(st.integers(1, 6), st.integers(1, 18), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_peak_stash_forms_by_rank(p, m, v, rounds):
    even, long = rounds * p, 2 * p - 1 + m
    forms = {  # microbatches, chunks, stash of each rank
        "1f1b": (m, None, [min(p - r, m) for r in range(p)]),
        "interleaved": (
            even, v, [min(2 * (p - 1 - r) + (v - 1) * p + 1, even * v) for r in range(p)]
        ),
        "naive": (m, None, [1] * p),
        "gpipe": (m, None, [m] * p),
        "eager-1f1b": (m, None, [min(2 * (p - r) - 1, m) for r in range(p)]),
        "looped-bfs": (m, v, [m * v] * p),
        "zb-h1": (long, None, [p] * p),
        "zb-h2": (long, None, [2 * p - 1] * p),
        "zb-v": (long, None, [2 * p] * p),
        "dualpipe-v": (long + 1, None, [2 * p + 1] * p),
        "interleaved-zb": (even, v, [min(p * v, even * v)] * p),
    }  # fmt: skip
    for name, (count, chunks, expected) in forms.items():
        found = simulate(make_schedule(name, p, count, chunks), Costs()).peak_stash
        assert list(found) == expected, name


costs = st.builds(
    Costs,
    st.fractions(Fraction(1, 4), 9),
    st.fractions(Fraction(1, 4), 9),
    st.fractions(Fraction(1, 4), 9),
)


@given(counts(), st.one_of(costs, st.builds(lambda c: Costs(c, c, c), st.integers(1, 5))))
@settings(max_examples=200, deadline=None)
def test_closed_forms_equal_the_simulation(case, cost):
    """Whatever `mpipar schedule` prints as a closed form is exactly what it simulates."""
    name, p, m, chunks = case
    schedule = make_schedule(name, p, m, chunks)
    timeline = simulate(schedule, cost)
    form = closed_form(schedule, cost)
    if form.bubble[1] is not None:
        assert set(timeline.global_bubble) == {form.bubble[1]}
    assert sum(timeline.messages) == form.messages[1]
    if form.peak_stash[0].startswith("<="):
        assert max(timeline.peak_stash) <= form.peak_stash[1]
    elif form.peak_stash[1] is not None:
        assert max(timeline.peak_stash) == form.peak_stash[1]


@pytest.mark.parametrize("name", [name for name, forms in FORMS.items() if forms.bubble])
def test_there_is_a_closed_form_to_print(name):
    form = closed_form(make_schedule(name, 4, 8), Costs())
    assert form.bubble[1] == simulate(make_schedule(name, 4, 8), Costs()).global_bubble[0]


# The counts that schedules take or refuse; stash and step of the V schedules over many p.


@pytest.mark.parametrize(
    "p",
    [
        *range(1, 9),
        17,
        *(pytest.param(p, marks=pytest.mark.slow) for p in (9, 10, 11, 12, 24, 31, 32)),
    ],
)
@pytest.mark.parametrize(
    ("name", "cap"),
    [("v-min", lambda p: 2 * ((p + 4) // 3)), ("v-half", lambda p: 2 * ((p + 2) // 2))],
)
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
                ("F", r, mb): r,
                ("F", 2 * p - 1 - r, mb): 2 * p - 1 - r,
                ("I", 2 * p - 1 - r, mb): 2 * p + r + late,
                ("I", r, mb): 4 * p - 1 - r + late,
            }
            first = at["F", r, mb] - r  # in the steady state every slot is filled
            assert {key: at[key] - first for key in passes} == passes


def test_stages_of_ranks():
    """On a V the first and last stage share rank 0."""
    for name in ("zb-v", "v-half", "v-min", "dualpipe-v"):
        schedule = make_schedule(name, 4, 8)
        assert schedule.stage_to_rank == (0, 1, 2, 3, 3, 2, 1, 0)
        assert schedule.stages_by_rank == ((0, 7), (1, 6), (2, 5), (3, 4))
    assert make_schedule("interleaved", 4, 8, 3).stages_by_rank[1] == (1, 5, 9)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("dualpipe-v", 4, 5), ["--num-microbatches from 2 * 4 on"]),
        (
            ("1f1b", 4, 8, 2),
            ["--schedule 1f1b with --pp 4", "--chunks 2: only", "leave --chunks out"],
        ),
        (("zb-v", 4, 8, 3), ["--schedule zb-v with", "--chunks 3: only"]),
        (("interleavd", 4, 9), ["did you mean interleaved?"]),
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


# Blocks cut into stages: none is lost, and no split has a less busy busiest rank.


PLACEMENTS = {"linear": "1f1b", "looped": "interleaved", "v": "zb-v"}
assert PLACEMENTS.keys() == {family.placement for family in FAMILIES.values()}


def loads(schedule, split, units):
    """FLOPs of each pipeline rank."""
    bounds = [0, *itertools.accumulate(split)]
    stages = [sum(units.blocks[a:b]) for a, b in itertools.pairwise(bounds)]
    stages[0] += units.entry
    stages[-1] += units.head
    return [
        sum(stages[stage] for stage in schedule.stages_by_rank[pp_rank])
        for pp_rank in range(schedule.pp_size)
    ]


def every_split(layers, num_stages):
    for cuts in itertools.combinations_with_replacement(range(layers + 1), num_stages - 1):
        bounds = (0, *cuts, layers)
        yield tuple(b - a for a, b in itertools.pairwise(bounds))


def balanced_and_best(schedule, units):
    """The split, and FLOPs of its busiest rank and of the least busy one that any split has."""
    split = balanced_layers(units, schedule.stages_by_rank)
    assert len(split) == schedule.num_stages
    assert sum(split) == len(units.blocks)
    best = min(
        max(loads(schedule, other, units))
        for other in every_split(len(units.blocks), schedule.num_stages)
    )
    return split, max(loads(schedule, split, units)), best


def assert_no_split_is_better(schedule, units):
    split, busiest, best = balanced_and_best(schedule, units)
    assert busiest == best, split


@given(
    counts(max_p=3, max_m=6, max_chunks=2),
    st.integers(1, 7),
    st.integers(0, 9),
    st.integers(1, 9),
    st.integers(0, 40),
)
@settings(max_examples=150, deadline=None)
def test_no_split_of_any_schedule_is_better(case, layers, entry, block, head):
    schedule = make_schedule(*case)
    assert_no_split_is_better(schedule, UnitFlops(entry, (block,) * layers, head))


BLOCKS = st.lists(st.integers(1, 30), min_size=1, max_size=7) | st.builds(
    lambda one, other, layers: ([one, other] * layers)[:layers],
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 7),
)
UNITS = st.builds(UnitFlops, st.integers(0, 9), BLOCKS.map(tuple), st.integers(0, 40))


@given(counts(max_p=3, max_m=6, max_chunks=2), UNITS)
@settings(max_examples=200, deadline=None)
def test_a_stage_of_unequal_blocks_keeps_its_share_to_within_a_block(case, units):
    """Its share is what it would have if all blocks cost the same."""
    schedule = make_schedule(*case)
    split = balanced_layers(units, schedule.stages_by_rank)
    assert (len(split), sum(split)) == (schedule.num_stages, len(units.blocks))
    equal = splits.even_split(units, list(map(tuple, schedule.stages_by_rank)))
    mean = sum(units.blocks) / len(units.blocks)
    bounds = [0, *itertools.accumulate(split)]
    for (first, last), count in zip(itertools.pairwise(bounds), equal, strict=True):
        assert abs(sum(units.blocks[first:last]) - mean * count) <= max(units.blocks) + 1e-9


def test_a_split_that_ignores_costs_is_caught(monkeypatch):
    plain = balanced_layers

    def ignoring(units, stages_by_rank):
        blocks = (sum(units.blocks) / len(units.blocks),) * len(units.blocks)
        return plain(units._replace(blocks=blocks), stages_by_rank)

    monkeypatch.setitem(globals(), "balanced_layers", ignoring)
    with pytest.raises(AssertionError, match=r"\(3, 3\)"):
        assert_no_split_is_better(make_schedule("1f1b", 2, 4), UnitFlops(0, (9, 9, 1, 1, 1, 1), 0))


def test_a_split_that_is_given_is_taken():
    config = Config(model=ModelConfig(layers=6), grid=GridConfig(pp=2, stage_layers=(6, 0)))
    assert models.layer_split(config, make_schedule("1f1b", 2, 8)) == (6, 0)


def test_flops_of_stages():
    assert stage_flops(UnitFlops(3, (1, 2, 4), 5), (2, 0, 1)) == [(6, 0), (0, 0), (4, 5)]
