"""mpipar net without ranks: flags, statistics, tables, files, pages, and who is slow."""

from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench import interconnect as old_name
from mpipar import cli
from mpipar.errors import DataError, UsageError
from mpipar.interconnect import arguments, compare, files, job, screen, vet
from mpipar.interconnect.arguments import BY, Arguments
from mpipar.interconnect.cases import BARE, CASES, COMM, ROUTINGS, At, shares
from mpipar.interconnect.groups import layout_sections, read_layout
from mpipar.interconnect.hosts import check_room
from mpipar.interconnect.statistics import (
    STUDENT,
    combined,
    median_interval,
    next_launch,
    sample_us,
    summary,
    two_modes,
)
from mpipar.study.plan.machine import SHEETS, load_machine


def row(size=8, us=2.0, via=COMM, case="all-reduce", times=None, **more):
    """A row as a launch writes it; times: of its samples."""
    times = [us] * 20 if times is None else times
    line = summary(times)
    return {
        "case": case, "via": via, "transport": "mpi-host", "axis": "world", "mode": "",
        "ranks": [0, 1], "link": "same node", "dtype": "float32", "buffers": "rotated",
        "window": 1, "per_sample": 1, "size_bytes": size, "count": size // 4,
        "bytes_on_wire_per_rank": size, "slowest_rank": 0, "slowest_share": 0.5, "checked": "ok",
        **line, "algbw_GBps": size / line["median_us"] * 1e-3,
        "busbw_GBps": size / line["median_us"] * 1e-3, "times_us": list(times), **more,
    }  # fmt: skip


HEAD = {
    "schema": files.SCHEMA, "hosts": "2 ranks on 1 host (a)", "library": "MPICH 5", "launcher": "x",
    "transport": "mpi-host", "crowded": False, "memory_copy_GBps": 10.0,
    "places": [{"host": "a"}, {"host": "a"}],
}  # fmt: skip

# --- flags


def parsed(*words):
    return cli.context_of(None, "net", list(words)).args


def test_the_flags_of_other_benchmarks():
    args = parsed(*"all-reduce -b 8 -e 1M -f 4 -n 100 -w 10 -d float64 -W 16".split())
    assert args == Arguments(("all-reduce",), 8, 1 << 20, 4.0, 100, 10, window=16, dtype="float64")
    assert job.sizes_of(args)[:3] == (8, 32, 128)
    assert job.sizes_of(parsed("-b", "0", "-e", "32")) == (0, 8, 16, 32)
    assert tuple(CASES) == arguments.CASES
    assert set(arguments.ROUTINGS) == set(ROUTINGS)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("allreduce", "did you mean all-reduce"),
        ("-b 1M -e 1K", "give -b at most -e"),
        ("--via comm,python", "give some of comm,mpi4py,c"),
        ("latency --layout dp=2", "run it without --layout"),
        ("compare one", "mpipar net compare BEFORE AFTER"),
        ("vet all-reduce", "mpipar net vet"),
        ("--quick --layout dp=2", "--quick"),
        ("--factor 1", "at least 1.01"),
        ("--dtype int8", "must be one of"),
    ],
)
def test_what_makes_no_sense_is_refused(words, text):
    with pytest.raises(UsageError, match=text):
        parsed(*words.split())


def test_old_names_of_flags_and_ways():
    words = "latency --ways mpipar.comm,C --stall-seconds=3 all".split()
    assert old_name.new_words(words) == ["latency", "--via", "comm,c", "--hang-stop=3"]
    assert old_name.new_words(["--ways=all"]) == ["--via=comm,mpi4py,c,algorithms"]


@pytest.mark.parametrize("name", old_name.GONE)
def test_flags_without_a_successor_say_what_to_type(name):
    with pytest.raises(UsageError, match=f"{name} is gone; (leave it out: |give -)"):
        old_name.new_words(["latency", f"{name}=1"])


def test_ways_that_a_case_can_go():
    def ways(name, **flags):
        (section,) = job.world_sections([CASES[name]], 2)
        return job.ways_of(Arguments(via="comm,mpi4py,c,algorithms", **flags), section)

    assert ways("all-reduce") == (COMM, BARE, "C", *BY)
    assert ways("ring") == (COMM, BARE)
    assert ways("all-reduce", transport="nccl") == (COMM,)
    assert ways("all-reduce", dtype="bfloat16") == (COMM,)
    assert ways("iall-reduce", dtype="bfloat16") == ()


def test_groups_of_a_layout_run_alone_and_together():
    found = layout_sections([CASES["ring"]], read_layout("dp=2,tp=2", 4))
    assert [(one.axis, one.mode, one.groups) for one in found] == [
        ("dp", "alone", ((0, 2),)), ("dp", "together", ((0, 2), (1, 3))),
        ("tp", "alone", ((0, 1),)), ("tp", "together", ((0, 1), (2, 3))),
    ]  # fmt: skip
    with pytest.raises(UsageError, match="is for 8 ranks, not 4"):
        read_layout("dp=8", 4)


def test_room_is_that_of_all_ranks_of_a_host():
    check_room(1 << 30, 2, 2 << 30)
    with pytest.raises(UsageError, match=r"on each of 4 ranks .* 2.0 GiB free: give a smaller -e"):
        check_room(1 << 30, 4, 2 << 30)


# --- cases


def at_of(index, ranks, size, **more):
    comm = SimpleNamespace(group_rank=index, size=ranks)
    ops = SimpleNamespace(dtype=np.dtype("float32"))
    return At(comm, None, ops, size, **more)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_what_arrives_is_all_that_is_given(name, ranks):
    """Every element of a result comes from somewhere, inside what its senders give."""
    case = CASES[name]
    ranks = 2 if case.pair else ranks
    for index in range(ranks):
        at = at_of(index, ranks, 48 * ranks, window=3)
        shape = (case.taken or case.given)(at)
        pieces = case.pieces(at)
        covered = sorted(k for one in pieces for k in range(one.start, one.start + one.count))
        assert covered == list(range(int(np.prod(shape))))
        for one in pieces:
            for sender in one.senders:
                given = int(np.prod(case.given(at_of(sender, ranks, 48 * ranks, window=3))))
                assert one.offset + one.count <= given


def test_bus_factors_are_those_of_nccl_tests():
    factors = {name: case.bus(4) for name, case in CASES.items()}
    assert factors["all-reduce"] == factors["iall-reduce"] == 1.5
    assert {factors[name] for name in ("all-gather", "reduce-scatter", "all-to-all")} == {0.75}
    assert {factors[name] for name in ("broadcast", "latency", "ring", "stage-chain")} == {1.0}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("experts", [4, 8])
def test_routings_share_all_selections(name, experts):
    for index in range(4):
        found = shares(name, experts, index, 4)
        assert found.sum() == pytest.approx(1)
        assert (found >= 0).all()
        assert (found <= 1).all()
    if name == "hot":
        assert found[0] == pytest.approx(2 * found[1])
    if name == "zipf":
        assert (np.diff(found) <= 0).all()


# --- statistics


def test_a_sample_lasts_from_first_entry_to_last_exit_of_each_clock():
    entered, left = np.array([[0, 10], [1, 12]]) * 1000, np.array([[5, 15], [4, 30]]) * 1000
    assert sample_us(entered, left, [0, 0]).tolist() == [5, 20]
    assert sample_us(entered, np.add(left, [[0], [10**9]]), [0, 0])[0] > 10**5
    assert sample_us(entered, left, [0, 1]).tolist() == [5, 18]


def test_the_interval_of_a_median_holds_as_often_as_it_says():
    rng = np.random.default_rng(1)
    held = sum(
        low <= 1.0 <= high
        for low, high in (median_interval(rng.lognormal(0, 1, 60)) for _ in range(1000))
    )
    assert 930 <= held <= 1000
    assert median_interval([3, 1, 2]) == (1, 3)


def test_one_more_launch_lies_in_the_interval():
    rng = np.random.default_rng(2)
    held = 0
    for _ in range(1000):
        *some, other = np.exp(rng.normal(0, 0.1, 6))
        low, high = next_launch(some)
        held += low <= other <= high
    assert 930 <= held <= 970


def test_two_launches_in_different_modes_say_no_more_than_their_range():
    assert next_launch([2.0, 9.0]) == (2.0, 9.0)
    assert next_launch([2.0, 2.1, 9.0, 9.2, 2.05]) == (2.0, 9.2)
    low, high = next_launch([2.0, 2.1, 2.05, 1.95, 2.0])
    assert 1.6 < low < 1.95
    assert 2.1 < high < 2.5
    assert len(STUDENT) == 20


@pytest.mark.parametrize(
    ("fast", "slow", "seen"), [(60, 40, True), (95, 5, False), (100, 0, False)]
)
def test_two_modes_are_seen(fast, slow, seen):
    rng = np.random.default_rng(3)
    times = np.concatenate([rng.normal(2, 0.1, fast), rng.normal(9, 0.4, slow)])
    found = two_modes(times)
    assert (found is not None) == seen
    if seen:
        assert found == pytest.approx((2, 9, 0.4), rel=0.05)
        assert "two modes: all-reduce 8 B comm: 60% near" in screen.text([row(times=times)])


def test_no_tail_from_few_samples():
    assert summary(range(1, 100))["p99_us"] is None
    assert summary(range(1, 102))["p99_us"] == pytest.approx(100, rel=0.01)
    assert " - " in screen.text([row()]).splitlines()[2]


# --- screen


def test_rows_of_several_launches_are_one():
    rows = combined([row(us=us) for us in (2.0, 2.2, 2.1)])
    (one,) = rows
    assert (one["launches"], one["median_us"], one["best_us"]) == (3, 2.1, 2.0)
    assert len(one["times_us"]) == 60
    text = screen.text(rows)
    assert "3 launches" in text
    assert "low" in text.splitlines()[1]
    assert max(map(len, text.splitlines())) <= 100


def test_a_faster_algorithm_is_named():
    rows = [row(us=10.0), row(us=5.0, via="by window"), row(us=9.5, via="by ring")]
    assert screen.best_algorithms(rows).endswith("window 2.0 times at 8 B")
    assert screen.best_algorithms([row(), row(via="by ring")]) == ""


def test_groups_at_once_show_the_slowest_and_the_contention():
    pair = {"axis": "dp", "mode": "together"}
    rows = [
        row(us=2.0, axis="dp", mode="alone"),
        row(us=3.0, **pair),
        row(us=5.0, ranks=[2, 3], **pair),
    ]
    assert "2.50 times as long at 8 B" in screen.contention(rows)[0]
    assert "ranks 2,3 (same node), all dp groups, the slowest" in screen.text(rows)


# --- files


def run_file(tmp_path, rows, name="rows.jsonl"):
    path = tmp_path / name
    lines = [files.line("head", HEAD), *(files.line("row", one) for one in rows)]
    path.write_text("".join([*lines, files.line("end", {"refused": []})]))
    return str(path)


def test_a_result_comes_back_as_it_was_written(tmp_path):
    rows = [row(8), row(64, via=BARE)]
    (found,) = files.read(run_file(tmp_path, rows))
    assert found.rows == rows
    text = files.as_csv(rows)
    assert text.count("\n") == 3
    assert "times_us" not in text
    cut = Path(run_file(tmp_path, rows))
    cut.write_text(cut.read_text()[:-60])  # killed while writing
    assert files.read(str(cut))[0].rows == rows[:1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("{}\n", "is this a file"),
        ('{"kind":"head","schema":2}\n', "schema 2, this reads 3"),
        ('{"kind":"row"}\n', "is this a file"),
        ('{"kind":"head","schema":3}\n{"kind":"other"}\n', "rows:2: "),
        ("nonsense\n", "is this a file"),
    ],
)
def test_other_files_are_refused(tmp_path, text, words):
    path = tmp_path / "rows"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        files.read(str(path))


@pytest.mark.parametrize("axes", [("host",), ("hosts",), ("host", "hosts")])
def test_what_is_planned_on_a_sheet_takes_as_long_as_was_measured(tmp_path, axes):
    """Sums of 4 ranks of a host in 0.5 ms, of 4 or 8 on all hosts in 2 ms."""
    rows, size, measured = [], 1 << 20, {}
    for axis in axes:
        ranks, us = (4, 500.0) if axis == "host" else (4 * len(axes), 2000.0)
        busbw, measured[ranks] = 2 * (ranks - 1) / ranks * size / us * 1e-3, us * 1e-6
        more = {"axis": axis, "ranks": list(range(ranks)), "busbw_GBps": busbw}
        rows += [row(8, 5.0, **more), row(size, us, **more)]
    path = tmp_path / "here.toml"
    path.write_text(files.sheet((SHEETS / "cpu.toml").read_text(), rows))
    machine = load_machine(str(path))
    assert machine.links[0].joins == (4 if "host" in axes else 1)
    for ranks, seconds in measured.items():
        assert machine.all_reduce(size, ranks) == pytest.approx(seconds, rel=0.05)


# --- compare


def verdict(before, after):
    ((line,), missing) = compare.compared(before, after)
    assert not missing
    return line["verdict"]


def test_slower_is_what_every_launch_shows():
    five = [row(us=us) for us in (2.0, 2.1, 2.05, 2.2, 2.1)]
    assert verdict(five, [row(us=us * 1.3) for us in (2.0, 2.1, 2.05)]) == "slower"
    assert verdict([row(us=us * 1.3) for us in (2.0, 2.1, 2.05)], five) == "faster"
    assert verdict(five, [row(us=us * 1.04) for us in (2.1, 2.2, 2.15)]) == ""
    assert verdict(five, [row(us=us) for us in (2.1, 9.0, 9.1)]) == ""
    assert verdict([row(us=2.0)], [row(us=2.6)]) == ""  # launches differ by that much
    assert verdict([row(us=2.0)], [row(us=3.2)]) == "slower"


def test_compare_ends_with_one_if_something_is_slower(tmp_path, capsys):
    before = run_file(tmp_path, [row(8), row(64)], "before")
    after = run_file(tmp_path, [row(8, 9.0)], "after")
    args = parsed("compare", before, after)
    session = SimpleNamespace(launcher=SimpleNamespace(rank=0), facts={})
    from mpipar.interconnect import program

    assert program.run(session, args) == 1
    out = capsys.readouterr().out
    assert "missing: all-reduce, 64 bytes, comm" in out
    assert out.endswith("1 of 1 slower, 1 missing\n")
    assert max(map(len, out.splitlines())) <= 100
    assert program.run(session, parsed("compare", before, before)) == 0
    assert program.run(session, parsed("show", before)) == 0


# --- vet

HOSTS = ["a", "a", "b", "b", "c", "c", "d", "d"]
PLACES = [{"host": host} for host in HOSTS]


def found_of(slow_ranks=(), slow_pairs=(), factor=3):
    """What is measured on a healthy job, but for these."""
    rng = np.random.default_rng(4)
    pairs = {}
    for what, base in (("latency", 2e-6), ("transfer", 1e-4)):
        pairs[what] = {
            pair: base
            * (1 + 2 * (HOSTS[pair[0]] != HOSTS[pair[1]]))
            * rng.normal(1, 0.02)
            * (factor if {*pair} & {*slow_ranks} or pair in slow_pairs else 1)
            for pair in combinations(range(8), 2)
        }
    return pairs


def verdict_of(found, sheet=None):
    return vet.verdict(vet.slow_ones(found, PLACES, 1.5, sheet), HOSTS)


def test_a_healthy_job_is_vetted():
    assert verdict_of(found_of()) == [f"Vetted: {host}" for host in "abcd"]


def test_slow_hosts_are_cordoned():
    lines = verdict_of(found_of(slow_ranks=(4, 5)))
    assert lines[:3] == ["Vetted: a", "Vetted: b", "Vetted: d"]
    assert lines[3].startswith("Cordon: c (rank 4: latency 2.9")
    assert lines[-1] == "--exclude=c"
    assert "Slow link" not in "\n".join(verdict_of(found_of(slow_ranks=(4, 5), factor=8)))


def test_a_slow_link_is_named_with_its_ends():
    lines = verdict_of(found_of(slow_pairs=((1, 6),)))
    assert lines[0].startswith("Slow link: a - d (ranks 1 and 6): latency 3.")
    assert "Cordon" not in "\n".join(lines)


def test_a_sheet_says_what_is_normal():
    links = {"same node": (20.0, 3.0), "between nodes": (20.0, 3.0)}
    lines = verdict_of(found_of(), links)
    # Both sizes between hosts, and transfers inside them.
    assert sum(line.startswith("Slow link") for line in lines) == 24 + 24 + 4


@pytest.mark.parametrize("ranks", [2, 3, 6, 7])
def test_every_pair_meets_once_and_nobody_is_in_two_at_once(ranks):
    rounds = vet.rounds_of(ranks)
    assert sorted(pair for turn in rounds for pair in turn) == list(combinations(range(ranks), 2))
    for turn in rounds:
        assert len({one for pair in turn for one in pair}) == 2 * len(turn)
