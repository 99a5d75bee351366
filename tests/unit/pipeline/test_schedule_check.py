"""The checker accepts what runs; for what does not, it names rank, position and instruction."""

import time
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from schedule_cases import Refused, counts, emulate

from mpipar.pipeline.check import check, check_lanes
from mpipar.pipeline.csv_format import parse_instruction
from mpipar.pipeline.engine import forward_only
from mpipar.pipeline.instructions import (
    Instr,
    Schedule,
    ScheduleError,
    lower,
)
from mpipar.pipeline.schedules.catalog import SCHEDULES, make_schedule


def with_comm(schedule):
    """The same schedule with its sends and receives stated."""
    programs = tuple(tuple(lower(schedule, pp_rank)) for pp_rank in range(schedule.pp_size))
    return replace(schedule, programs=programs, explicit_comm=True)


def edited(schedule, pp_rank, change):
    """The schedule with one rank's program changed: change(list) edits or returns another list."""
    program = list(schedule.programs[pp_rank])
    changed = change(program)
    program = changed if isinstance(changed, list) else program
    programs = list(schedule.programs)
    programs[pp_rank] = tuple(program)
    return replace(schedule, programs=tuple(programs))


def swap(one, other):
    """Exchange two positions."""

    def change(program):
        program[one], program[other] = program[other], program[one]

    return change


def at(program, text):
    """The position of an instruction given in its text form."""
    return [str(instr) for instr in program].index(text)


def linear(*orders):
    """A schedule with one stage a rank out of texts such as '0F0 0B0'."""
    programs = [[parse_instruction(text) for text in order.split()] for order in orders]
    m = 1 + max(instr.mb for instr in programs[0])
    full = tuple((*program, Instr("REDUCE_GRAD", stage)) for stage, program in enumerate(programs))
    return Schedule("mine", len(orders), len(orders), m, "linear", full)


def refusal(schedule):
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("name", SCHEDULES)
def test_full_lists_are_accepted_with_the_same_report(name):
    schedule = make_schedule(name, 4, 8)
    assert check(with_comm(schedule)) == check(schedule)


@pytest.mark.parametrize(
    ("name", "pp_rank", "change", "expected"),
    [
        ("1f1b", 1, swap(0, 3), "rank 1 position 0 (1B0): needs 1F0, which stands at 3"),
        (
            "1f1b",
            3,
            lambda program: program.remove(Instr("F", 3, 2)),
            "rank 3 position 4 (3B2): needs 3F2, which this rank never runs",
        ),
        (
            "1f1b",
            0,
            lambda program: program.remove(Instr("B", 0, 5)),
            "rank 0 position 16 (end of the program): 0B5 (or 0I5 and 0W5) is missing",
        ),
        (
            "1f1b",
            2,
            lambda program: program.insert(5, Instr("F", 2, 1)),
            "rank 2 position 5 (2F1): has already run at position 1",
        ),
        (
            "1f1b",
            2,
            lambda program: program.append(Instr("I", 2, 1)),
            "rank 2 position 17 (2I1): the other form of this backward has run at position 4",
        ),
        (
            "1f1b",
            1,
            lambda program: program.insert(0, Instr("F", 2, 0)),
            "rank 1 position 0 (2F0): stage 2 is not on this rank, which holds [1]",
        ),
        (
            "1f1b",
            1,
            lambda program: program.append(Instr("F", 1, 8)),
            "rank 1 position 17 (1F8): microbatch 8 does not exist, there are 8",
        ),
        (
            "1f1b",
            1,
            lambda program: program.append(Instr("F", 1, -1)),
            "microbatch -1 does not exist",
        ),
        (
            "1f1b",
            1,
            lambda program: program.append(Instr("X", 1, 0)),
            "rank 1 position 17 (1X0): only F B I W OVERLAP_F_B REDUCE_GRAD may appear",
        ),
        (
            "1f1b",
            1,
            lambda program: program.append(Instr("SEND_F", 1, 0)),
            "rank 1 position 17 (1SEND_F0): only F B",
        ),
        (
            "1f1b",
            1,
            lambda program: program.pop(),
            "position 16 (end of the program): 1REDUCE_GRAD is missing",
        ),
        ("1f1b", 1, swap(-1, -2), "rank 1 position 15 (1REDUCE_GRAD): stage 1 has a backward at"),
        (
            "1f1b",
            1,
            lambda program: program.append(Instr("REDUCE_GRAD", 1)),
            "rank 1 position 17 (1REDUCE_GRAD): the stage's gradients were reduced at 16",
        ),
        (
            "1f1b",
            1,
            lambda program: program[-1:],
            "rank 1 position 1 (end of the program): 1F0 is missing",
        ),
        ("zb-h1", 0, swap(4, 5), "rank 0 position 4 (0W0): needs 0I0, which stands at 5"),
        ("zb-h1", 2, lambda program: program.remove(Instr("W", 2, 3)), "2W3 is missing"),
    ],
)
def test_broken_orders_are_refused_by_name(name, pp_rank, change, expected):
    schedule = edited(make_schedule(name, 4, 8), pp_rank, change)
    assert expected in refusal(schedule)


def test_a_rank_that_hands_data_to_itself_keeps_the_order():
    schedule = make_schedule("zb-v", 2, 3)
    first, turned = (at(schedule.programs[1], text) for text in ("1F0", "2F0"))
    message = refusal(edited(schedule, 1, swap(first, turned)))
    assert f"position {first} (2F0): needs 1F0, which stands at {turned}" in message
    schedule = make_schedule("looped-bfs", 1, 2)
    assert "(0B1): needs the backward of 1F1" in refusal(edited(schedule, 0, swap(4, 7)))


@pytest.mark.parametrize(
    ("pp_rank", "change", "expected"),
    [
        (
            1,
            lambda program: program.remove(Instr("RECV_F", 1, 2)),
            "(1F2): the receive of its message is missing",
        ),
        (
            1,
            lambda program: program.remove(Instr("SEND_B", 1, 3)),
            "(1B3): the send of its message is missing",
        ),
        (
            1,
            lambda program: [
                instr if instr != Instr("RECV_F", 1, 2) else Instr("RECV_F", 1, 9)
                for instr in program
            ],
            "(1RECV_F9): microbatch 9 does not exist",
        ),
        (
            1,
            lambda program: [
                instr if instr != Instr("SEND_F", 1, 2) else Instr("SEND_F", 1, 3)
                for instr in program
            ],
            "(1SEND_F3): appears here a second time",
        ),
        (
            1,
            lambda program: [
                instr if instr != Instr("SEND_B", 1, 2) else Instr("RECV_B", 1, 2)
                for instr in program
            ],
            "(1RECV_B2): appears here a second time",
        ),
        (
            0,
            lambda program: program.append(Instr("SEND_B", 0, 2)),
            "(0SEND_B2): no pass of this rank has this message: wrong stage, microbatch or rank",
        ),
        (
            3,
            lambda program: program.insert(0, Instr("RECV_B", 3, 0)),
            "rank 3 position 0 (3RECV_B0): no pass of this rank has this message",
        ),
        (
            0,
            lambda program: program.insert(0, program.pop(at(program, "0SEND_F1"))),
            "rank 0 position 0 (0SEND_F1): the send is on the wrong side of its pass at position",
        ),
        (
            1,
            lambda program: program.append(program.pop(at(program, "1RECV_B4"))),
            "(1RECV_B4): the receive is on the wrong side of its pass at position",
        ),
    ],
)
def test_broken_messages_are_refused_by_name(pp_rank, change, expected):
    message = refusal(edited(with_comm(make_schedule("1f1b", 4, 8)), pp_rank, change))
    assert f"rank {pp_rank} position " in message
    assert expected in message


def test_a_circle_is_printed():
    """Both backwards first on rank 0, both forwards first on rank 1: each waits for the other."""
    message = refusal(linear("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert message.splitlines() == [
        "schedule mine: deadlock, these ranks wait for each other in a circle:",
        "  rank 0 position 1 (0B0) waits for rank 1 position 2 (1B0)",
        "  rank 1 position 1 (1F1) waits for rank 0 position 2 (0F1)",
    ]


def test_an_overlap_waits_for_both_its_inputs():
    """Two ranks that each need, inside one overlap, what the other's overlap makes."""
    check(linear("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"))
    check(linear("0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1"))
    one = "0F0 (0F1;0B0)OVERLAP_F_B 0B1"
    assert "rank 0 position 1 ((0F1;0B0)OVERLAP_F_B) waits for rank 1 position 1" in refusal(
        linear(one, "1F0 (1F1;1B0)OVERLAP_F_B 1B1")
    )
    assert "needs 0F0, which stands at 0" in refusal(linear("(0F0;0B0)OVERLAP_F_B"))


def test_numbers_that_do_not_fit_the_placement():
    schedule = make_schedule("1f1b", 4, 8)
    assert "do not fit the v placement" in refusal(replace(schedule, placement="v"))
    assert "3 programs" in refusal(replace(schedule, programs=schedule.programs[:3]))
    assert "rank 2 position 0" in refusal(edited(schedule, 2, lambda program: program.clear()))


@given(counts(max_p=4, max_m=5), st.booleans(), st.data())
@settings(max_examples=1000, deadline=None)
def test_the_verdict_is_that_of_acting_it_out(case, stated, data):
    """Random damage: the proof and the emulated engine agree on every schedule."""
    name, p, m, chunks = case
    schedule = make_schedule(name, p, m, chunks)
    if stated:
        schedule = with_comm(schedule)
    for _ in range(data.draw(st.integers(1, 2))):
        pp_rank = data.draw(st.integers(0, p - 1))
        size = len(schedule.programs[pp_rank])
        one, other = (data.draw(st.integers(0, size - 1)) for _ in range(2))
        near = min(one + 1, size - 1)
        kind = data.draw(st.sampled_from(["swap", "next", "next", "remove", "repeat", "relabel"]))
        change = {
            "swap": swap(one, other),
            "next": swap(one, near),
            "remove": lambda program, one=one: program.pop(one) and None,
            "repeat": lambda program, one=one, other=other: program.insert(other, program[one]),
            "relabel": lambda program, one=one, mb=other % m: program.__setitem__(
                one, program[one] if program[one].mb < 0 else program[one]._replace(mb=mb)
            ),
        }[kind]
        schedule = edited(schedule, pp_rank, change)
        if not schedule.programs[pp_rank]:
            return
    programs = [lower(schedule, pp_rank) for pp_rank in range(p)]
    try:
        emulate(schedule, programs)
        runs = True
    except Refused as reason:
        runs = False
        event(str(reason).split()[-1])
    event(f"runs {runs}")
    if runs:
        check(schedule)
    else:
        message = refusal(schedule)
        assert "rank " in message
        assert "position " in message


@given(counts(max_p=5, max_m=8))
@settings(max_examples=60, deadline=None)
def test_every_schedule_can_be_acted_out(case):
    name, p, m, chunks = case
    schedule = make_schedule(name, p, m, chunks)
    emulate(schedule, [lower(schedule, pp_rank) for pp_rank in range(p)])


@pytest.mark.slow
def test_a_step_of_64_ranks_is_checked_in_a_few_seconds():
    """Half a million instructions take 3 s of processor time; ten times that is not an accident."""
    schedule = make_schedule("interleaved", 64, 1024, 4)
    start = time.process_time()
    check(schedule)
    assert time.process_time() - start < 30


@given(counts(max_p=5, max_m=10))
@settings(deadline=None)
def test_messages_of_one_direction_have_one_order(case):
    schedule = make_schedule(*case)
    check_lanes(schedule)
    check_lanes(forward_only(schedule, range(schedule.num_microbatches)))


@pytest.mark.parametrize("kind", ["SEND_F", "RECV_F"])
def test_another_order_is_refused_where_nccl_carries_messages(kind):
    schedule = with_comm(make_schedule("gpipe", 2, 3))
    pp_rank, stage = (0, 0) if kind == "SEND_F" else (1, 1)
    program = [str(instr) for instr in schedule.programs[pp_rank]]
    two = [program.index(f"{stage}{kind}{mb}") for mb in (0, 2)]
    changed = edited(schedule, pp_rank, swap(*two))
    first, second = (2, 0) if kind == "SEND_F" else (0, 2)
    with pytest.raises(
        ScheduleError,
        match=(f"rank 0 runs 0SEND_F{first} where rank 1 runs 1RECV_F{second}.*MPIPAR_NCCL=no"),
    ):
        check_lanes(changed)
