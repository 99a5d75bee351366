"""Several launches of bench.interconnect together: spread, comparison, overhead."""

import json
import os
import signal
import subprocess
import types
from pathlib import Path

import numpy as np
import pytest
from bench_rows import ALONE, BARE, COMM, row, write_file
from helpers import REPOSITORY

from bench import compare, table
from bench.interconnect import __main__ as interconnect
from bench.interconnect import between, launches, ways
from mpipar.errors import UsageError


def shifted(rng, factor, launches):
    return [row(median=10 * factor * rng.normal(1, 0.02)) | {"launch": n} for n in range(launches)]


def test_compare_says_slower_only_when_the_launches_support_it(rng):
    (one,) = compare.compare_rows(shifted(rng, 1, 6), shifted(rng, 1.3, 6))
    assert one.verdict == "slower"
    (one,) = compare.compare_rows(shifted(rng, 1.3, 6), shifted(rng, 1, 6))
    assert one.verdict == "faster"
    same = [
        compare.compare_rows(shifted(rng, 1, 6), shifted(rng, 1, 6))[0].verdict for _ in range(100)
    ]
    assert same.count("not shown") >= 88
    (one,) = compare.compare_rows(shifted(rng, 1, 2), shifted(rng, 3, 2))
    assert one.verdict == "not shown"
    (nothing,), little = compare.too_few([one])
    assert (nothing[:33], little) == ("2 and 2 launches can show nothing", [])


def test_each_row_needs_enough_launches(rng):
    """4 and 3 launches are more than 3 and 9, but can show less."""
    found = [
        compare.compare_rows(shifted(rng, 1, a), shifted(rng, 1, b))[0]
        for a, b in ((3, 9), (4, 3), (1, 5), (5, 5))
    ]
    nothing, little = compare.too_few(found)
    assert [text.split(" launches")[0] for text in (*nothing, *little)] == ["4 and 3", "1 and 5"]


def test_a_row_that_b_lacks_fails_the_check(tmp_path, capsys):
    whole = [row(), row(case="ring")]
    a, b, c = (
        write_file(tmp_path / name, rows, launches=5)
        for name, rows in (("a", whole), ("b", whole[:1]), ("c", whole))
    )
    for other, code in ((b, 1), (c, 0)):
        assert compare.main([a, other, "--check"], None) == code
        assert ("not in B: 1 row of ring" in capsys.readouterr().out) == bool(code)
    assert compare.main([a, b], None) == compare.main([b, a, "--check"], None) == 0


def test_several_launches_are_told_by_all_of_them():
    """Each launch has its own skew, overlap and rate; the middle one counts."""
    rows = [
        row(
            median=median,
            skew_us=skew,
            overlap_percent=skew,
            launch=number,
            bound_percent=100 / median,
            most_to_peer_bytes=64,
        )
        for number, (median, skew) in enumerate([(10, 8), (20, 2), (40, 3)])
    ]
    (one,) = between.combined(rows)
    assert (one["median_us"], one["skew_us"], one["overlap_percent"]) == (20, 3, 3)
    assert one["bound_percent"] == pytest.approx(5)
    assert one["most_to_peer_bytes"] == 64  # bytes do not follow the time


def test_a_start_is_compared_with_a_whole_sample():
    """Of 64 messages in a sample each takes 1 us; starts 2 us apart are a small part of it."""
    assert [
        table.cells(row(median=1.0, skew_us=2.0, per_sample=count))[""] for count in (1, 64)
    ] == ["~", ""]


def test_what_rows_say_together_is_said_of_several_launches_too(capsys):
    rows = []
    for launch in (1, 2, 3):
        rows += [
            row("pairs latency", ranks=pair, median=(5.0, 6.0, 50.0)[number] + launch)
            for number, pair in enumerate([(0, 1), (0, 2), (1, 2)])
        ]
        rows += [
            row(axis="dp", mode=mode, median=median + launch)
            for mode, median in (("alone", 8.0), ("together", 18.0))
        ]
        rows.append(row("noise", "Python", size=0))
        rows[-6:] = [one | {"launch": launch} for one in rows[-6:]]
    launches.print_outcome(rows, 3)
    text = capsys.readouterr().out
    assert "pairs latency, mpipar.comm, median_us of 1024 bytes" in text
    assert "slow: ranks 1 and 2 (same node): 52.0 us, 6.5 times the median pair" in text
    assert [text.count(f"# noise, launch {launch}: ") for launch in (1, 2, 3)] == [1] * 3
    assert text.split("# contention: ")[1].split()[-1] == "2"  # 20 us over 10


@pytest.mark.parametrize("code", [0, 1])
def test_a_launcher_that_starts_nothing_is_named(monkeypatch, tmp_path, code):
    """Rows of an earlier run in the file are not taken for its own."""
    path = write_file(tmp_path / "old.jsonl", [row()])
    monkeypatch.setattr(launches, "run_job", lambda *_, **options: code)
    argv = ["latency", "--start", "true", "--json", path]
    with pytest.raises(UsageError, match=f"--start true: ended with {code}, and no rank has"):
        launches.run(ALONE, interconnect.parse(argv), argv)


def test_time_for_all_launches_is_needed():
    argv = ["--quick", "--seconds", "14"]
    with pytest.raises(UsageError, match="5 launches take 15 s; give that, or fewer --launches"):
        launches.run(ALONE, interconnect.parse(argv), argv)


def test_rounds_within_a_launch_are_not_launches(rng):
    rounds = [[one | {"launch": 0} for one in shifted(rng, factor, 9)] for factor in (1, 3)]
    (one,) = compare.compare_rows(*rounds)
    assert (one.launches, one.p_value) == ((1, 1), 1.0)
    assert one.a_us == pytest.approx(sorted(row["median_us"] for row in rounds[0])[4])


@pytest.mark.parametrize(
    ("factor", "width", "verdict"),
    [
        (1.6, 0.01, "slower"),
        (1.4, 0.01, "not shown"),
        (1.6, 0.5, "not shown"),
        (0.6, 0.01, "faster"),
    ],
)
@pytest.mark.parametrize("more", [1, 5])
def test_one_launch_shows_large_factors_whose_intervals_are_apart(factor, width, verdict, more):
    def side(median, launches):
        return [
            row(median=median)
            | {"launch": n, "low_us": median * (1 - width), "high_us": median * (1 + width)}
            for n in range(launches)
        ]

    (one,) = compare.compare_rows(side(10.0, 1), side(10.0 * factor, more))
    assert one.verdict == verdict
    assert compare.shown_verdict(one).endswith("one launch") == (verdict != "not shown")


def test_a_large_factor_among_many_rows_is_found(rng):
    sizes = [4 << k for k in range(18)]
    a, b = (
        [
            one | {"size_bytes": size}
            for size in sizes
            for one in shifted(rng, 2 if slow and size == 64 else 1, 5)
        ]
        for slow in (False, True)
    )
    found = {
        dict(zip(between.KEY, one.key, strict=True))["size_bytes"]: one
        for one in compare.compare_rows(a, b)
    }
    assert found[64].verdict == "slower"
    assert not any(compare.discoveries([one.p_value for one in found.values()]))


@pytest.mark.parametrize(
    ("launches", "factor", "code", "said"),
    [
        (5, 2.0, 1, "1 of 1 rows are slower in B"),
        (5, 1.0, 0, "0 of 1 rows are slower in B"),
        (5, 0.5, 0, "0 of 1 rows"),
        (1, 2.0, 1, "slower, one launch"),
        (1, 1.2, 0, "not shown"),
    ],
)
def test_check_sets_the_exit_code(tmp_path, rng, capsys, launches, factor, code, said):
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_file(a, [row(times=rng.normal(10, 0.1, 50))], launches=launches)
    write_file(b, [row(times=rng.normal(10 * factor, 0.1, 50))], launches=launches)
    assert compare.main([str(a), str(b), "--check"], None) == code
    assert said in capsys.readouterr().out
    assert compare.main([str(a), str(b)], None) == 0


def test_check_refuses_launches_that_can_show_nothing(tmp_path):
    path = write_file(tmp_path / "a.jsonl", [row()], launches=2)
    with pytest.raises(UsageError, match="--check: 2 and 2 launches can show nothing"):
        compare.main([path, path, "--check"], None)


@pytest.mark.parametrize(
    ("size", "bare", "ours", "kept"),
    [
        (8, 2.0, 2.5, True),
        (8 << 10, 4.0, 4.7, False),
        (64 << 10, 8.0, 11.0, True),
        (1 << 20, 60.0, 61.7, True),
        (1 << 20, 60.0, 62.0, False),
    ],
)
def test_cost_of_the_wrapper_is_checked_where_it_is_promised(size, bare, ours, kept):
    rows = [row("latency", BARE, size, median=bare) | {"launch": n} for n in range(3)]
    rows += [row("latency", COMM, size, median=ours) | {"launch": n} for n in range(3)]
    (line,) = ways.compared(rows)
    assert line["record_us"] == pytest.approx(ours - bare)
    assert (line["launches"], line["C_us"], line["mpi4py_over_C"]) == (3, "-", "-")
    assert (ways.latency_problems([line]) == []) is kept


def test_ways_stand_beside_c_and_beside_osu(tmp_path, monkeypatch, capsys):
    times = {"C": 1.0, BARE: 1.5, "mpi4py persistent": 1.2, COMM: 2.0}
    rows = [row("latency", via, 8, median=time) | {"launch": 0} for via, time in times.items()]
    (line,) = ways.compared(rows)
    assert (line["mpi4py_over_C"], line["prepared_over_C"]) == (1.5, 1.2)
    assert line["record_us"] == pytest.approx(0.5)
    assert ways.with_osu([line]) == [line]  # nothing of OSU is installed here
    assert ways.osu_numbers("# OSU\n# Size  MB/s\n8   16.0\n16  16.0\n", "bandwidth") == {
        8: 0.5,
        16: 1.0,
    }
    program = tmp_path / "osu_latency"
    program.write_text("#!/bin/sh\n[ $PMI_RANK = 0 ] && echo '8  1.25'\nexit 0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert [one["osu_us"] for one in ways.with_osu([line])] == [1.25]
    for bad, why in (("exit 3", "non-zero exit status 3"), ("sleep 9", "timed out after 1 ")):
        program.write_text(f"#!/bin/sh\n{bad}\n")
        monkeypatch.setattr(ways, "OSU_SECONDS", 1)
        assert ways.with_osu([line]) == [line]
        told = capsys.readouterr().err
        assert told.startswith("osu_latency is left out: ")
        assert why in told


@pytest.mark.parametrize(
    ("degrees", "known"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (1000, 1.962)],
)
def test_quantiles_of_student_are_those_of_the_tables(degrees, known):
    assert between.quantile(degrees) == pytest.approx(known, abs=6e-4)


def test_row_over_launches_has_the_interval_of_another_launch():
    medians = (10.0, 11.0, 12.0, 11.5)
    rows = [row(median=median) | {"launch": n} for n, median in enumerate(medians)]
    (one,) = between.combined(rows)
    logs = np.log(medians)
    half = 3.182 * logs.std(ddof=1) * np.sqrt(1.25)
    assert one["low_us"] == pytest.approx(np.exp(logs.mean() - half), rel=1e-3)
    assert one["high_us"] == pytest.approx(np.exp(logs.mean() + half), rel=1e-3)
    assert (one["launches"], one["best_us"], one["worst_us"]) == (4, 10.0, 12.0)
    assert one["within_percent"] == 0.0
    assert one["algbw_GBps"] == pytest.approx(1024 / 11.25e3)
    text = table.as_text(rows)
    assert "4 launches; low, high: another launch's median, 95 %" in text
    assert text.count("\n") == 2
    assert "low, high: within this launch" in table.as_text(rows[:1])


def test_sizes_rounded_to_the_same_one_are_no_more_launches():
    rows = [row(median=10.0 + more) | {"launch": n} for n in (0, 1) for more in (-2 * n, 2 * n)]
    (one,) = between.combined(rows)
    assert (one["launches"], one["median_us"]) == (2, 10.0)


def test_interval_of_five_launches_holds_another_launch(monkeypatch):
    """Recorded launches of real jobs. The broken twin takes the interval of the mean of five."""
    path = REPOSITORY / between.RESULT
    recorded = json.loads(path.read_text())["medians_us"].values()
    assert len(recorded) >= 10
    assert min(map(len, recorded)) >= between.LEAST_LAUNCHES

    def held():
        return np.mean([between.held_share(medians, 200) for medians in recorded])

    def of_the_mean(medians):
        logs = np.log(medians)
        half = between.quantile(4) * logs.std(ddof=1) / np.sqrt(5)
        return np.exp(logs.mean() - half), np.exp(logs.mean() + half)

    assert held() >= 0.9
    monkeypatch.setattr(between, "next_launch", of_the_mean)
    assert held() < 0.9


def test_a_first_launch_that_is_refused_keeps_what_the_file_had(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    text = Path(write_file(path, [row()])).read_text()
    monkeypatch.setattr(launches, "run_job", lambda session, command, **options: 2)
    argv = ["latencies", "--launches", "3", "--json", str(path)]
    assert launches.run(ALONE, interconnect.parse(argv), argv) == 2
    assert path.read_text() == text


def test_launch_is_the_same_command_without_what_starts_launches():
    class Flags:
        start = "mpiexec -n 3"

    argv = ["latency", "--launches", "2", "--json", "f", "--quick", "--start=mpiexec -n 3"]
    words = launches.own_command(Flags, argv, 2, "f")
    assert words[:3] == ["mpiexec", "-n", "3"]
    assert words[4:] == [
        "-m",
        "bench.interconnect",
        "latency",
        "--quick",
        "--json",
        "f",
        "--launch",
        "2",
    ]
    Flags.start = None
    assert Path(launches.own_command(Flags, argv, 2, "f")[0]).name == "mpiexec"


@pytest.mark.parametrize(
    ("status", "refused", "keep", "said"),
    [
        ("interrupted", (), 0, "interrupted in 2 of 2 launches"),
        ("complete", (), -5, "cut off in 1 of 2 launches"),
        (
            "complete",
            ["ring, mpi4py: wrong"],
            0,
            "2 cases refused, the first is ring, mpi4py: wrong",
        ),
        ("complete", (), 0, ""),
    ],
)
def test_readers_say_what_a_file_lacks(tmp_path, capsys, status, refused, keep, said):
    path = tmp_path / "a.jsonl"
    write_file(path, [row()], status, 2, refused)
    path.write_text(path.read_text()[: keep or None])
    for module, words in ((table, [path]), (compare, [path, path])):
        assert module.main(list(map(str, words)), None) == 0
        out, err = capsys.readouterr()
        assert "all-reduce" in out
        lines = [line for line in err.splitlines() if " launches " not in line]
        assert lines == [f"{path}: rows may be missing: {said}"] * bool(said) * len(words)


@pytest.mark.parametrize(
    ("deaf", "code"),
    [
        ((), -signal.SIGINT),
        ((signal.SIGINT,), -signal.SIGTERM),
        ((signal.SIGINT, signal.SIGTERM), -signal.SIGKILL),
    ],
)
def test_job_that_did_not_hear_of_ctrl_c_is_told(monkeypatch, deaf, code):
    class Job(subprocess.Popen):
        def send_signal(self, number):
            super().send_signal(number)
            if number not in deaf:
                self.wait(60)  # it ends of this signal, late on a busy machine

    monkeypatch.setattr(launches.subprocess, "Popen", Job)
    monkeypatch.setattr(launches, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(launches, "LOOK_SECONDS", 0.02)
    session = types.SimpleNamespace(stop_requested=True)
    signs = (signal.SIGINT, signal.SIGTERM)
    before = [
        signal.signal(sign, signal.SIG_IGN if sign in deaf else signal.SIG_DFL) for sign in signs
    ]  # which the job inherits; tests in the background ignore SIGINT
    try:
        assert launches.run_job(session, ["sleep", "60"]) == code
    finally:
        for sign, handler in zip(signs, before, strict=True):
            signal.signal(sign, handler)


def test_job_that_ends_by_itself_is_not_told(monkeypatch):
    monkeypatch.setattr(launches, "LOOK_SECONDS", 0.02)
    session = types.SimpleNamespace(stop_requested=True)
    assert launches.run_job(session, ["sh", "-c", "exec sleep 0.1"]) == 0


def test_job_that_runs_is_left_alone(monkeypatch):
    monkeypatch.setattr(launches, "PATIENCE_SECONDS", 0.01)
    assert launches.run_job(ALONE, ["sh", "-c", "sleep 0.3; exit 7"]) == 7


def test_launches_of_a_quick_run_share_its_time(monkeypatch, tmp_path):
    """A first launch that takes too long leaves less time to the later ones."""
    now, commands = [100.0], []

    def job(session, command, **options):
        commands.append(command)
        (tmp_path / "rows").write_text(f"{command}\n")
        now[0] += 50.0 if len(commands) == 1 else 10.0
        return 0

    monkeypatch.setattr(launches, "run_job", job)
    monkeypatch.setattr(launches, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    argv = ["--quick", "--seconds", "90", "--launches", "3"]
    args = interconnect.parse(argv)
    assert launches.run_jobs(ALONE, args, argv, 3, str(tmp_path / "rows")) == 0
    assert [command[-2:] for command in commands] == [
        ["--seconds", "28.0"],
        ["--seconds", "18.0"],
        ["--seconds", "28.0"],
    ]
    own = commands[1][commands[1].index("bench.interconnect") + 1 :]
    assert interconnect.parse(own).seconds == 18.0
