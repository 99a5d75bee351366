"""`bench.verify --goals`: steps predicted and measured where predictions are promised to hold.

A launch is two fresh jobs: one makes a cost model, the next measures steps of every layout and
schedule. So the launches' errors do not share one calibration's luck, and the machine may change
between launches. A cable needs network namespaces, and so root; without them its settings are left
out, and the program says so. The table's link is the setting.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import NamedTuple

from bench import results
from bench.interconnect import two_hosts
from bench.interconnect.launches import alone, job_of
from bench.machine.predicted import judge, shown
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_INTERRUPTED, EXIT_OK, EnvironmentProblem

ROWS = 2  # of a microbatch
END_BYTES = "1M"  # the largest sum: one unit's gradients
LAUNCHES, LEAST_SECONDS = 5, 20.0  # of a launch: its jobs start one after the other
CALIBRATION = 0.5  # of a launch's time


class Setting(NamedTuple):
    """A number of ranks, on this host or across a cable, and the promised median error."""

    name: str
    ranks: int
    tolerance: float
    mbit_per_second: int | None = None


SETTINGS = (
    Setting("this host, 2 ranks", 2, 0.10), Setting("this host, 4 ranks", 4, 0.15),
    Setting("cable of 200 Mbit/s", 2, 0.15, 200), Setting("cable of 1000 Mbit/s", 2, 0.15, 1000),
    Setting("cable of 3000 Mbit/s", 2, 0.15, 3000),
)


def run(session, args) -> int:
    """Run all settings, print and write the verdicts; the exit code."""
    alone(session, "mpiexec")
    for path, flag in ((args.json, "--json"), (args.details, "--details")):
        results.check_writable(path, flag=flag)
    lines, verdicts, reason = [], [], two_hosts.missing()
    with session.stop_on_request():
        for setting in SETTINGS:
            if setting.mbit_per_second and reason:
                print(f"left out: {setting.name}: {reason}", file=sys.stderr)
                continue
            found = measured(session, args, setting)
            if found is None:
                return EXIT_INTERRUPTED
            lines += found
            verdicts += judge(found, setting.tolerance)
            print(shown(found, verdicts[-len({one["what"] for one in found}):]), flush=True)
    if args.details:
        results.write(args.details, "bench.verify --goals", lines)
    if args.json:
        results.write(args.json, "bench.verify --goals", verdicts, launches=args.launches)
    kept = all(one["verdict"] == "kept" for one in verdicts)
    return EXIT_OK if kept else EXIT_CHECK_FAILED


def measured(session, args, setting: Setting) -> list[dict] | None:
    """The comparisons of all launches of a setting; None when interrupted.

    Raises EnvironmentProblem if a job fails.
    """
    lines, launches = [], args.launches
    with tempfile.TemporaryDirectory() as folder, job_of(
            Path(folder), setting.ranks, setting.mbit_per_second) as start:
        machine, details = Path(folder) / "machine.json", Path(folder) / "details.jsonl"
        tp = f"1,{setting.ranks}"
        part = args.seconds / len(SETTINGS) / launches
        jobs = {
            "calibration": ["bench.calibrate", "--out", machine, "--only-steps", "--rows", ROWS,
                            "--tp", tp, "--end-bytes", END_BYTES, "--seconds", part * CALIBRATION],
            "steps": ["bench.verify", machine, "--only-steps", "--details", details,
                      "--seconds", part * (1 - CALIBRATION)]}
        for number, (name, words) in product(range(1, launches + 1), jobs.items()):
            print(f"{setting.name}: launch {number} of {launches}: {name}", file=sys.stderr,
                  flush=True)
            made = machine if name == "calibration" else details
            made.unlink(missing_ok=True)
            code = start(session, list(map(str, words)))
            if session.stop_requested or code == EXIT_INTERRUPTED:
                return None
            if code not in (EXIT_OK, EXIT_CHECK_FAILED) or not made.exists():
                raise EnvironmentProblem(
                    f"{setting.name}: python -m {shlex.join(map(str, words))} ended with {code}")
            if name == "steps":
                lines += [json.loads(text) | {"link": setting.name}
                          for text in details.read_text().splitlines()]
    return lines
