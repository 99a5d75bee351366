"""Starts the same benchmark several times: one launch cannot show how launches differ."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench import results
from bench.interconnect import findings, records, two_hosts
from mpipar.console.tables import table
from mpipar.errors import EXIT_INTERRUPTED, EXIT_OK, UsageError
from mpipar.job.environment import THREAD_VARIABLES

START = "mpiexec -n 2"  # the default of --start
LOOK_SECONDS = 0.2  # between two looks at a running job: rare looks do not disturb its measurement
PATIENCE_SECONDS = 4.5  # a job has this long to end before each signal


def alone(session, start: str) -> None:
    """Raises UsageError under a launcher: a job inside a job would not be a fresh one."""
    if session.launcher.size > 1:
        raise UsageError(f"--launches starts the jobs itself ({start}): run it without "
                         f"{session.launcher.name}")


def launcher_words(start: str | None) -> list[str]:
    """The words of --start. Raises UsageError where a quotation mark is open."""
    try:
        return shlex.split(start or START)
    except ValueError as error:
        raise UsageError(f"--start {start}: {error}; close it") from error


def own_command(args, argv, launch: int) -> list[str]:
    """The command line of one launch: the same flags without --launches and --start."""
    kept, skip = [], False
    for word in argv:
        name = word.split("=")[0]
        if skip or name in ("--launches", "--start"):
            skip = not skip and "=" not in word
            continue
        kept.append(word)
    return [*launcher_words(args.start), sys.executable, "-m", "bench.interconnect", *kept,
            "--launch", str(launch)]


def environment_of_jobs() -> dict[str, str]:
    """This process's environment without the number of threads that `bench` chose for it alone.

    Each rank of a job has fewer cores, and chooses its own. What the user set stays.
    """
    chosen = dict.fromkeys(THREAD_VARIABLES, str(len(os.sched_getaffinity(0))))
    own = chosen.items() <= os.environ.items()
    return {name: value for name, value in os.environ.items() if not (own and name in chosen)}


def run_job(session, command, env=None, **options) -> int:
    """The exit code of a command; options: of Popen. Raises OSError where it cannot be started.

    env: its environment, that of `environment_of_jobs` by default.

    On a terminal a Ctrl-C reaches this process and the command. The command must not get it twice:
    launchers take a second one as "at once". So the signal is passed on only if the command has not
    ended within the time of a regular end.
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
    """Start --launches jobs, one after the other; each appends to --json.

    Raises UsageError: see `alone`.
    """
    if args.launches < 1:
        raise UsageError("--launches must be at least 1")
    alone(session, args.start or START)
    if not args.json:
        raise UsageError("--launches keeps the rows of all jobs in one file: give --json FILE")
    code = EXIT_OK
    results.check_writable(args.json)  # the first launch empties it, once its flags are right
    with session.stop_on_request():
        for launch in range(1, args.launches + 1):
            print(f"launch {launch} of {args.launches}", file=sys.stderr, flush=True)
            try:
                ended = run_job(session, own_command(args, argv, launch))
            except OSError as error:
                raise UsageError(f"--start {args.start}: {error.strerror}") from error
            code = code or ended
            if session.stop_requested or ended == EXIT_INTERRUPTED:
                return EXIT_INTERRUPTED
            if ended < 0 or ended > 1:
                return abs(ended)
    rows = records.rows_of([args.json])
    print(f"\n# between launches\n{spread_lines(rows)}")
    if broken := findings.guidelines(rows):
        print("\n# slower than what could replace it, in every launch\n"
              + findings.guideline_lines(broken))
    return code


@contextlib.contextmanager
def job_of(folder: Path, ranks: int, mbit_per_second: int):
    """A function (session, words of python -m) -> exit code that runs the words on all ranks.

    mbit_per_second: of the cable between two hosts with a rank each; 0 for one host.
    """
    launcher = Path(sys.prefix) / "bin" / "mpiexec"
    launcher = str(launcher) if launcher.exists() else "mpiexec"
    environment = environment_of_jobs() | {"PYTHONPATH": str(results.ROOT)}
    with contextlib.ExitStack() as stack:
        prefix = [launcher, "-n", str(ranks)]
        if mbit_per_second:
            hosts = stack.enter_context(two_hosts.two_hosts(folder, mbit_per_second))
            prefix = hosts.mpiexec(launcher, (1, 1))
            environment |= two_hosts.OVER_TCP

        def start(session, words: list[str]) -> int:
            return run_job(session, [*prefix, sys.executable, "-m", *words], env=environment,
                           stdout=subprocess.DEVNULL)

        yield start


def spread(rows) -> list[dict]:
    """For each operation and size: the spread of the launches' medians beside that inside a launch.

    Sizes that round to the same multiple of the ranks make one value of a launch.
    """
    found: dict = {}
    for row in rows:
        key = (row["case"], row["via"], row["mode"], tuple(row["ranks"]), row["size_bytes"])
        found.setdefault(key, {}).setdefault(row["launch"], []).append(row)
    lines = []
    for (case, via, *_, size), same in sorted(found.items(), key=lambda item: str(item[0])):
        medians = [statistics.median(row["median_us"] for row in rows) for rows in same.values()]
        middle = statistics.median(medians)
        inside = statistics.median((row["high_us"] - row["low_us"]) / row["median_us"]
                                   for rows in same.values() for row in rows)
        lines.append({"case": case, "via": via, "size_bytes": size, "launches": len(same),
                      "median_us": middle, "between": (max(medians) - min(medians)) / middle,
                      "inside": inside})
    return lines


def spread_lines(rows) -> str:
    """The spread as a table: (largest - smallest) / median of medians; 95 % interval / median."""
    head = ("case", "via", "size_B", "launches", "median_us", "between_launches", "inside_launch")
    lines = [head]
    lines += [(one["case"], one["via"], one["size_bytes"], one["launches"],
               f"{one['median_us']:.2f}", f"{one['between']:.1%}", f"{one['inside']:.1%}")
              for one in spread(rows)]
    return table(lines, left=2)
