"""Steps on two hosts: bench.step --cable measures them, bench.verify --goals predicts them."""

import contextlib
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from bench_rows import ALONE
from helpers import OVERSUBSCRIBED, REPOSITORY, find_launcher, run_command
from machine_models import config_of, machine
from program import one_block

from bench import verify
from bench.interconnect import two_hosts
from bench.interconnect.launches import environment_of_jobs
from bench.interconnect.two_hosts import missing
from bench.machine import measuring, units
from bench.machine.measuring import SCHEDULES, layouts
from bench.machine.predicted import Subject, line
from bench.step import __main__ as step
from bench.step import cable
from mpipar.errors import EnvironmentProblem, UsageError
from mpipar.job.environment import THREAD_VARIABLES
from mpipar.pipeline.costs import Costs
from mpipar.plan import machine_file
from mpipar.plan.machine import STREAM

SIZES = "--layers 2 --d-model 24 --heads 4 --seq-len 20 --batch-size 4 --vocab-size 31 --repeats 2"


def test_a_gain_is_that_of_the_same_repetition():
    """A spell that makes one repetition of all sides ten times slower changes nothing."""
    spell = np.array([1, 10, 1])[:, None]
    seconds = np.zeros((2, 2, 3, 3))  # ranks, sides, repetitions, (two parts, communication)
    seconds[0, 0], seconds[1, 0] = spell * (0.6, 0.2, 0.3), spell * (0.8, 0.2, 0.5)
    seconds[0, 1], seconds[1, 1] = spell * (0.6, 0.2, 0.2), spell * (0.4, 0.2, 0.1)
    flights = np.array([[[4, 0], [4, 1]], [[6, 0], [4, 3]]])
    nothing, progress = cable.layout_rows("pp 2", seconds, flights)
    assert (nothing["overlap"], progress["overlap"]) == cable.LAYOUTS["pp 2"][1]
    assert nothing["step_ms"] == pytest.approx(1000)
    assert progress["step_ms"] == pytest.approx(800)
    assert [nothing[name] for name in cable.GAINS] == [0, 0, 0]
    assert [progress[name] for name in cable.GAINS] == pytest.approx([20, 20, 20])
    assert (nothing["best_gain_percent"], progress["best_gain_percent"]) == pytest.approx((0, 20))
    assert nothing["in_communication"] == pytest.approx(0.8 / 1.8)
    assert (nothing["computed_percent"], progress["computed_percent"]) == (0, 50)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--cable 0", "--cable"),
        ("--cable 200,x", "--cable"),
        ("--cable 1e3 --json x", "--cable"),
        ("--cable 200 --dtype bfloat16 --threads 2", "leave out --threads, --dtype"),
        ("--cable 200 --freed --arch llama --kv-heads 2", "leave out --arch, --kv-heads, --freed"),
        ("--cable 200 --recipe nanogpt --no-compiled", "leave out --compiled, --recipe"),
    ],
)
def test_a_cable_that_cannot_be_is_refused(words, message, capsys):
    with pytest.raises((UsageError, SystemExit)) as caught:
        step.parse(words.split())
    assert message in f"{caught.value}{capsys.readouterr().err}"


def test_ranks_are_not_started_by_hand():
    session = SimpleNamespace(
        launcher=SimpleNamespace(size=2, name="mpiexec"), stop_on_request=nullcontext
    )
    with pytest.raises(UsageError, match="starts its ranks itself: run it without mpiexec"):
        cable.on_each_cable(session, step.parse(["--cable", "200"]))
    code, block = one_block(
        run_command([sys.executable, "-m", "bench.step.cable", "--json", "none.json"], timeout=60)
    )
    assert (code, "start it by python -m bench.step --cable 200" in block) == (2, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_container_that_forbids_namespaces_is_named(monkeypatch, tmp_path):
    for name in two_hosts.PROGRAMS:
        (tmp_path / name).write_text("#!/bin/sh\necho 'Operation not permitted' >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    reason = two_hosts.missing.__wrapped__()
    assert re.fullmatch(
        "ip netns add trial.*: Operation not permitted; a container must be started"
        " with --privileged",
        reason,
    )


@pytest.mark.netns
@pytest.mark.skipif(missing() is not None, reason=f"network namespaces: {missing()}")
@pytest.mark.skipif(find_launcher() is None, reason="no mpiexec: install .[mpich]")
def test_each_side_is_timed_at_each_rate(tmp_path):
    path = tmp_path / "cable.json"
    done = run_command(
        [sys.executable, "-m", "bench.step", "--cable", "500,1000", *SIZES.split(), "--json", path],
        timeout=100,
    )
    if "no network namespaces here" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.tail()
    assert "2 hosts of 1 rank, 2 steps" in done.stdout
    rows = {
        (row["cable_mbit"], row["layout"], row["overlap"]): row
        for row in json.loads(path.read_text())["rows"]
    }
    assert set(rows) == {
        (rate, layout, name)
        for rate in (500, 1000)
        for layout, (_, names, _) in cable.LAYOUTS.items()
        for name in names
    }
    for rate in (500, 1000):
        hidden = {
            name: rows[rate, "dp 2", name]["computed_percent"] for name in cable.LAYOUTS["dp 2"][1]
        }
        assert hidden["nothing"] == hidden["progress"] == 0 < hidden["units"]


# --- bench.verify --goals: its settings, its verdicts, and a step across a slow cable


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give the cost model MACHINE"),
        (["machine.json", "--goals"], "give the cost model"),
        (["--goals", "--no-steps"], "--no-steps: leaves out"),
        (
            ["machine.json", "--seconds", "0", "--launches", "-1"],
            r"--seconds .*, above 0, such as 60\n--launches -1",
        ),
        (["--goals", "--start", "srun"], "--goals starts its jobs itself"),
        (["--goals", "--launches", "1", "--seconds", "19"], "takes at least 20 for 1 launch"),
    ],
)
def test_flags_that_contradict_each_other(words, message):
    with pytest.raises(UsageError, match=message):
        verify.main.parse(words)


def test_every_schedule_and_layout_is_a_step():
    assert [name for name, _ in layouts(2, 1)] == ["dp=2", *(f"pp=2 {name}" for name in SCHEDULES)]
    assert layouts(2, 2) == [("tp=2", {"dp": 1, "tp": 2})]
    assert layouts(4, 1)[-1] == ("dp=2,pp=2 1f1b", {"dp": 2, "pp": 2, "schedule": "1f1b"})


def test_rounds_go_through_all_layouts_and_the_quietest_counts(monkeypatch):
    """Planted: each step takes longer than the one before, but the first of all."""

    class Endless:
        rounds, part = staticmethod(range), lambda self, share: self

        def shares(self, things):
            return [(thing, self) for thing in things]

    took, layouts_of_calls = iter([9.0, *range(1, 18)]), []

    def step_seconds(world, ops, config, budget):
        layouts_of_calls.append(config.grid.dp)
        return next(took)

    monkeypatch.setattr(measuring, "step_seconds", step_seconds)
    lines = measuring.verify_steps(SimpleNamespace(size=2), machine(), Endless())
    assert [one["measured_us"] for one in lines] == [5e6, 1e6, 2e6, 3e6, 4e6]
    assert layouts_of_calls == [2, 1, 1, 1, 1] * 3


def test_of_the_passes_the_median_round_of_the_quietest_spell_counts(monkeypatch):
    def costs_of(seconds):
        return [Costs(f=(each,) * 6, i=(1.0,) * 6, w=(1.0,) * 6, sharing=each) for each in seconds]

    found = units.units_of(config_of(), [costs_of([5.0, 9.0, 1.0]), costs_of([7, 2, 6])])
    assert (found.block.f, found.sharing) == (5.0, 5.5)
    rounds = iter(costs_of([4.0, 9.0, 3.0]))
    monkeypatch.setattr(units, "measure_costs", lambda *_: next(rounds))
    found = units.measure_units(config_of(), None, SimpleNamespace(rank=0), 3)
    assert found.block.f == 4.0


def test_ranks_of_a_job_choose_their_own_number_of_threads(monkeypatch):
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, str(len(os.sched_getaffinity(0))))
    assert not set(THREAD_VARIABLES) & set(environment_of_jobs())
    monkeypatch.setenv(THREAD_VARIABLES[0], "77")
    assert environment_of_jobs()[THREAD_VARIABLES[0]] == "77"


def test_verdicts_have_the_setting_its_tolerance_and_the_worst(monkeypatch, tmp_path, capsys):
    """Errors of 12 % are kept on 4 ranks, not on 2; cables are left out without root, by name."""
    started = []

    @contextlib.contextmanager
    def job_of(folder, ranks, mbit_per_second):
        def start(_session, words):
            started.append((ranks, words[0]))
            (folder / "machine.json").touch()
            if words[0] == "bench.verify":
                error = 1.2 if started.count(started[-1]) == 1 else 1.12
                one = line(Subject("step dp=2", ranks, "-"), "2 rows", error, 1.0)
                (folder / "details.jsonl").write_text(json.dumps(one) + "\n")
            return 0

        yield start

    monkeypatch.setattr(verify, "job_of", job_of)
    monkeypatch.setattr(two_hosts, "missing", lambda: "needs root")
    path = tmp_path / "verify.json"
    args = verify.main.parse(["--goals", "--launches", "3", "--json", str(path)])
    assert verify.run_goals(ALONE, args) == 1
    rows = json.loads(path.read_text())["rows"]
    assert [(row["link"], row["verdict"], row["cases"]) for row in rows] == [
        ("this host, 2 ranks", "NOT KEPT", 3),
        ("this host, 4 ranks", "kept", 3),
    ]
    assert [row["largest_error"] for row in rows] == [pytest.approx(0.2)] * 2
    assert [row["median_error"] for row in rows] == [pytest.approx(0.12)] * 2
    assert started[:6] == [(2, "bench.calibrate"), (2, "bench.verify")] * 3
    assert "left out: cable of 200 Mbit/s: needs root" in capsys.readouterr().err


def test_a_job_that_left_no_file_does_not_count_with_that_of_the_launch_before(monkeypatch):
    """The second calibration says 1, as a check that failed, and writes nothing."""
    started = []

    @contextlib.contextmanager
    def job_of(folder, ranks, mbit_per_second):
        def start(_session, words):
            started.append(words[0])
            if len(started) < 3:
                (folder / "machine.json").touch()
                (folder / "details.jsonl").write_text("")
            return 1

        yield start

    monkeypatch.setattr(verify, "job_of", job_of)
    with pytest.raises(EnvironmentProblem, match=r"bench\.calibrate .* ended with code 1"):
        verify.measured(
            ALONE, verify.main.parse(["--goals", "--launches", "2"]), verify.SETTINGS[0]
        )
    assert started == ["bench.calibrate", "bench.verify", "bench.calibrate"]


@pytest.mark.netns
@pytest.mark.skipif(
    two_hosts.missing() is not None, reason=f"network namespaces: {two_hosts.missing()}"
)
@pytest.mark.skipif(find_launcher() is None, reason="no mpiexec: install .[mpich]")
def test_no_step_across_a_slow_cable_is_predicted_below_the_cable(tmp_path):
    """At 50 Mbit/s gpipe's messages take longer than its passes: 8 each way, one by one."""
    mbit, path, details = 50, tmp_path / "machine.json", tmp_path / "details.jsonl"
    environment = {**OVERSUBSCRIBED, **two_hosts.OVER_TCP, "PYTHONPATH": str(REPOSITORY)}
    try:
        with two_hosts.two_hosts(tmp_path, mbit) as hosts:
            for words in (
                [
                    "calibrate",
                    "--out",
                    path,
                    "--end-bytes",
                    "128K",
                    "--rows",
                    "1",
                    "--seconds",
                    "30",
                ],
                ["verify", path, "--details", details, "--seconds", "10"],
            ):
                done = run_command(
                    hosts.mpiexec(
                        find_launcher(),
                        (1, 1),
                        sys.executable,
                        "-m",
                        f"bench.{words[0]}",
                        "--only-steps",
                        *words[1:],
                    ),
                    100.0,
                    environment,
                )
                assert done.returncode in (0, 1), done.tail()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces: {error.stderr.strip()}")
    message = 1 * 64 * 128 * 4
    floor_us = 2 * 8 * message * 8 / mbit
    assert machine_file.load(str(path)).estimate(STREAM, message).seconds == pytest.approx(
        message * 8e-6 / mbit, rel=0.3
    )
    lines = {one["what"]: one for one in map(json.loads, details.read_text().splitlines())}
    assert set(lines) == {f"step {name}" for name, _ in layouts(2, 1)}
    for name in ("1f1b", "gpipe", "zb-h1"):
        one = lines[f"step pp=2 {name}"]
        least = floor_us / (2 if name != "gpipe" else 1)  # both directions at once
        assert min(one["predicted_us"], one["measured_us"]) >= 0.9 * least, one
