"""Starts the same benchmark several times, because one launch cannot show how launches differ."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import results, table
from bench.interconnect import findings, records, two_hosts
from bench.interconnect.compiled import program_of_mpi
from bench.interconnect.statistics import scipy_stats
from mpipar.errors import (
    EXIT_CHECK_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EnvironmentProblem,
    UsageError,
)
from mpipar.files.text import counted
from mpipar.job.environment import THREAD_VARIABLES

START, LAUNCHES = "mpiexec -n 2", 5  # the defaults of --start and --launches
START_SECONDS, LEAST_SECONDS = 2.0, 1.0  # of a quick launch: until it measures, and for measuring
LOOK_SECONDS = 0.2  # between checks of a running job: rare checks do not disturb its measurement
PATIENCE_SECONDS = 4.5  # a job has this long to end before each signal


def alone(session, start: str) -> None:
    """Raise UsageError under a launcher: a job inside a job would not be a fresh one."""
    if session.launcher.size > 1:
        raise UsageError(
            f"--launches starts the jobs itself ({start}): run it without {session.launcher.name}"
        )


def own_launcher() -> str:
    """Return the mpiexec beside Python, or else the system's. Raises EnvironmentProblem without
    one.
    """
    if (found := program_of_mpi("mpiexec")) is None:
        raise EnvironmentProblem("no mpiexec: pip install '.[mpich]'")
    return found


def launcher_words(start: str | None) -> list[str]:
    """Return the words of --start. Raises UsageError if a quotation mark is not closed."""
    try:
        return shlex.split(start) if start else [own_launcher(), *START.split()[1:]]
    except ValueError as error:
        raise UsageError(f"--start {start}: {error}; close it") from error


def own_command(args, argv, launch: int, path: str) -> list[str]:
    """Return the command line of one launch, which writes to `path`.

    It has the same flags, except those of several launches.
    """
    kept, skip = [], False
    for word in argv:
        name = word.split("=")[0]
        if skip or name in ("--launches", "--start", "--json"):
            skip = not skip and "=" not in word
            continue
        kept.append(word)
    return [
        *launcher_words(args.start),
        sys.executable,
        "-m",
        "bench.interconnect",
        *kept,
        "--json",
        path,
        "--launch",
        str(launch),
    ]


def environment_of_jobs() -> dict[str, str]:
    """Return this process's environment without the number of threads that `bench` chose for it.

    Each rank of a job has fewer cores, and chooses its own number. What the user set stays.
    """
    chosen = dict.fromkeys(THREAD_VARIABLES, str(len(os.sched_getaffinity(0))))
    own = chosen.items() <= os.environ.items()
    return {name: value for name, value in os.environ.items() if not (own and name in chosen)}


def run_job(session, command, env=None, **options) -> int:
    """Return the exit code of a command; options: of Popen. Raises OSError if it cannot start.

    env: its environment, that of `environment_of_jobs` by default.

    On a terminal a Ctrl-C reaches this process and the command. The command must not get it twice,
    because launchers take a second one as "immediately". So the signal is passed on only if the
    command has not ended within the time of a regular end.
    """
    job = subprocess.Popen(command, env=env or environment_of_jobs(), **options)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        left = PATIENCE_SECONDS
        while left > 0 and job.poll() is None:
            time.sleep(LOOK_SECONDS)
            left -= LOOK_SECONDS * session.stop_requested
        job.send_signal(number)  # has no effect if it has ended
    return job.wait()


def run(session, args, argv) -> int:
    """Start the jobs one after the other, and print the table of all; each appends to --json.

    Raises UsageError: see `alone`; EnvironmentProblem: see `scipy_stats`.
    """
    count = LAUNCHES if args.launches is None else args.launches
    if count < 1:
        raise UsageError("--launches must be at least 1")
    if args.quick and args.seconds < (least := count * (START_SECONDS + LEAST_SECONDS)):
        raise UsageError(
            f"--quick --seconds {args.seconds:g}: {counted(count, 'launch')}"
            f" take {least:g} s; give that, or fewer --launches"
        )
    alone(session, args.start or START)
    if count > 1:
        scipy_stats()  # fail before hours of measuring
    if args.json:
        results.check_writable(args.json)  # the first launch empties it, once its flags are right
    with tempfile.TemporaryDirectory() as folder, session.stop_on_request():
        path = args.json or str(Path(folder) / "rows.jsonl")
        code = run_jobs(session, args, argv, count, path)
        if code in (EXIT_OK, EXIT_CHECK_FAILED):
            print_outcome(records.rows_of([path]), count)
    return code


def run_jobs(session, args, argv, count: int, path: str) -> int:
    """Return the exit code of the jobs together; those after a failed one are not started."""
    code, end = EXIT_OK, time.monotonic() + args.seconds
    for launch in range(1, count + 1):
        print(f"launch {launch} of {count}", file=sys.stderr, flush=True)
        command = own_command(args, argv, launch, path)
        if args.quick:  # --seconds is the time of all launches; the last one given counts
            left = (end - time.monotonic()) / (count - launch + 1) - START_SECONDS
            command += ["--seconds", f"{max(LEAST_SECONDS, left):.1f}"]
        before = written(path)
        try:
            ended = run_job(session, command, stdout=None if count == 1 else subprocess.DEVNULL)
        except OSError as error:
            raise UsageError(f"--start {args.start or START}: {error.strerror}") from error
        if ended in (EXIT_OK, EXIT_CHECK_FAILED) and written(path) == before:
            raise UsageError(
                f"--start {args.start or START}: ended with {ended}, and no rank has "
                f"written to {path}; give a launcher and its flags, as {START}, and "
                "--json FILE in a folder that rank 0 shares"
            )
        code = code or ended
        if session.stop_requested or ended == EXIT_INTERRUPTED:
            return EXIT_INTERRUPTED
        if ended < 0 or ended > 1:
            return abs(ended)
    return code


def written(path: str) -> int | None:
    """Return when a file was last written; None if there is none."""
    try:
        with open(path, "rb") as file:  # opened: a shared folder may else report an old time
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def print_outcome(rows, count: int) -> None:
    """Print what several launches show together; one has printed its own tables."""
    if count == 1:
        return
    if plain := [row for row in rows if not row["case"].startswith("pairs ")]:
        print("\n" + table.as_text(plain))
    findings.say(rows)


@contextlib.contextmanager
def job_of(folder: Path, ranks: int, mbit_per_second: int):
    """Return a function (session, words of python -m) -> exit code that runs the words on all
    ranks.

    mbit_per_second: of the cable between two hosts with a rank each; 0 for one host.
    """
    launcher = own_launcher()
    environment = environment_of_jobs() | {"PYTHONPATH": str(results.ROOT)}
    with contextlib.ExitStack() as stack:
        prefix = [launcher, "-n", str(ranks)]
        if mbit_per_second:
            hosts = stack.enter_context(two_hosts.two_hosts(folder, mbit_per_second))
            prefix = hosts.mpiexec(launcher, (1, 1))
            environment |= two_hosts.OVER_TCP

        def start(session, words: list[str]) -> int:
            return run_job(
                session,
                [*prefix, sys.executable, "-m", *words],
                env=environment,
                stdout=subprocess.DEVNULL,
            )

        yield start


def over_cable(session, rate: int, words: list[str]) -> tuple[int, dict | None]:
    """Return (exit code, what `python -m` with these words and --json writes, or None).

    It runs on two ranks, each in a network namespace with one end of a cable of `rate` Mbit/s.
    Raises UsageError under a launcher, EnvironmentProblem if namespaces are impossible.
    """
    if session.launcher.size > 1:
        raise UsageError(f"--cable starts its ranks itself: run it without {session.launcher.name}")
    if reason := two_hosts.missing():
        raise EnvironmentProblem(f"--cable: no network namespaces here: {reason}")
    with tempfile.TemporaryDirectory() as name, job_of(Path(name), 2, rate) as start:
        path = Path(name) / "rows.json"
        code = start(session, [*words, "--json", str(path)])
        found = json.loads(path.read_text()) if path.exists() else None
    if found:
        found["rows"] = [{"cable_mbit": rate, **row} for row in found["rows"]]
    return code, found
