"""Measures the interconnect of a training layout through the calls that training makes.

    python -m bench.interconnect latency all-reduce [options]
    python -m bench.interconnect all-reduce ring --launches 3 --start "mpiexec -n 4"
    mpiexec -n 4 python -m bench.interconnect all-reduce ring --layout dp=2,tp=2
    mpiexec -n 8 python -m bench.interconnect vet    # who is slow: see vet.py

Without a launcher it starts five jobs of its own, one after the other, and joins their rows, so
that the intervals it prints hold for another launch too. Under a launcher it is one such job.

Every payload is checked before it is timed. Each operation has a row through mpipar.comm and, below
it, rows by bare mpi4py calls (--ways). --json keeps every sample; bench.table, bench.plot,
bench.compare and bench.interconnect.ways read it.
"""

from __future__ import annotations

import argparse
import math
import random
import sys

from bench import table
from bench.interconnect import (
    budget,
    compiled,
    cuda_probe,
    findings,
    launches,
    places,
    plans,
    vet,
)
from bench.interconnect.buffers import POLICIES
from bench.interconnect.groups import WIRES
from bench.interconnect.launches import START
from bench.interconnect.records import COMPLETE, INTERRUPTED, Writer
from bench.interconnect.routing import ROUTINGS
from bench.interconnect.sampling import STARTS, Plan
from bench.interconnect.session import Bench, Bounds
from mpipar.comm.connect import cuda_aware
from mpipar.comm.facts import broadcast_text
from mpipar.config import flags
from mpipar.config.sizes import read_bytes
from mpipar.console.progress import progress
from mpipar.errors import (
    EXIT_CHECK_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EnvironmentProblem,
    UsageError,
    suggestion,
)
from mpipar.files.text import counted
from mpipar.job import gpus
from mpipar.job.session import guard
from mpipar.job.streams import above
from mpipar.ops.mixed_ops import DTYPES as MIXED

FIXED_BY_QUICK = (
    "-b",
    "--begin-bytes",
    "-e",
    "--end-bytes",
    "-f",
    "--factor",
    "--target",
    "-w",
    "--warm-up",
    "-n",
    "--iterations",
)
SECONDS = 0.5
DTYPES = ("float32", "float64", *MIXED)
MOST_ITERATIONS = 100_000


def add_repeats(parser) -> None:
    """Add the flags for how often each size and way is repeated."""
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"time for each size and way ({SECONDS:g}); with --quick, of the "
        f"whole run, all launches ({budget.SECONDS:g})",
    )
    parser.add_argument(
        "--target",
        type=float,
        default=0.02,
        help="stop when the median is known to this share (0.02)",
    )
    parser.add_argument(
        "-w",
        "--warm-up",
        type=int,
        default=5,
        metavar="N",
        help="warm-up iterations of each size and way (5)",
    )
    parser.add_argument(
        "-n",
        "--iterations",
        type=int,
        default=0,
        metavar="N",
        help="exactly this many counted iterations (0: determined by --seconds and --target)",
    )


def parse(argv):
    """Read and check the flags. Raises UsageError."""
    parser = flags.Parser(prog="python -m bench.interconnect", description=__doc__)
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help=f"{', '.join(plans.CASES)}, or all (with --quick the default)",
    )
    parser.add_argument(
        "--layout",
        metavar="dp=2,tp=2",
        help="run on this layout's groups, one at a time and all at once",
    )
    parser.add_argument(
        "-b",
        "--begin-bytes",
        default="8",
        metavar="SIZE",
        help="smallest size (8); 0 is a size too",
    )
    parser.add_argument("-e", "--end-bytes", default="4M", metavar="SIZE", help="largest size (4M)")
    parser.add_argument("-f", "--factor", type=float, default=2.0, help="factor between sizes (2)")
    parser.add_argument("--window", type=int, default=64, help="messages in flight (64)")
    parser.add_argument(
        "-d",
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the numbers; MPI adds no 16-bit ones, mpipar.comm does (float32)",
    )
    parser.add_argument(
        "--ways",
        default="mpipar.comm,mpi4py,persistent",
        metavar="WAY,WAY",
        help=f"how to run it, of {', '.join(plans.WAYS)}, or all; C where there is "
        "a compiler, algorithms beside MPI's own (the first three)",
    )
    parser.add_argument("--transport", choices=tuple(WIRES), default="mpi-host")
    parser.add_argument("--buffers", choices=POLICIES, default="rotated")
    parser.add_argument(
        "--footprint",
        default="0",
        metavar="SIZE",
        help="memory that rotated buffers cycle through, twice per rank (0: the last-level cache)",
    )
    add_repeats(parser)
    parser.add_argument(
        "--sync",
        choices=tuple(STARTS),
        default="barrier",
        help="ranks start an iteration after a barrier (default), at an agreed "
        "instant of the common clock, or at once, for throughput",
    )
    parser.add_argument(
        "--overlap",
        type=int,
        metavar="K",
        help=f"also measure beside equally long computing with K tests; cases: "
        f"{', '.join(plans.POSTED_CASES)}",
    )
    parser.add_argument(
        "--routing",
        metavar="NAME,NAME",
        help=f"parts of all-to-allv: {', '.join(ROUTINGS)}, or all (hot)",
    )
    parser.add_argument(
        "--bound-GBps",
        type=float,
        metavar="X",
        help="report busbw in percent of this one-way rate of a rank's link; it "
        "applies between hosts if there are several; inside a host a "
        "memory copy is the bound",
    )
    parser.add_argument("--no-check", action="store_true", help="time without checking payloads")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few sizes, little time for each; ends in time on any link, and "
        "reports what it left out",
    )
    parser.add_argument(
        "--stall-seconds",
        type=float,
        default=60.0,
        help="end the job after this many seconds without progress (60; 0: never)",
    )
    parser.add_argument(
        "--launches",
        type=int,
        metavar="K",
        help=f"without a launcher: number of jobs ({launches.LAUNCHES})",
    )
    parser.add_argument(
        "--start", metavar="COMMAND", help=f"without a launcher: what starts a job ({START})"
    )
    parser.add_argument("--launch", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", help="write every row with its samples")
    args = parser.parse_args(argv)
    if args.seconds is None:
        args.seconds = budget.SECONDS if args.quick else SECONDS
    if "all" in args.cases or (args.quick and not args.cases):
        skipped = plans.WITHOUT_LAYOUT if args.layout else ()
        some = plans.CASES if args.overlap is None else plans.posted_cases(args.layout)
        args.cases = [case for case in some if case not in skipped]
    typed = {
        word.split("=")[0] if word.startswith("--") else word[:2]
        for word in argv
        if word.startswith("-")
    }
    if fixed := [name for name in FIXED_BY_QUICK if args.quick and name in typed]:
        raise UsageError(f"--quick has sizes of its own: leave out {', '.join(fixed)}, or --quick")
    return args


def chosen_sizes(args) -> tuple[int, ...]:
    """Return the sizes of every case. Raises UsageError, also for the footprint."""
    if found := plans.size_problems(
        {
            "--begin-bytes": args.begin_bytes,
            "--end-bytes": args.end_bytes,
            "--footprint": args.footprint,
        }
    ):
        raise UsageError(found)
    if args.quick:
        return budget.QUICK_SIZES
    return plans.geometric(read_bytes(args.begin_bytes), read_bytes(args.end_bytes), args.factor)


def chosen_sections(args, world_size: int) -> list[plans.Section]:
    """Return the sections to measure. Raises UsageError with all problems."""
    found = plans.case_problems(args.cases, args.layout, world_size)
    if args.overlap is not None:
        found += plans.overlap_problems(args.cases, args.layout, args.overlap)
    if not args.cases:
        found.append(f"name the cases to run: {', '.join(plans.CASES)}, or all")
    found += way_problems(args)
    routings = chosen_routings(args)
    if routings is not None:
        found += plans.routing_problems(routings, args.cases)
    if args.warm_up < 0 or not 0 <= args.iterations <= MOST_ITERATIONS:
        found.append(f"--warm-up must be 0 or above, --iterations from 0 to {MOST_ITERATIONS}")
    if args.window < 1 or not 0 < args.seconds < math.inf or not 0 < args.target < math.inf:
        found.append("--window, --seconds and --target must be above 0")
    if args.bound_GBps is not None and not 0 < args.bound_GBps < math.inf:
        found.append("--bound-GBps must be above 0, in GB/s = 1e9 bytes per second")
    if not 0 <= args.stall_seconds < math.inf:
        found.append("--stall-seconds must be 0 (never) or above")
    sizes = attempt(found, chosen_sizes, args)
    if args.layout is not None:
        layout = attempt(found, plans.read_layout, args.layout, world_size)
    if found:
        raise UsageError(found)
    if args.layout is not None:
        found = plans.layout_sections(args.cases, layout, sizes)
    else:
        found = plans.world_sections(args.cases, world_size, sizes)
    if routings is not None:
        found = plans.routed(found, routings)
    return found if args.overlap is None else plans.overlapped(found, args.overlap)


def chosen_routings(args) -> tuple[str, ...] | None:
    """Return the names in --routing; None without it."""
    if args.routing in (None, "all"):
        return args.routing and tuple(ROUTINGS)
    return tuple(args.routing.split(","))


def chosen_ways(args) -> tuple[str, ...]:
    """Return the kinds of ways to run, dropping unknown names. C: see `way_problems`."""
    names = plans.WAYS if args.ways == "all" else args.ways.split(",")
    return tuple(plans.WAYS[name] for name in names if name in plans.WAYS)


def way_problems(args) -> list[str]:
    """Return what is wrong with --ways."""
    names = [] if args.ways == "all" else args.ways.split(",")
    found = [
        f"--ways: no way {name!r}{suggestion(name, plans.WAYS)}; give some of "
        f"{','.join(plans.WAYS)}, or all"
        for name in names
        if name not in plans.WAYS
    ]
    if "C" in names and not can_run_in_c(args):
        found.append(
            "--ways C: its loops take known buffers of less than 2 GiB in host memory, "
            "and start after a barrier or at once; leave out C, or --buffers cold, "
            "--transport, --sync and larger sizes"
        )
    return found


def can_run_in_c(args) -> bool:
    """Return whether loops in C can do what these flags ask for."""
    large = not plans.size_problems({"": args.end_bytes}) and (
        read_bytes(args.end_bytes) > compiled.MOST_BYTES
    )
    return (
        args.transport == "mpi-host"
        and args.buffers != "cold"
        and (args.sync != "deadline" and not large)
    )


def loops_for(session, args):
    """Return the loops in C if rows of them are wanted, else None.

    With --ways all they are left out where they cannot run; world rank 0 says so. Comm: as
    `compiled.loops_of`.
    """
    if plans.IN_C not in chosen_ways(args) or not can_run_in_c(args):
        return None
    try:
        return compiled.loops_of(session)
    except EnvironmentProblem as error:
        if args.ways != "all":
            raise
        if session.world.rank == 0:
            print(error, file=sys.stderr)
        return None


def attempt(found: list[str], function, *arguments):
    """Return function(*arguments); if it raises UsageError, add its problems to `found`."""
    try:
        return function(*arguments)
    except UsageError as error:
        found += error.problems
        return None


def refuse_unaware(transport: str, tried: str) -> None:
    """Raise EnvironmentProblem if device memory would crash this MPI."""
    if transport == "mpi-cuda" and tried == "no":
        raise EnvironmentProblem(
            "this MPI does not accept device memory: a child job that sent"
            " some failed; use --transport staged"
        )


def chosen_job(args, loops) -> plans.Job:
    """Return what moves and how, from the flags. loops: None if there can be no rows in C."""
    kinds = tuple(kind for kind in chosen_ways(args) if kind != plans.IN_C or loops is not None)
    return plans.Job(args.dtype, args.buffers, args.transport, kinds)


def chosen_to_run(args, wanted, job: plans.Job) -> list:
    """Return the sections that the job has a way for. Raises UsageError if there is none."""
    found = [one for one in wanted if job.ways(one)]
    if not found:
        why = plans.left_out(args.cases, args.layout, wanted, job)
        raise UsageError(f"{'; '.join(why)}; nothing else is left to run: add a case or a way")
    return found


def chosen_plan(args) -> Plan:
    """Return the time limits and the start of the measurement, from the flags."""
    if args.quick:
        return Plan(0.05, 0.05, 5, 2, not args.no_check, args.sync)
    return Plan(
        args.seconds,
        args.target,
        warm_up=args.warm_up,
        check=not args.no_check,
        sync=args.sync,
        exactly=args.iterations,
    )


def say_head(bench, head) -> None:
    """Print to standard error what was found before anything is measured."""
    hosts = counted(len({place["host"] for place in bench.places}), "host")
    memory = f"{head['memory_copy_GBps']:.1f} GB/s, load {head['machine']['load']}"
    lines = [
        f"{head['library']}, {bench.world.size} ranks on {hosts}, {head['transport']}",
        f"clock: {head['clock']}; start: {head['start']}",
        f"CUDA-aware MPI: stated {head['cuda_aware_stated']}, child job {head['cuda_aware_tried']}",
        f"buffers {head['buffers']} through {head['footprint_bytes'] >> 20} MiB; memory {memory}",
        f"bound of busbw: {head['bound']}",
        *places.lines(bench.places),
    ]
    if head["crowded"]:
        lines.append("more ranks than cores on a host: trends are meaningful, times say little")
    lines += gpus.remarks(bench.places)
    print("\n".join(lines), file=sys.stderr, flush=True)


def begin(args, argv, bench, writer, tried: str) -> Bounds:
    """Print and write the head (world rank 0). tried: whether MPI accepts device memory."""
    head = bench.head(argv, args.launch)
    hosts = {place["host"] for place in bench.places}
    bounds = Bounds(args.bound_GBps, head["memory_copy_GBps"], args.transport, len(hosts) > 1)
    head |= {
        "cuda_aware_stated": cuda_aware(),
        "cuda_aware_tried": tried or "not tried",
        "bound": bounds.describe(),
    }
    writer.head(head)
    if args.launch <= 1:
        say_head(bench, head)
    return bounds


def in_random_order(sections, seed: int):
    """Yield every section with its sizes in random order."""
    shuffled = random.Random(seed)  # noqa: S311 - an order, the same on all ranks
    for section in sections:
        yield section, shuffled.sample(section.sizes, len(section.sizes))


def sweep(bench, turns, writer, bounds: Bounds | None) -> list[dict]:
    """Measure every section at its sizes; print each table once it is complete.

    turns: (section, sizes). bounds: on world rank 0, which has the rows.
    """
    rows = []
    with progress("measured", None, " sizes", disable=bounds is None) as line:
        for section, sizes in turns:
            line.set_description_str(section.title, refresh=False)
            new = [row | bounds.columns(row) for row in bench.run(section, sizes)]
            for row in new:
                writer.row(row)
            rows += new
            if new and not section.title.startswith("pairs"):
                with above(sys.stdout):
                    print(f"\n{table.as_text(new)}", flush=True)
            line.update(len({row["size_bytes"] for row in new}))
            if bench.stopped:
                break
    return rows


def main(argv, session) -> int:
    """Check, measure, print; 1 if a payload was wrong."""
    if argv[:1] == ["vet"]:
        return vet.main(argv[1:], session)
    args = parse(argv)
    if session.launcher.name is None or args.launches is not None:
        return launches.run(session, args, argv)
    if args.start:
        raise UsageError(
            f"--start {args.start}: starts jobs only where nothing else does; "
            f"{session.launcher.name} has started this one"
        )
    tried = (
        ""
        if args.transport == "mpi-host" or session.launcher.rank
        else cuda_probe.probe(cuda_probe.command())
    )  # before MPI starts here: a child job is a separate job
    world = session.start()
    wanted, footprint = session.agree(
        lambda: (chosen_sections(args, world.size), read_bytes(args.footprint))
    )
    loops = loops_for(session, args)
    job = chosen_job(args, loops)
    sections = session.agree(lambda: chosen_to_run(args, wanted, job))
    if world.rank == 0:
        for line in plans.left_out(args.cases, args.layout, wanted, job):
            print(line, file=sys.stderr)
    if args.quick:
        footprint = footprint or budget.QUICK_FOOTPRINT
    session.agree(lambda: refuse_unaware(args.transport, tried))
    bench = Bench(session, job, footprint, chosen_plan(args), args.window, loops=loops)
    writer = session.agree(lambda: Writer(args.json if world.rank == 0 else None, args.launch > 1))
    bounds = session.agree(  # no rank waits under the watchdog for rank 0's facts about the machine
        lambda: begin(args, argv, bench, writer, tried) if world.rank == 0 else None
    )
    with session.stop_on_request(), bench.watchdog(args.stall_seconds):
        limited = budget.Quick(bench, sections, args.seconds) if args.quick else None
        turns = limited.turns() if limited else in_random_order(sections, args.launch)
        rows = sweep(bench, turns, writer, bounds)
        if limited:
            limited.conclude()
        code = EXIT_INTERRUPTED if bench.stopped else EXIT_OK
        if world.rank == 0:
            code = print_outcome(args, bench, rows, writer, code)
    return int(broadcast_text(world, str(code)))


def print_outcome(args, bench, rows, writer, code: int) -> int:
    """Print and write the end on world rank 0; return the exit code."""
    findings.say(rows)
    writer.end(INTERRUPTED if bench.stopped else COMPLETE, refused=bench.refused)
    if bench.stopped:
        print("interrupted: rows up to here are complete", file=sys.stderr)
    for text in bench.refused:
        print(f"refused: {text}", file=sys.stderr)
    return code or (EXIT_CHECK_FAILED if bench.refused else EXIT_OK)


if __name__ == "__main__":
    guard(main)
