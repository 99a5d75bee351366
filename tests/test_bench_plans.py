"""The plan of bench.interconnect: flags, sizes, groups and their sections; no MPI."""

import contextlib
import os
from types import SimpleNamespace

import pytest

from bench.interconnect import __main__ as interconnect
from bench.interconnect import buffers, plans
from bench.interconnect.buffers import Arena
from bench.interconnect.cases import COMM, Setup
from bench.interconnect.sampling import Progress
from mpipar import ops
from mpipar.errors import UsageError


def test_pairs_take_an_even_number_of_ranks():
    (one,) = plans.world_sections(["multi-bandwidth"], 5, (8,))
    assert one.groups == ((0, 1, 2, 3),)
    layout = plans.read_layout("dp=3", 3)
    assert plans.layout_sections(["multi-latency"], layout, (8,))[0].groups == ((0, 1),)


def test_sizes_begin_with_nothing():
    assert plans.geometric(0, 32, 2) == (0, 8, 16, 32)
    assert plans.geometric(0, 0, 2) == (0,)


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        ("latency", "mpipar.comm,mpi4py,mpi4py persistent"),
        ("latency --ways all", "all"),
        ("all-reduce --ways persistent", "mpi4py prepared"),
        ("latency --buffers cold --ways all", "mpipar.comm,mpi4py"),
        ("latency --transport staged", "mpipar.comm"),
        ("gather --transport staged", None),
        ("all-reduce --dtype bfloat16", "mpipar.comm"),
        ("reduce --dtype float16", None),
        ("all-gather --dtype bfloat16", "mpipar.comm,mpi4py"),
        ("latency --ways C", "C"),
        ("noise --ways mpipar.comm", "Python"),
        ("gather --ways mpipar.comm", None),
    ],
)
def test_ways_are_those_that_the_job_can_run(words, ways):
    args = interconnect.parse(words.split())
    wanted = interconnect.chosen_sections(args, 2)
    job = interconnect.chosen_job(args, interconnect.can_run_in_c(args) or None)
    if ways is None:
        with pytest.raises(UsageError, match="add a case or a way"):
            interconnect.chosen_to_run(args, wanted, job)
        return
    (one,) = interconnect.chosen_to_run(args, wanted, job)
    assert ",".join(job.ways(one)) == ways.replace("all", "mpipar.comm,mpi4py,mpi4py persistent,C")
    more = interconnect.parse(["gather", "reduce", *words.split()])
    every = interconnect.chosen_sections(more, 2)
    kept = interconnect.chosen_to_run(more, every, job)
    lines = plans.left_out(more.cases, None, every, job)
    assert len(lines) == (len(kept) < len(every))


def test_short_flags_are_those_of_nccl_tests():
    short = interconnect.parse("ring -b 16 -e 1K -f 4 -n 7 -w 0 -d float64".split())
    words = "ring --begin-bytes 16 --end-bytes 1K --factor 4 --iterations 7 --warm-up 0 --dtype"
    assert short == interconnect.parse([*words.split(), "float64"])
    assert interconnect.chosen_sizes(short) == (16, 64, 256, 1024)
    for words, flag in (("-b 8", "-b"), ("-b8", "-b"), ("--begin-bytes=8", "--begin-bytes")):
        with pytest.raises(UsageError, match=f"^--quick has sizes of its own: leave out {flag}, "):
            interconnect.parse(["--quick", *words.split()])


def test_sections_of_a_layout_are_its_groups_alone_and_together():
    layout = plans.read_layout("dp=2,tp=2", 4)
    found = plans.layout_sections(["all-reduce"], layout, (8,))
    assert [(one.axis, one.mode, one.groups) for one in found] == [
        ("dp", "alone", ((0, 2),)),
        ("dp", "alone", ((1, 3),)),
        ("dp", "together", ((0, 2), (1, 3))),
        ("tp", "alone", ((0, 1),)),
        ("tp", "alone", ((2, 3),)),
        ("tp", "together", ((0, 1), (2, 3))),
    ]


def test_all_that_can_be_overlapped_is_what_is_posted():
    found = interconnect.chosen_sections(interconnect.parse(["all", "--overlap", "3"]), 2)
    assert {one.num_tests for one in found} == {3}
    assert {one.title.removesuffix(" overlapped K=3") for one in found} == {
        "ring",
        "iall-reduce",
        "fan-in",
        "fan-out",
        "stage-chain hop",
        "stage-chain hops 1f1b",
        "stage-chain hops interleaved",
    }
    args = interconnect.parse(["all", "--overlap", "0", "--layout", "dp=2"])
    found = interconnect.chosen_sections(args, 2)
    assert {one.title for one in found} == {
        f"{name} overlapped K=0" for name in ("ring", "iall-reduce", "fan-in", "fan-out")
    }


# Elements from each of 4 ranks to each. 48 bytes are 12 elements of the busiest rank.
PARTS = {
    "uniform": [[3, 3, 3, 3]] * 4,
    "hot": [[3, 2, 2, 2]] * 4,  # 1.5, in whole elements
    "one-hot": [[3, 0, 0, 0]] * 4,
    "zipf": [[3, 2, 1, 1]] * 4,  # 3/1, 3/2, 3/3, 3/4
    "adversarial": [[0, 12, 0, 0], [0, 0, 12, 0], [0, 0, 0, 12], [12, 0, 0, 0]],
}


def test_parts_of_each_routing_are_as_counted_by_hand():
    args = interconnect.parse("all-to-allv --routing all -b 48 -e 48".split())
    arena = Arena(ops.make("cpu", "float32"), "reused", 1 << 12)
    seen = {}
    for section in interconnect.chosen_sections(args, 4):
        comm = SimpleNamespace(size=4, index=1)
        case = section.make(Setup(comm, None, arena, 48), COMM)
        seen[section.title.removeprefix("all-to-allv ")] = case.parts.tolist()
        assert case.volume()["size_bytes"] == 48
    assert seen == PARTS


def test_a_chain_of_one_stage_is_refused():
    with pytest.raises(UsageError, match=r"stage-chain: .* needs pp=2"):
        plans.layout_sections(["stage-chain"], plans.read_layout("dp=2", 2), (8,))


@pytest.mark.parametrize(
    ("words", "ranks", "line"),
    [
        ("stage-chain all-reduce --layout dp=2", 2, "needs pp=2 or more, --layout is dp=2"),
        ("all --layout dp=2", 2, "stage-chain is left out"),
        ("all --layout dp=2,pp=2", 4, ""),
        ("all-reduce --layout dp=2", 2, ""),
        ("all", 2, ""),
    ],
)
def test_a_chain_that_is_left_out_is_said(words, ranks, line):
    args = interconnect.parse(words.split())
    wanted = interconnect.chosen_sections(args, ranks)
    found = plans.left_out(args.cases, args.layout, wanted, plans.Job())
    assert len(found) == bool(line)
    assert line in "".join(found)


@pytest.mark.parametrize("wrong", ["dp=2", "dp=2,xp=2", "dp=2;tp=2", "dp=0,tp=4", ""])
def test_layout_that_does_not_fit_is_refused(wrong):
    with pytest.raises(UsageError, match="--layout"):
        plans.read_layout(wrong, 4)


@pytest.mark.parametrize("policy", ["rotated", "reused"])
def test_buffers_beyond_the_memory_of_the_host_are_refused(policy):
    arena = Arena(ops.make("cpu", "float32"), policy, 1 << 60)
    with pytest.raises(UsageError, match="--footprint"):
        arena.cut("send", 1, 8)


def test_buffers_of_all_ranks_of_a_host_count():
    """One rank may take 3/8 of the memory, two may not."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for ranks, fits in ((1, True), (2, False)):
        arena = Arena(ops.make("cpu", "float32"), "cold", 0, ranks=ranks)
        with contextlib.nullcontext() if fits else pytest.raises(UsageError, match="of 2 ranks"):
            arena.cut("send", 1, memory * 3 // 8 // 4)


def test_filling_buffers_is_progress(monkeypatch):
    monkeypatch.setattr(buffers, "TOUCHED_AT_ONCE", 256)
    progress = Progress()
    arena = Arena(ops.make("cpu", "float32"), "reused", 4 << 10, touched=progress.advance)
    arena.cut("send", 1, 8)
    assert progress.count == 4
    assert (arena.memory["send"] == 1).all()


def test_every_size_that_is_none_is_named_with_all_other_problems():
    words = "ring --begin-bytes 3x --end-bytes 4Q --footprint x --seconds 0 --layout dp=3".split()
    with pytest.raises(UsageError) as caught:
        interconnect.chosen_sections(interconnect.parse(words), 2)
    assert [text.split(":")[0].split(" is ")[0] for text in caught.value.problems] == [
        "--window, --seconds and --target must be above 0",
        "--begin-bytes '3x'",
        "--end-bytes '4Q'",
        "--footprint 'x'",
        "--layout dp=3",
    ]
