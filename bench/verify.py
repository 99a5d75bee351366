"""Predicts measurements that were not fitted, takes them, and shows both.

    mpiexec -n 2 python -m bench.verify machine.json
    python -m bench.verify machine.json --launches 5 --start "mpiexec -n 2"
    python -m bench.verify --goals --launches 5 --json bench/results/verify_steps.json

--seconds is the time of the whole command, all launches together.

Every fitted operation is predicted at sizes between the fitted ones, followed by the messages of a
pipeline schedule and a training step of each layout and schedule. Products of shapes that were not
measured are for information only, and so is the time of each all-reduce algorithm computed from the
fitted messages and reduction. Exit code 1 means that the median error of an operation or of a step
is above its tolerance.

With --goals steps are predicted and measured in the settings for which predictions are promised to
hold. A launch is two fresh jobs: one makes a cost model, the next measures steps of every layout
and schedule. That way the launches' errors do not share one calibration's luck, and the machine may
change between launches. A cable needs network namespaces, and therefore root; without them its
settings are left out, with a message. The table's link is the setting.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench import results
from bench.interconnect import plans, two_hosts
from bench.interconnect.budget import Budget, add_seconds, seconds_problems
from bench.interconnect.cases import COMM
from bench.interconnect.groups import link_of
from bench.interconnect.launches import START, alone, job_of, launcher_words, run_job
from bench.interconnect.plans import GROUP_CASES, PAIR_CASES, Section
from bench.interconnect.records import Writer
from bench.machine.fitting import REDUCTION, quietest
from bench.machine.measuring import (
    HELD_OUT_SIDES,
    STALL_SECONDS,
    measure_products,
    no_refused,
    open_bench,
    pairs_by_link,
    run_rounds,
    verify_steps,
)
from bench.machine.predicted import (
    BOTH_WAYS,
    CHAIN,
    Subject,
    all_reduce_models,
    judge,
    line,
    predicted,
    shown,
)
from bench.program import Program
from mpipar import ops as ops_module
from mpipar.config import flags
from mpipar.errors import (
    EXIT_CHECK_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EnvironmentProblem,
    UsageError,
)
from mpipar.files.text import counted
from mpipar.plan import machine_file
from mpipar.plan.machine import HOP

CHAIN_BYTES = (3000, 200_000)
MESSAGES = 0.6  # of the time, at most
LEAST_SECONDS = 1.0  # of a launch, however late it begins
# For --goals.
ROWS = 2  # of a microbatch
GOAL_BYTES = "1M"  # the largest sum: one unit's gradients
GOAL_LAUNCHES, GOAL_SECONDS = 5, 20.0  # of a launch: its jobs start one after the other
CALIBRATION = 0.5  # of a launch's time


def add_flags(parser) -> None:
    """Add the flags for the model and what is compared."""
    parser.add_argument(
        "machine",
        nargs="?",
        metavar="MACHINE",
        help="cost model of bench.calibrate; --goals makes its own",
    )
    parser.add_argument(
        "--sizes", type=flags.count, default=8, help="held-out sizes of each operation at most (8)"
    )
    add_seconds(parser)
    parser.add_argument(
        "--no-steps", action="store_true", help="leave out products and training steps"
    )
    parser.add_argument("--only-steps", action="store_true", help="training steps alone")
    parser.add_argument(
        "--goals",
        action="store_true",
        help="calibrate and compare steps of 2 ranks, of 4 ranks, and of 2 ranks "
        "across a cable of three rates (needs root for the cable)",
    )
    parser.add_argument(
        "--launches",
        type=int,
        default=0,
        metavar="K",
        help="start K fresh jobs with --start and judge all of them together; "
        "with --goals, how often to calibrate and compare (5)",
    )
    parser.add_argument("--start", metavar="COMMAND", help=f"how --launches starts a job ({START})")
    parser.add_argument(
        "--details", metavar="FILE", help="write every comparison as a line of JSON"
    )


def check(args, parser) -> None:
    """Check that the flags fit together. Raises UsageError."""
    if args.goals:
        args.launches = args.launches or GOAL_LAUNCHES
    found = seconds_problems(args.seconds)
    if args.launches < 0:
        found.append(f"--launches {args.launches}: must not be below 0")
    if bool(args.machine) == args.goals:
        found.append(
            "give the cost model MACHINE of bench.calibrate, or --goals, which makes its own"
        )
    if args.no_steps and (args.only_steps or args.goals):
        found.append("--no-steps: leaves out what --only-steps and --goals compare; give one")
    least = GOAL_SECONDS * args.launches
    if args.goals and not found and args.seconds < least:
        found.append(
            f"--seconds {args.seconds:g}: --goals takes at least {least:g} for "
            f"{counted(args.launches, 'launch')}"
        )
    if args.start and args.goals:
        found.append(f"--start {args.start}: --goals starts its jobs itself; leave it out")
    if args.start and not (args.launches or args.goals):
        found.append(
            f"--start {args.start}: is how --launches starts its jobs; add --launches 5, "
            "or type the command in front of python"
        )
    if found:
        raise UsageError(found)


def held_out_sizes(fitted, count: int) -> tuple[int, ...]:
    """Return at most `count` sizes between neighbours of the fitted ones, multiples of 8."""
    between = [round(math.sqrt(low * high) / 8) * 8 for low, high in pairwise(fitted)]
    between = sorted(set(between) - set(fitted) - {0})
    places = np.linspace(0, len(between) - 1, min(count, len(between))).round().astype(int)
    return tuple(between[place] for place in places)


def section_of(curve, places, world_size: int, count: int) -> Section | None:
    """Return held-out sizes of a curve, on ranks of this job with its kind of link, or None."""
    sizes = held_out_sizes(curve.fitted_bytes, count)
    if not sizes or curve.ranks > world_size:
        return None
    if curve.operation in PAIR_CASES:
        pairs = [
            pair
            for pair in pairs_by_link(places, world_size)
            if link_of(places, pair) == curve.link
        ]
        return (
            Section(curve.operation, PAIR_CASES[curve.operation], (pairs[0],), sizes, "pair")
            if pairs
            else None
        )
    ranks = tuple(range(curve.ranks))
    if curve.operation not in GROUP_CASES or link_of(places, ranks) != curve.link:
        return None
    return Section(curve.operation, GROUP_CASES[curve.operation], (ranks,), sizes)


def chosen_sections(machine, places, world_size: int, count: int) -> list[Section]:
    """Return every fitted operation on held-out sizes, and a chain. Raises UsageError."""
    found = [section_of(curve, places, world_size, count) for curve in machine.curves]
    found = [section for section in found if section]
    if not found:
        raise UsageError(
            f"nothing in this cost model fits {world_size} ranks of these links; "
            "it was calibrated elsewhere, or with other numbers of ranks"
        )
    link = link_of(places, range(world_size))
    if {HOP, BOTH_WAYS} <= {one.operation for one in machine.curves if one.link == link}:
        found += [
            section
            for section in plans.chain_sections(world_size, CHAIN_BYTES)
            if section.title == CHAIN
        ]
    return found


def compared(machine, rows) -> list[dict]:
    """Compare rows with their estimates."""
    found, formulas = [], []
    for row in sorted(quietest(rows), key=lambda row: (row["case"], row["size_bytes"])):
        if row["via"] == COMM:
            guess = predicted(machine, row)
            subject = Subject(row["case"], len(row["ranks"]), row["link"])
            found.append(
                line(
                    subject,
                    f"{row['size_bytes']} bytes",
                    guess.seconds * 1e6,
                    row["median_us"],
                    guess.extrapolated,
                )
            )
            if row["case"] == "all-reduce":
                formulas += all_reduce_lines(machine, row)
    return found + formulas


def all_reduce_lines(machine, row) -> list[dict]:
    """Return the predicted time of each algorithm for a measured all-reduce, for information."""
    try:
        hop, reduction = machine.curve(HOP, link=row["link"]), machine.curve(REDUCTION, 1)
    except UsageError:
        return []
    nbytes, ranks = row["size_bytes"], len(row["ranks"])
    models = all_reduce_models(
        lambda size: hop.estimate(size).seconds * 1e6,
        lambda size: reduction.estimate(size).seconds * 1e6,
        nbytes,
        ranks,
    )
    return [
        line(
            Subject(f"all-reduce as {name}", ranks, row["link"]),
            f"{nbytes} bytes",
            us,
            row["median_us"],
        )
        for name, us in models.items()
    ]


def verify_products(world, machine) -> list[dict]:
    """Compare products of shapes between the measured ones, for information.

    Comm: see `measure_products`.
    """
    if not machine.products:
        return []
    ops = ops_module.make("cpu", machine.provenance.get("dtype", "float32"))
    return [
        line(
            Subject("product", world.size, "-"),
            f"{one.m}x{one.k}x{one.n}",
            machine.product_seconds(one.m, one.k, one.n).seconds * 1e6,
            one.seconds * 1e6,
        )
        for one in measure_products(world, ops, HELD_OUT_SIDES)
    ]


def prepared(args, world_rank: int = 0):
    """Return the cost model; check everything before anything is measured.

    Raises DataError if it cannot be read, and on world rank 0 OutputError if a requested file
    cannot be written.
    """
    if world_rank == 0:
        results.check_writable(args.details, flag="--details")
    return machine_file.load(args.machine)


def one_launch(session, args) -> list[dict] | None:
    """Return all comparisons of this job, on world rank 0 (others: some); None when interrupted."""
    machine = session.agree(lambda: prepared(args, session.world.rank))
    if args.only_steps:
        return verify_steps(session.world, machine, Budget(session.world, args.seconds))
    fitted = machine.provenance
    bench, places = open_bench(
        session,
        fitted.get("dtype", "float32"),
        fitted.get("buffers", ["rotated"])[0],  # a model cannot hold several
        fitted.get("transport", "mpi-host"),
    )
    world = session.world
    chosen = session.agree(lambda: chosen_sections(machine, places, world.size, args.sizes))
    budget = Budget(world, args.seconds)
    messages = budget if args.no_steps else budget.part(MESSAGES)
    with session.stop_on_request(), bench.watchdog(STALL_SECONDS):
        rows = run_rounds(bench, chosen, messages, 1, Writer(None))
    if bench.stopped:
        return None
    session.agree(lambda: no_refused(bench.refused))
    lines = compared(machine, rows)
    if args.no_steps:
        return lines
    return [*lines, *verify_products(world, machine), *verify_steps(world, machine, budget)]


def fresh_lines(session, start, jobs, launches: int, title: str = "") -> list[dict] | None:
    """Return the comparisons of fresh jobs, one launch after the other; None when interrupted.

    jobs(launch): yields (words, the file that they leave); that of the last has the comparisons.
    start(session, words): runs a job and returns its exit code. title: of the progress messages.
    Raises EnvironmentProblem if a job leaves no file.
    """
    lines: list[dict] = []
    for launch in range(1, launches + 1):
        print(f"{title}launch {launch} of {launches}", file=sys.stderr, flush=True)
        for job, made in jobs(launch):
            made.unlink(missing_ok=True)
            words = [*map(str, job)]
            code = start(session, words)
            if session.stop_requested or code == EXIT_INTERRUPTED:
                return None
            if code not in (EXIT_OK, EXIT_CHECK_FAILED) or not made.exists():
                raise EnvironmentProblem(
                    f"{title}launch {launch}: {shlex.join(words)} ended with"
                    f" code {code} and compared nothing"
                )
        lines += [json.loads(text) for text in made.read_text().splitlines()]
    return lines


def all_launches(session, args) -> list[dict] | None:
    """Return the comparisons of several fresh jobs; None when interrupted.

    Raises UsageError: see `launches.alone`; EnvironmentProblem: see `fresh_lines`.
    """
    alone(session, args.start or START)
    prepared(args)
    end = time.monotonic() + args.seconds

    def start(session, words: list[str]) -> int:
        try:
            return run_job(session, words, stdout=subprocess.DEVNULL)
        except OSError as error:
            raise UsageError(f"--start {args.start}: {error.strerror}") from error

    with session.stop_on_request(), tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "details.jsonl"

        def jobs(launch: int):
            seconds = (end - time.monotonic()) / (args.launches - launch + 1)
            more = [
                f"--{name}"
                for name in ("no-steps", "only-steps")
                if getattr(args, name.replace("-", "_"))
            ]
            yield (
                [
                    *launcher_words(args.start),
                    sys.executable,
                    "-m",
                    "bench.verify",
                    args.machine,
                    f"--sizes={args.sizes}",
                    f"--seconds={max(LEAST_SECONDS, seconds):.3f}",
                    *more,
                    "--details",
                    made,
                ],
                made,
            )

        return fresh_lines(session, start, jobs, args.launches)


class Setting(NamedTuple):
    """A number of ranks, on this host or across a cable, and the promised median error."""

    name: str
    ranks: int
    tolerance: float
    mbit_per_second: int | None = None


SETTINGS = (
    Setting("this host, 2 ranks", 2, 0.10),
    Setting("this host, 4 ranks", 4, 0.15),
    Setting("cable of 200 Mbit/s", 2, 0.15, 200),
    Setting("cable of 1000 Mbit/s", 2, 0.15, 1000),
    Setting("cable of 3000 Mbit/s", 2, 0.15, 3000),
)


def run_goals(session, args) -> int:
    """Run all settings, print and write the verdicts; return the exit code."""
    alone(session, "mpiexec")
    results.check_writable(args.details, flag="--details")
    lines, verdicts, reason = [], [], two_hosts.missing()
    with session.stop_on_request():
        for setting in SETTINGS:
            if setting.mbit_per_second and reason:
                print(f"left out: {setting.name}: {reason}", file=sys.stderr)
                continue
            if (found := measured(session, args, setting)) is None:
                return EXIT_INTERRUPTED
            judged = judge(found, setting.tolerance)
            print(shown(found, judged), flush=True)
            lines, verdicts = lines + found, verdicts + judged
    if args.details:
        results.write(args.details, "bench.verify --goals", lines)
    return concluded(args, "bench.verify --goals", verdicts)


def measured(session, args, setting: Setting) -> list[dict] | None:
    """Return the comparisons of all launches of a setting; None when interrupted.

    Raises EnvironmentProblem if a job fails.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        job_of(Path(folder), setting.ranks, setting.mbit_per_second) as start,
    ):
        machine, details = Path(folder) / "machine.json", Path(folder) / "details.jsonl"
        part = args.seconds / len(SETTINGS) / args.launches
        jobs = [
            (
                [
                    "bench.calibrate",
                    "--out",
                    machine,
                    "--only-steps",
                    "--rows",
                    ROWS,
                    "--tp",
                    f"1,{setting.ranks}",
                    "--end-bytes",
                    GOAL_BYTES,
                    "--seconds",
                    part * CALIBRATION,
                ],
                machine,
            ),
            (
                [
                    "bench.verify",
                    machine,
                    "--only-steps",
                    "--details",
                    details,
                    "--seconds",
                    part * (1 - CALIBRATION),
                ],
                details,
            ),
        ]
        lines = fresh_lines(session, start, lambda launch: jobs, args.launches, f"{setting.name}: ")
    return lines and [one | {"link": setting.name} for one in lines]


def concluded(args, bench: str, verdicts: list[dict]) -> int:
    """Write the verdicts; return 1 if one is not kept."""
    if args.json:
        results.write(args.json, bench, verdicts, launches=max(1, args.launches))
    kept = all(one["verdict"] != "NOT KEPT" for one in verdicts)
    return EXIT_OK if kept else EXIT_CHECK_FAILED


def compare(args, session) -> int:
    """Predict, measure, compare. Every rank must call it."""
    if args.goals:
        return run_goals(session, args)
    if args.launches:
        lines = all_launches(session, args)
    else:
        lines = one_launch(session, args)
    if lines is None:
        return EXIT_INTERRUPTED
    if session.world is not None and session.world.rank > 0:
        return EXIT_OK
    verdicts = judge(lines)
    print(shown(lines, verdicts))
    if args.details:
        results.write_text(args.details, "".join(json.dumps(one) + "\n" for one in lines))
    return concluded(args, "bench.verify", verdicts)


main = Program(
    "verify",
    __doc__,
    compare,
    together=lambda args: not args.launches,
    add=add_flags,
    check=check,
    json="write the verdicts as a result file",
).started(__name__)
