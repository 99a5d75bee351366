"""Tests whether this checkout's training step is slower than that of another one, in one run.

    git worktree add --detach /tmp/before v1 && python -m bench.step.against /tmp/before
    python -m bench.step.against /tmp/before --ranks 2 --pairs 10 --repeats 5

Processes of both checkouts take turns, each `python -m bench.step` of its own files with this
environment's packages; every second pair begins with the other one, so that a slow spell of the
machine hits both. Launches differ more than the steps inside one, so a pair counts as one value.

ratio: the median over the pairs of this checkout's step_ms over the other's. low, high: its 95 %
interval, by order statistics. A side is slower if all of its interval is above LIMIT; then the exit
code is 1. before_ms, now_ms: medians over the processes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import results
from bench.interconnect.launches import environment_of_jobs, own_launcher, run_job
from bench.interconnect.statistics import scipy_stats
from bench.program import Outcome, Program
from bench.step.sides import add_sizes
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_INTERRUPTED, EXIT_OK, UsageError

LIMIT = 1.01
LEAST = 6  # pairs: fewer have no 95 % interval
SIZES = ("arch", "layers", "d_model", "heads", "seq_len", "batch_size", "vocab_size", "repeats")


def interval(values) -> tuple[float, float]:
    """Return the exact interval of the median at 95 % or a little more, from order statistics."""
    return scipy_stats().quantile_test(values, p=0.5).confidence_interval(0.95)


def rows_of_pairs(pairs: list[tuple[dict, dict]]) -> list[dict]:
    """Return the table of {side: step_ms} of each pair: (the other checkout's, this one's)."""
    found = []
    for side in pairs[0][1]:
        before, now = ([pair[which][side] for pair in pairs] for which in (0, 1))
        ratios = [b / a for a, b in zip(before, now, strict=True)]
        low, high = interval(ratios)
        found.append(
            {
                "side": side,
                "before_ms": statistics.median(before),
                "now_ms": statistics.median(now),
                "low": low,
                "ratio": statistics.median(ratios),
                "high": high,
                "slower": "yes" if low > LIMIT else "no",
            }
        )
    return found


def check_checkout(root: Path) -> None:
    """Raise UsageError unless Python finds both packages of this checkout in its folder."""
    code = "import bench.step, mpipar; print(bench.__file__); print(mpipar.__file__)"
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        text=True,
        check=False,
        capture_output=True,
        env=environment_of_jobs() | path_of(root),
    )
    if [Path(line).parent.parent for line in process.stdout.splitlines()] != [root, root]:
        raise UsageError(
            f"{root} is not a checkout with bench/step and mpipar: "
            f"{(process.stdout + process.stderr).strip()[-300:]}"
        )


def path_of(root: Path) -> dict[str, str]:
    """Return the variable that makes Python import from a checkout first."""
    return {"PYTHONPATH": str(root)}


def measure(session, root: Path, args, folder: Path) -> dict[str, float]:
    """Return {side: step_ms} of a process, or of a job, of a checkout; only mpipar's sides."""
    path = folder / "rows.json"
    path.unlink(missing_ok=True)
    sizes = [f"--{size.replace('_', '-')}={getattr(args, size)}" for size in SIZES]
    prefix = [] if args.ranks == 1 else [own_launcher(), "-n", str(args.ranks)]
    run_job(
        session,
        [*prefix, sys.executable, "-m", "bench.step", "--no-compiled", *sizes, "--json", str(path)],
        env=environment_of_jobs() | path_of(root),
        cwd=root,
        stdout=subprocess.DEVNULL,
    )
    if session.stop_requested or not path.exists():
        return {}
    return {
        row["side"]: row["step_ms"]
        for row in json.loads(path.read_text())["rows"]
        if row["side"].startswith("mpipar ")
    }


def add_flags(parser) -> None:
    """Add the other checkout, and the sizes of the model."""
    parser.add_argument("other", type=Path, metavar="PATH", help="the checkout to compare with")
    add_sizes(parser)


def compare(args, session) -> Outcome | int:
    """Measure all pairs; code 1 if a side is slower."""
    if args.pairs < LEAST:
        raise UsageError(f"--pairs {args.pairs}: fewer than {LEAST} have no 95 % interval")
    roots, pairs = (args.other.resolve(), results.ROOT), []
    for root in roots:
        check_checkout(root)
    with session.stop_on_request(), tempfile.TemporaryDirectory() as folder:
        for number in range(args.pairs):
            order = roots if number % 2 == 0 else roots[::-1]
            found = {root: measure(session, root, args, Path(folder)) for root in order}
            if session.stop_requested:
                return EXIT_INTERRUPTED
            if not all(found.values()):
                return EXIT_CHECK_FAILED
            pairs.append((found[roots[0]], found[roots[1]]))
    rows = rows_of_pairs(pairs)
    slower = any(row["slower"] == "yes" for row in rows)
    return Outcome(
        rows,
        {name: getattr(args, name) for name in ("ranks", "pairs", *SIZES)},
        EXIT_CHECK_FAILED if slower else EXIT_OK,
    )


main = Program(
    "step.against",
    __doc__,
    compare,
    add=add_flags,
    counts={"--ranks": (1, "of each job"), "--pairs": (10, "of processes")},
).started(__name__)
