"""Predicts what was not fitted, measures it, and shows both.

    mpiexec -n 2 python -m bench.verify machine.json
    python -m bench.verify machine.json --launches 5 --start "mpiexec -n 2"
    python -m bench.verify --goals --launches 5 --json bench/results/verify_steps.json

--seconds is the time of the whole command, all launches together.

Every fitted operation is predicted at sizes between the fitted ones. The messages of a pipeline
schedule and a training step of each layout and schedule follow. Products of shapes that were not
measured are for information only. So is the time of each all-reduce algorithm by the fitted
messages and reduction. Exit code 1 says that the median error of an operation or of a step is above
its tolerance.
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

import numpy as np

from bench import results
from bench.interconnect import plans
from bench.interconnect.budget import Budget, add_seconds, seconds_problems
from bench.interconnect.cases import COMM
from bench.interconnect.groups import link_of
from bench.interconnect.launches import START, alone, launcher_words, run_job
from bench.interconnect.plans import GROUP_CASES, PAIR_CASES, Section
from bench.interconnect.records import Writer
from bench.machine import goals
from bench.machine.compute import HELD_OUT_SIDES, measure_products, verify_steps
from bench.machine.fitting import REDUCTION, quietest
from bench.machine.needed import (
    STALL_SECONDS,
    no_refused,
    open_bench,
    pairs_by_link,
    run_rounds,
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
from mpipar import ops as ops_module
from mpipar.config import flags
from mpipar.errors import (
    EXIT_CHECK_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EnvironmentProblem,
    OutputError,
    UsageError,
)
from mpipar.files.text import counted
from mpipar.job.session import guard
from mpipar.plan import machine_file
from mpipar.plan.machine import HOP

CHAIN_BYTES = (3000, 200_000)
MESSAGES = 0.6  # of the time, at most
LEAST_SECONDS = 1.0  # of a launch, however late it begins


def parse(argv):
    """Read and check the flags. Raises UsageError."""
    parser = flags.Parser(prog="python -m bench.verify", description=__doc__)
    parser.add_argument("machine", nargs="?", metavar="MACHINE",
                        help="cost model of bench.calibrate; --goals makes its own")
    parser.add_argument("--sizes", type=flags.count, default=8,
                        help="held-out sizes of each operation at most (8)")
    add_seconds(parser)
    parser.add_argument("--no-steps", action="store_true",
                        help="leave out products and training steps")
    parser.add_argument("--only-steps", action="store_true", help="training steps alone")
    parser.add_argument("--goals", action="store_true",
                        help="calibrate and compare steps of 2 ranks, of 4 ranks, and of 2 ranks "
                        "across a cable of three rates (needs root for the cable)")
    parser.add_argument("--launches", type=int, default=0, metavar="K",
                        help="start K fresh jobs with --start and judge all of them together; "
                        "with --goals, how often to calibrate and compare (5)")
    parser.add_argument("--start", metavar="COMMAND",
                        help=f"how --launches starts a job ({START})")
    parser.add_argument("--json", metavar="FILE", help="write the verdicts as a result file")
    parser.add_argument("--details", metavar="FILE",
                        help="write every comparison as a line of JSON")
    args = parser.parse_args(argv)
    if args.goals:
        args.launches = args.launches or goals.LAUNCHES
    found = seconds_problems(args.seconds)
    if args.launches < 0:
        found.append(f"--launches {args.launches}: must not be below 0")
    if bool(args.machine) == args.goals:
        found.append("give the cost model MACHINE of bench.calibrate, or --goals, which makes its "
                     "own")
    if args.no_steps and (args.only_steps or args.goals):
        found.append("--no-steps: leaves out what --only-steps and --goals compare; give one")
    least = goals.LEAST_SECONDS * args.launches
    if args.goals and not found and args.seconds < least:
        found.append(f"--seconds {args.seconds:g}: --goals takes at least {least:g} for "
                     f"{counted(args.launches, 'launch')}")
    if args.start and args.goals:
        found.append(f"--start {args.start}: --goals starts its jobs itself; leave it out")
    if args.start and not (args.launches or args.goals):
        found.append(f"--start {args.start}: is how --launches starts its jobs; add --launches 5, "
                     "or type the command in front of python")
    if found:
        raise UsageError(found)
    return args


def held_out_sizes(fitted, count: int) -> tuple[int, ...]:
    """At most `count` sizes between neighbours of the fitted ones, multiples of 8."""
    between = [round(math.sqrt(low * high) / 8) * 8 for low, high in pairwise(fitted)]
    between = sorted(set(between) - set(fitted) - {0})
    places = np.linspace(0, len(between) - 1, min(count, len(between))).round().astype(int)
    return tuple(between[place] for place in places)


def section_of(curve, places, world_size: int, count: int) -> Section | None:
    """Held-out sizes of a curve, on ranks of this job with its kind of link; None if there are
    none.
    """
    sizes = held_out_sizes(curve.fitted_bytes, count)
    if not sizes or curve.ranks > world_size:
        return None
    if curve.operation in PAIR_CASES:
        pairs = [pair for pair in pairs_by_link(places, world_size)
                 if link_of(places, pair) == curve.link]
        return Section(curve.operation, PAIR_CASES[curve.operation], (pairs[0],), sizes,
                       "pair") if pairs else None
    ranks = tuple(range(curve.ranks))
    if curve.operation not in GROUP_CASES or link_of(places, ranks) != curve.link:
        return None
    return Section(curve.operation, GROUP_CASES[curve.operation], (ranks,), sizes)


def chosen_sections(machine, places, world_size: int, count: int) -> list[Section]:
    """Every fitted operation on held-out sizes, and a chain. Raises UsageError."""
    found = [section_of(curve, places, world_size, count) for curve in machine.curves]
    found = [section for section in found if section]
    if not found:
        raise UsageError(f"nothing in this cost model fits {world_size} ranks of these links; "
                         "it was calibrated elsewhere, or with other numbers of ranks")
    link = link_of(places, range(world_size))
    if {HOP, BOTH_WAYS} <= {one.operation for one in machine.curves if one.link == link}:
        found += [section for section in plans.chain_sections(world_size, CHAIN_BYTES)
                  if section.title == CHAIN]
    return found


def compared(machine, rows) -> list[dict]:
    """Compare rows with their estimates."""
    found, formulas = [], []
    for row in sorted(quietest(rows), key=lambda row: (row["case"], row["size_bytes"])):
        if row["via"] == COMM:
            guess = predicted(machine, row)
            subject = Subject(row["case"], len(row["ranks"]), row["link"])
            found.append(line(subject, f"{row['size_bytes']} bytes", guess.seconds * 1e6,
                              row["median_us"], guess.extrapolated))
            if row["case"] == "all-reduce":
                formulas += all_reduce_lines(machine, row)
    return found + formulas


def all_reduce_lines(machine, row) -> list[dict]:
    """The predicted time of each algorithm for a measured all-reduce, for information."""
    try:
        hop, reduction = machine.curve(HOP, link=row["link"]), machine.curve(REDUCTION, 1)
    except UsageError:
        return []
    nbytes, ranks = row["size_bytes"], len(row["ranks"])
    models = all_reduce_models(lambda size: hop.estimate(size).seconds * 1e6,
                               lambda size: reduction.estimate(size).seconds * 1e6, nbytes, ranks)
    return [line(Subject(f"all-reduce as {name}", ranks, row["link"]), f"{nbytes} bytes", us,
                 row["median_us"]) for name, us in models.items()]


def verify_products(world, machine) -> list[dict]:
    """Compare products of shapes between the measured ones, for information. Comm: see
    `measure_products`.
    """
    if not machine.products:
        return []
    ops = ops_module.make("cpu", machine.provenance.get("dtype", "float32"))
    return [line(Subject("product", world.size, "-"), f"{one.m}x{one.k}x{one.n}",
                 machine.product_seconds(one.m, one.k, one.n).seconds * 1e6, one.seconds * 1e6)
            for one in measure_products(world, ops, HELD_OUT_SIDES)]


def write_lines(path: str, lines) -> None:
    """Write one JSON object on each line. Raises OutputError."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("".join(json.dumps(one) + "\n" for one in lines))
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}") from error


def prepared(args, world_rank: int = 0):
    """The cost model; checks everything before anything is measured.

    Raises DataError where it cannot be read, and on world rank 0 OutputError where a file that is
    asked for cannot be written.
    """
    if world_rank == 0:
        results.check_writable(args.json)
        results.check_writable(args.details, flag="--details")
    return machine_file.load(args.machine)


def one_launch(session, args) -> list[dict] | None:
    """All comparisons of this job, on world rank 0 (others: some); None when interrupted."""
    machine = session.agree(lambda: prepared(args, session.world.rank))
    if args.only_steps:
        return verify_steps(session.world, machine, Budget(session.world, args.seconds))
    fitted = machine.provenance
    bench, places = open_bench(session, fitted.get("dtype", "float32"),
                               fitted.get("buffers", ["rotated"])[0],  # a model cannot hold several
                               fitted.get("transport", "mpi-host"))
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


def all_launches(session, args) -> list[dict]:
    """The comparisons of several fresh jobs, one after the other.

    Raises UsageError: see `launches.alone`.
    """
    alone(session, args.start or START)
    prepared(args)
    lines: list[dict] = []
    end = time.monotonic() + args.seconds
    with session.stop_on_request():
        for launch in range(1, args.launches + 1):
            print(f"launch {launch} of {args.launches}", file=sys.stderr, flush=True)
            seconds = (end - time.monotonic()) / (args.launches - launch + 1)
            lines += fresh_launch(session, args, launch, max(LEAST_SECONDS, seconds))
    return lines


def fresh_launch(session, args, launch: int, seconds: float) -> list[dict]:
    """The comparisons of one job.

    Raises UsageError and EnvironmentProblem if there are none, KeyboardInterrupt after a Ctrl-C.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "details.jsonl"
        command = [*launcher_words(args.start), sys.executable, "-m", "bench.verify",
                   args.machine, f"--sizes={args.sizes}", f"--seconds={seconds:.3f}",
                   *(f"--{name}" for name in ("no-steps", "only-steps")
                     if getattr(args, name.replace("-", "_")))]
        try:
            ended = run_job(session, [*command, "--details", str(path)],
                            stdout=subprocess.DEVNULL)
        except OSError as error:
            raise UsageError(f"--start {args.start}: {error.strerror}") from error
        if session.stop_requested or ended == EXIT_INTERRUPTED:
            raise KeyboardInterrupt("interrupted (SIGINT)")
        if not path.exists():
            raise EnvironmentProblem(f"launch {launch}: {shlex.join(command)} ended with code "
                                     f"{ended} and compared nothing")
        return [json.loads(text) for text in path.read_text().splitlines()]


def main(argv, session) -> int:
    """Predict, measure, compare. Every rank must run it."""
    args = parse(argv)
    if args.goals:
        return goals.run(session, args)
    if args.launches:
        lines = all_launches(session, args)
    else:
        session.start()
        lines = one_launch(session, args)
    if lines is None:
        return EXIT_INTERRUPTED
    if session.world is not None and session.world.rank > 0:
        return EXIT_OK
    verdicts = judge(lines)
    print(shown(lines, verdicts))
    if args.details:
        write_lines(args.details, lines)
    if args.json:
        results.write(args.json, "bench.verify", verdicts, launches=max(1, args.launches))
    kept = all(one["verdict"] != "NOT KEPT" for one in verdicts)
    return EXIT_OK if kept else EXIT_CHECK_FAILED


if __name__ == "__main__":
    guard(main)
