"""Every schedule by name: order, lowering, published integers, closed forms, messages."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import compute, counts

from mpipar.errors import UsageError
from mpipar.pipeline.check import check
from mpipar.pipeline.instructions import is_compute, lower, parts, receives, sends
from mpipar.pipeline.schedules.catalog import (
    FAMILIES,
    SCHEDULES,
    make_schedule,
    num_stages,
    schedule_problems,
)
from mpipar.study.schedules.forms import closed_form
from mpipar.study.schedules.simulate import Costs, simulate

SPLIT = tuple(name for name, family in FAMILIES.items() if family.split)

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


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_pictures_in_the_docstrings_are_the_schedules(name):
    """Pictures have 'p = 2, m = 3' and lines 'rank 0  F0 .. B0'; dots are idle time."""
    order = FAMILIES[name].order
    lines = [line.strip() for line in order.__doc__.splitlines()]
    pictures = [line for line in lines if line.startswith("rank ")]
    if name in ("dualpipe-v", "zb-v", "v-half"):
        assert not pictures  # their steps are spelt out instead
        return
    assert pictures
    sizes = next(line for line in lines if line.startswith("p = ")).replace(";", ",").split(",")
    given_counts = dict(size.split(" = ") for size in sizes if " = " in size)
    given_counts = {key.strip(): int(value) for key, value in given_counts.items()}
    schedule = make_schedule(name, given_counts["p"], given_counts["m"], given_counts.get("v"))
    for line in pictures:
        _, pp_rank, *tokens = line.split()
        program = [str(instr) for instr in compute(schedule, int(pp_rank))]
        if schedule.placement == "linear":
            program = [text.removeprefix(pp_rank) for text in program]
        shown = [token for token in tokens if token.strip(".")]
        assert shown == (program[: len(shown)] if tokens[-1] == "..." else program)


@given(counts())
@settings(max_examples=150, deadline=None)
def test_every_schedule_is_complete_and_can_run(case):
    name, p, m, chunks = case
    schedule = make_schedule(name, p, m, chunks)
    report = check(schedule)
    assert schedule.num_stages == num_stages(name, p, chunks)
    passes = Counter()
    for pp_rank in range(p):
        reduced = []
        for instr in schedule.programs[pp_rank]:
            if instr.kind == "REDUCE_GRAD":
                reduced.append(instr.stage)
                continue
            for part in parts(instr):
                assert part[1] not in reduced or part[0] not in "BIW"
                passes[part] += 1
                assert schedule.stage_to_rank[part[1]] == pp_rank
        assert sorted(reduced) == list(schedule.stages_by_rank[pp_rank])
    assert set(passes.values()) == {1}
    for stage in range(schedule.num_stages):
        for mb in range(m):
            kinds = {kind for kind in "FBIW" if (kind, stage, mb) in passes}
            assert kinds in ({"F", "B"}, {"F", "I", "W"})
            if name in SPLIT:
                assert kinds == {"F", "I", "W"}
            elif name != "dualpipe-v":
                assert kinds == {"F", "B"}
    assert len(report.peak_stash) == p


@given(counts(max_p=5, max_m=9))
@settings(max_examples=60, deadline=None)
def test_lowered_programs_match_each_other(case):
    """Each send has its receive at the peer; receives precede their passes, sends follow."""
    name, p, m, chunks = case
    schedule = make_schedule(name, p, m, chunks)
    sent, received = Counter(), Counter()
    for pp_rank in range(p):
        program = lower(schedule, pp_rank)
        assert (
            tuple(i for i in program if is_compute(i) or i.kind == "REDUCE_GRAD")
            == (schedule.programs[pp_rank])
        )
        for position, instr in enumerate(program):
            if instr.kind.startswith("SEND"):
                step = 1 if instr.kind == "SEND_F" else -1
                peer = schedule.stage_to_rank[instr.stage + step]
                sent[pp_rank, peer, instr.kind[-1], instr.stage + step, instr.mb] += 1
            elif instr.kind.startswith("RECV"):
                step = -1 if instr.kind == "RECV_F" else 1
                peer = schedule.stage_to_rank[instr.stage + step]
                received[peer, pp_rank, instr.kind[-1], instr.stage, instr.mb] += 1
            elif is_compute(instr):
                for wire in receives(schedule, instr):
                    between = program[program.index(wire) : position]
                    passes_between = sum(map(is_compute, between))
                    first = not any(map(is_compute, program[: program.index(wire)]))
                    assert passes_between == 1 or (first and passes_between == 0)
                wires = sends(schedule, instr)
                assert program[position + 1 : position + 1 + len(wires)] == wires
    assert sent == received
    assert set(sent.values()) <= {1}
    assert all(source != peer for source, peer, *_ in sent)


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
    assert list(check(make_schedule(name, 4, 8, chunks)).messages) == SENDS_4_8[name, chunks]


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
        found = check(make_schedule(name, p, count, chunks)).peak_stash
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
    if name in ("v-half", "v-min"):
        assert max(timeline.peak_stash) <= form.peak_stash[1]
    else:
        assert max(timeline.peak_stash) == form.peak_stash[1]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("v-half", "v-min")])
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
