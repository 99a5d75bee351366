"""What `mpipar net` does: measure, vet, show, compare."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from mpipar.comm.hosts import shares_cores
from mpipar.comm.objects import broadcast_text, gather_objects
from mpipar.errors import (
    EXIT_CHECK_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EnvironmentProblem,
    UsageError,
)
from mpipar.interconnect import compare, files, hosts, job, pictures, screen, vet
from mpipar.interconnect.arguments import START, Arguments
from mpipar.interconnect.compiled import program_of_mpi
from mpipar.interconnect.statistics import combined
from mpipar.ops import make as make_ops
from mpipar.run.process.environment import THREAD_VARIABLES
from mpipar.run.process.watchdog import state_of
from mpipar.study.plan.machine import SHEETS, load_machine

LOOK_SECONDS = 0.2  # between checks of a running job: rare checks do not disturb its measurement
PATIENCE_SECONDS = 4.5  # a job has this long to end before each signal


def run(session: Any, args: Arguments) -> int:
    """Measure, vet, show or compare; return the exit code. Comm: all of the benchmark's."""
    if args.verb in ("show", "compare"):
        session.facts = {}
        return (shown if args.verb == "show" else compared)(args) if is_first(session) else EXIT_OK
    if is_first(session):
        files.check_writable(args.json, args.csv, args.html, args.sheet)
    if session.launcher.name is None:
        return launches(session, args)
    if args.launches is not None and not args.launch:
        raise UsageError(
            f"--launches starts the jobs itself ({args.start}): run it without"
            f" {session.launcher.name}"
        )
    session.watch.stop = args.hang_stop
    session.start()
    return (vetted if args.verb else measured)(session, args)


def is_first(session: Any) -> bool:
    """Return whether this process prints."""
    return bool(session.launcher.rank == 0)


def sheet_of(name: str | None) -> tuple[dict[str, vet.Link] | None, str]:
    """Return (what links should do by a machine sheet, its text); without one, (None, cpu's text).

    Raises DataError, UsageError.
    """
    sheet = load_machine(name or "cpu")
    path = Path(name) if name and Path(name).is_file() else SHEETS / f"{name or 'cpu'}.toml"
    return (vet.links_of_sheet(sheet) if name else None), path.read_text()


def measured(session: Any, args: Arguments) -> int:
    """Measure all sections, print tables and closing lines. Comm: all of the benchmark's."""
    world = session.world
    sheet = session.agree(lambda: sheet_of(args.machine))
    bench = job.Bench(session, args)
    first, code, found = world.rank == 0, EXIT_OK, None
    if first:
        head = bench.head(session.launcher.name, sys.argv[2:])
        write(args, files.line("head", head))
    progress = bench.progress
    with (
        session.stop_on_request("this measurement"),
        session.watch.following(
            lambda: (progress.count, progress.doing), lambda: state_of(where=progress.doing)
        ),
    ):

        def say(rows: list[files.Row]) -> None:
            write(args, "".join(files.line("row", row) for row in rows))
            if rows and not args.quick:
                print(screen.text(rows), flush=True)

        rows = job.sweep(bench, say if first else lambda rows: None)
        if world.size > 2 and not bench.crowded and not bench.stopped:
            progress.doing = "pairs of ranks"
            found = vet.measure(world, 1, progress.advance)
    if first:
        write(args, files.line("end", {"refused": bench.refused}))
        slow = vet.slow_ones(found, bench.places, args.limit, sheet[0]) if found else []
        closing = screen.Closing(head, rows, bench.refused, found, slow, sheet[0])
        conclude(args, rows, closing, job.left_out_text(bench))
        if args.sheet and not args.launch:
            files.write_text(args.sheet, files.sheet(sheet[1], rows))
        code = (
            EXIT_INTERRUPTED if bench.stopped else EXIT_CHECK_FAILED if bench.refused else EXIT_OK
        )
    return int(broadcast_text(world, str(code)))


def write(args: Arguments, text: str) -> None:
    """Append to the file of --json; the head of the first launch empties it."""
    if args.json:
        is_new = args.launch <= 1 and text.startswith('{"kind":"head"')
        files.write_text(args.json, text, append=not is_new)


def conclude(
    args: Arguments, rows: list[files.Row], closing: screen.Closing, left_out: str = ""
) -> None:
    """Print what the rows show together, and write the files that were asked for."""
    if args.quick and rows:
        print(screen.text(rows, quick=True))
    lines = [*screen.contention(rows), screen.best_algorithms(rows), left_out]
    lines += [f"refused: {text}" for text in closing.refused]
    lines = [textwrap.fill(line, screen.WIDTH) for line in lines if line]
    print("\n".join([*lines, "", *closing.lines()]), flush=True)
    if args.csv and not args.launch:
        files.write_text(args.csv, files.as_csv(rows))
    if args.html and not args.launch:
        files.write_text(args.html, pictures.build(rows, closing.lines()))


def launches(session: Any, args: Arguments) -> int:
    """Start jobs one after the other, and show their rows together."""
    if args.verb:
        raise UsageError(
            f"vet compares ranks: start it with a launcher, as {args.start} mpipar net"
        )
    with tempfile.TemporaryDirectory() as folder, session.stop_on_request("this launch"):
        path = args.json or os.path.join(folder, "rows.jsonl")
        code = start_jobs(session, args, path)
        if code in (EXIT_OK, EXIT_CHECK_FAILED):
            tell(args, files.read(path))
    return code


def tell(args: Arguments, runs: list[files.Run]) -> None:
    """Print what several launches show together."""
    rows = combined([row for one in runs for row in one.rows])
    if not args.quick:
        print(screen.text(rows))
    refused = [text for one in runs for text in one.refused]
    conclude(args, rows, screen.Closing(runs[0].head, rows, refused))


def shown(args: Arguments) -> int:
    """Print results again, or write their table or page."""
    tell(args, [one for path in args.words[1:] for one in files.read(path)])
    return EXIT_OK


def compared(args: Arguments) -> int:
    """Compare two results; return 1 if something is slower, or missing in the second."""
    before, after = (
        [row for one in files.read(path) for row in one.rows] for path in args.words[1:]
    )
    lines, missing = compare.compared(before, after)
    if lines:
        print(compare.text(lines))
    for name in missing:
        print(f"missing: {name}")
    slower = sum(line["verdict"] == compare.SLOWER for line in lines)
    print(f"{slower} of {len(lines)} slower, {len(missing)} missing")
    return EXIT_CHECK_FAILED if slower or missing else EXIT_OK


def vetted(session: Any, args: Arguments) -> int:
    """Name slow hosts and links; return 1 if there are some. Comm: the messages of all pairs."""
    world = session.world
    sheet = session.agree(lambda: sheet_of(args.machine))[0]
    crowded = shares_cores(world)
    session.agree(lambda: check_comparable(world.size, crowded, 2 if sheet else vet.LEAST_RANKS))
    places = gather_objects(world, hosts.place_fact(make_ops("cpu", "float32"))) or []
    steps: list[int] = []
    with session.watch.following(lambda: len(steps), lambda: state_of(where="vetting")):
        found = vet.measure(world, vet.ROUNDS, lambda: steps.append(1))
    code = EXIT_OK
    if found is not None:
        names = [place["host"] for place in places]
        print(vet.host_table(found, names))
        slow = vet.slow_ones(found, places, args.limit, sheet)
        print("\n".join(vet.verdict(slow, names)))
        code = EXIT_CHECK_FAILED if slow else EXIT_OK
    return int(broadcast_text(world, str(code)))


def check_comparable(ranks: int, crowded: bool, least: int) -> None:
    """Raise EnvironmentProblem if it is unclear which rank or link would be slow."""
    if ranks < least:
        raise EnvironmentProblem(
            f"too few to compare: {ranks} of at least {least} ranks, or 2 with --machine SHEET"
        )
    if crowded:
        raise EnvironmentProblem(
            "more ranks than cores on a host: messages wait for cores; start fewer ranks"
        )


def launcher_words(start: str) -> list[str]:
    """Return the words of --start. Raises UsageError if there is no such program."""
    words = start.split()
    found = program_of_mpi(words[0]) if words else None
    if found is None:
        raise UsageError(f"--start {start}: there is no such program; give a launcher, as {START}")
    return [found, *words[1:]]


def environment_of_jobs() -> dict[str, str]:
    """Return this process's environment without the number of threads that it chose for itself.

    Each rank of a job has fewer cores, and chooses its own number. What the user set stays.
    """
    chosen = dict.fromkeys(THREAD_VARIABLES, str(len(os.sched_getaffinity(0))))
    own = chosen.items() <= os.environ.items()
    return {name: value for name, value in os.environ.items() if not (own and name in chosen)}


def run_job(session: Any, command: list[str], **options: Any) -> int:
    """Return the exit code of a command; options: of Popen. Raises OSError if it cannot start.

    On a terminal a Ctrl-C reaches this process and the command. The command must not get it twice,
    because launchers take a second one as "immediately". So the signal is passed on only if the
    command has not ended within the time of a regular end.
    """
    job = subprocess.Popen(command, env=environment_of_jobs(), **options)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        left = PATIENCE_SECONDS
        while left > 0 and job.poll() is None:
            time.sleep(LOOK_SECONDS)
            left -= LOOK_SECONDS * session.stop_requested
        job.send_signal(number)  # has no effect if it has ended
    return job.wait()


def start_jobs(session: Any, args: Arguments, path: str) -> int:
    """Start the jobs one after the other; each appends to `path`. Return their exit code.

    Those after a failed one are not started.
    """
    count, code = args.launches or 1, EXIT_OK
    prefix = launcher_words(args.start)
    for launch in range(1, count + 1):
        print(f"launch {launch} of {count}: {args.start}", file=sys.stderr, flush=True)
        words = ["-m", "mpipar", *sys.argv[1:], "--json", path, "--launch", str(launch)]
        before = os.path.getsize(path) if os.path.exists(path) else 0
        ended = run_job(session, [*prefix, sys.executable, *words], stdout=subprocess.DEVNULL)
        if ended in (EXIT_OK, EXIT_CHECK_FAILED) and os.path.getsize(path) == before:
            raise UsageError(
                f"--start {args.start}: ended with {ended}, and no rank has written to {path}; give"
                f" a launcher and its flags, as {START}"
            )
        code = code or ended
        if session.stop_requested or ended == EXIT_INTERRUPTED:
            return EXIT_INTERRUPTED
        if ended not in (EXIT_OK, EXIT_CHECK_FAILED):
            return abs(ended)
    return code
