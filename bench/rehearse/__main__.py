"""A training step without its model: all its messages and collectives, on your own network.

    mpiexec -n 4 python -m bench.rehearse llama-8b --layout pp=2,tp=2 --schedule zb-h1

The first word is a preset; flags that this program does not know are those of `mpipar explain`.
Each rank runs the real step on shapes, and notes what it sends and waits for, and in which order.
It then replays that repeatedly on a real network, in the groups, phases and places of training.
There are no weights. In the first step, which is not timed, every payload is checked on every rank.

Computing takes no time. With --compute X it takes X times the FLOPs of matmuls over --gflops.
Meanwhile a rank keeps its core busy, or yields it with --sleep. Neither takes bandwidth from
memory, as computing does.

Columns: calls and bytes of a step, summed over ranks. waited_ms: how long a rank was blocked, mean
over ranks and steps; most_ms: of the rank with the most. flight_ms: from posting to the end.
bound_ms: the bytes that a rank sends over --bound-GBps, or over the rate of a memory copy inside
one host.

--beside 'PRESET --layout ...' rehearses another job on every second rank: each alone, then both.

--first-ranks plays the first ranks of a layout that needs more of them than there are here, with
what they send in it; see first_ranks.py for who stands in for their absent peers.
"""

from __future__ import annotations

import argparse
import re
import shlex
import statistics
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.interconnect.session import copy_rate
from bench.program import Outcome, Program
from bench.rehearse.first_ranks import FirstRanks, described, with_stand_ins
from bench.rehearse.pace import at_rate
from bench.rehearse.player import Player, Steps, room_needed
from bench.rehearse.script import Script, script_of
from bench.training import config_of
from mpipar import ops as ops_module
from mpipar.comm.algorithms import ALGORITHMS
from mpipar.comm.facts import all_gather_facts, broadcast_text, gather_facts
from mpipar.comm.grid import Grid
from mpipar.comm.hosts import quiet_barrier
from mpipar.comm.record import family
from mpipar.console.tables import layout_text, nbytes
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK, OutputError, UsageError
from mpipar.files.text import counted, shown
from mpipar.trace.tracer import Tracer

WARM_UP, TRACED = 2, 3  # steps
SUMS = ("calls", "payload", "sent", "waited_ns", "flight_ns")


class Job(NamedTuple):
    """A rehearsal: its words, its configuration, and the world ranks that play it."""

    words: tuple[str, ...]
    config: Any
    ranks: tuple[int, ...]


def add_flags(parser) -> None:
    """Add the flags that `mpipar explain` does not have."""
    parser.add_argument("preset", metavar="PRESET", help="the model, as --preset of training")
    parser.add_argument(
        "--compute",
        metavar="X",
        type=scale,
        default=0.0,
        help="computing takes X times its modelled time; none: no time (none)",
    )
    parser.add_argument(
        "--gflops",
        metavar="N",
        type=positive,
        help="the model of computing: this rate of a rank's products",
    )
    parser.add_argument("--sleep", action="store_true", help="sleep instead of keeping a core busy")
    parser.add_argument(
        "--bound-GBps", metavar="N", type=positive, help="rate of a rank's link, one way"
    )
    parser.add_argument(
        "--all-reduce",
        choices=["levels", *ALGORITHMS],
        default="mpi",
        help="how sums travel, as in training (mpi)",
    )
    parser.add_argument("--beside", metavar="'WORDS'", help="another rehearsal at the same time")
    parser.add_argument(
        "--first-ranks",
        action="store_true",
        help="the layout may be larger than this job: play its first ranks",
    )
    parser.add_argument("--trace", metavar="FOLDER", help="write a trace of three more steps")


def positive(text: str) -> float:
    """Return a number above 0: the type of an argument."""
    with suppress(ValueError):
        if 0 < (number := float(text)) < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"{shown(text)}: must be a number above 0")


def scale(text: str) -> float:
    """Return None for none, or a number above 0: the type of an argument."""
    return 0.0 if text == "none" else positive(text)


def check(args, parser) -> None:
    """Check that the flags fit together. Raises UsageError."""
    if args.compute and args.gflops is None:
        raise UsageError("--compute X: needs the time of computing to scale; add --gflops N")
    if args.gflops is not None and not args.compute:
        raise UsageError(
            "--gflops N: is the rate of what --compute X lets a rank compute; add --compute 1"
        )
    if args.trace is not None and args.beside is not None:
        raise UsageError("--trace, --beside: a trace is of one job; give one of them")
    if args.first_ranks and (args.beside is not None or args.trace is not None):
        raise UsageError(
            "--first-ranks: goes with neither --beside nor --trace, which are of whole"
            " layouts; leave one of them out"
        )


def words_of(text: str) -> list[str]:
    """Return the words of --beside. Raises UsageError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--beside {shown(text)}: {error}") from None


def make_folder(name: str | None) -> None:
    """Make the folder of --trace. Raises OutputError, also if it has a trace already."""
    if name is None:
        return
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
        if (Path(name) / "trace").exists():
            raise OutputError(f"--trace {name}: has a trace; name another folder")
    except OSError as error:
        raise OutputError(f"--trace {name}: {error.strerror}") from error


def configured(words: list[str], args) -> Any:
    """Return the resolved config of a rehearsal's words."""
    if not words or words[0].startswith("-"):
        raise UsageError("--beside 'PRESET --layout ...': the first word is a preset")
    for word in words:
        if word.split("=")[0] == "--preset":
            raise UsageError(f"{word}: the first word is the preset; leave it out")
    config = config_of(["--preset", *words])
    return replace(config, run=replace(config.run, all_reduce=args.all_reduce))


def jobs_of(args, num_ranks: int) -> list[Job]:
    """Return the rehearsals of this job, and their ranks: with two, every second rank each."""
    texts = [[args.preset, *args.words]]
    if args.beside is not None:
        texts.append(words_of(args.beside))
    configs = [configured(words, args) for words in texts]
    needed = [Grid.of(config.grid, 0).world_size for config in configs]
    if args.first_ranks:
        if not 1 < num_ranks < needed[0]:
            raise UsageError(
                f"--first-ranks: {layout_text(configs[0].grid)} has"
                f" {counted(needed[0], 'rank')}, but this job {num_ranks}: give a"
                " larger layout, or leave --first-ranks out; start two ranks or more"
            )
        needed = [num_ranks]
    if sum(needed) != num_ranks or 1 in needed:
        which = " and ".join(
            f"{layout_text(config.grid)} ({counted(count, 'rank')})"
            for config, count in zip(configs, needed, strict=True)
        )
        raise UsageError(
            f"{which}: this job has {counted(num_ranks, 'rank')}; start"
            f" mpiexec -n {max(2, sum(needed))}, with two ranks or more in each"
            " layout"
        )
    owners = [
        number
        for _, number in sorted(
            (turn, number) for number, count in enumerate(needed) for turn in range(count)
        )
    ]
    return [
        Job(
            tuple(words),
            config,
            tuple(rank for rank, owner in enumerate(owners) if owner == number),
        )
        for number, (words, config) in enumerate(zip(texts, configs, strict=True))
    ]


def memory_left() -> int:
    """Return the bytes that this host has available; very many if it does not report them."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return sys.maxsize
    found = re.search(r"^MemAvailable: +(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) << 10 if found else sys.maxsize


def check_room(script: Script, on_host: int) -> None:
    """Raise UsageError if the payloads of a rank do not fit into its host's memory.

    on_host: the ranks of the host.
    """
    needed, free = room_needed(script), memory_left() // on_host
    if needed > free:
        raise UsageError(
            f"the payloads of rank {script.world_rank} need {nbytes(needed)}, and"
            f" {nbytes(free)} are free for each rank of its host; take more ranks or a"
            " smaller model"
        )


def player_of(job: Job, args, session) -> Player:
    """Return this rank's part of its job.

    Comm: a split of the world, agreements, that of `Player` and, with first ranks, a gather of
    facts.
    """
    mine, grid = session.world.Split(job.ranks[0], session.world.rank), None
    ops = session.agree(lambda: ops_module.make_for(job.config.run, session.host_rank))
    script = session.agree(lambda: script_of(job.config, mine.rank))
    if args.first_ranks:
        script, grid = with_stand_ins(script, mine), FirstRanks.here(job.config, mine)
    session.agree(lambda: check_room(script, len(session.host_ranks)))
    player = Player(job.config, mine, ops, script, grid)
    player.seconds, player.sleeps = at_rate(script, args.compute, args.gflops), args.sleep
    return player


def measure(args, session) -> Outcome | int:
    """Check the payloads, play alone and, with --beside, both at once; report what it took."""
    world = session.world
    jobs = session.agree(lambda: jobs_of(args, world.size))
    session.agree(lambda: make_folder(args.trace if world.rank == 0 else None))
    number = next(at for at, job in enumerate(jobs) if world.rank in job.ranks)
    player = player_of(jobs[number], args, session)
    wrong = [
        f"rank {rank}: {text}"
        for rank, text in enumerate(gather_facts(world, player.check()) or ())
        if text
    ]
    if broadcast_text(world, "wrong" if wrong else ""):
        print("\n".join(wrong), end="\n" if wrong else "")
        return EXIT_CHECK_FAILED
    alone, together = Steps([], []), Steps([], [])
    for turn in range(len(jobs)):
        if turn == number:
            player.steps(WARM_UP)
            alone = played(player, args)
        quiet_barrier(world)
    if len(jobs) > 1:
        together = player.steps(args.steps, max(all_gather_facts(world, sum(alone.seconds))))
    steps, slowdown = slowest(player.world, alone.seconds), None
    if together.seconds:
        both = slowest(player.world, together.seconds)
        slowdown = statistics.median(both) / statistics.median(steps)
    facts = gather_facts(world, Share(number, steps, slowdown, sums_of(player, alone)))
    player.close()
    if facts is None:
        return EXIT_OK
    found = outcome(jobs, [Share(*fact) for fact in facts], args, session)
    return (
        found
        if not args.first_ranks
        else found._replace(
            head=found.head + described(jobs[0].config, player.script, found.rows, world) + "\n"
        )
    )


class Share(NamedTuple):
    """What a rank reports. job: its number. steps: the seconds of its job's steps.

    slowdown: how much longer these take beside another job. sums: those of `sums_of`.
    """

    job: int
    steps: list[float]
    slowdown: float | None
    sums: list


def played(player: Player, args) -> Steps:
    """Return the steps of a job that plays alone; the last ones are traced. Comm: the steps'."""
    steps = player.steps(args.steps)
    if args.trace is not None:
        tracer = Tracer(player, player.world, Path(args.trace), (1, TRACED))
        player.steps(TRACED, around=tracer.step)
    return steps


def slowest(world, seconds: list[float]) -> list[float]:
    """Return the time of each step on the slowest rank. Comm: a gather of facts to all."""
    return [max(times) for times in zip(*all_gather_facts(world, seconds), strict=True)]


def sums_of(player: Player, steps: Steps) -> list:
    """Return [[barrier, sums of a step], ...] of this rank. A barrier: axis, name, operation,
    phase.
    """
    sums: dict = defaultdict(lambda: [0.0] * len(SUMS))
    for record in (record for records in steps.records for record in records):
        key = record.axis, family(record.name), record.operation, record.phase
        values = (
            1,
            record.payload_bytes,
            record.wire_bytes,
            record.done_ns - record.waited_ns,
            record.done_ns - record.posted_ns,
        )
        sums[key] = [one + more for one, more in zip(sums[key], values, strict=True)]
    return [[key, [value / len(steps.seconds) for value in found]] for key, found in sums.items()]


def outcome(jobs: list[Job], shares: list[Share], args, session) -> Outcome:
    """Return what world rank 0 reports of all jobs."""
    rate = args.bound_GBps
    if rate is None and len(session.host_ranks) == session.world.size:
        rate = copy_rate()
    rows, head = [], []
    for number, job in enumerate(jobs):
        own = [share for share in shares if share.job == number]
        rows += [
            ({"job": number + 1} if len(jobs) > 1 else {}) | row
            for row in barrier_rows([share.sums for share in own], rate)
        ]
        head.append(headline(job, own[0], args))
    end = []
    if rate is not None:
        source = "the rate of a memory copy" if args.bound_GBps is None else "as stated"
        end.append(f"bound: {rate:.4g} GB/s one way, {source}")
    if args.trace is not None:
        end.append(
            f"the trace of {TRACED} more steps is in {args.trace}; see it with: mpipar trace"
            f" {args.trace}"
        )
    facts = {
        "ranks": session.world.size,
        "words": [" ".join(job.words) for job in jobs],
        "compute": args.compute,
        "steps": args.steps,
        "step_ms": [
            1e3 * statistics.median(next(share.steps for share in shares if share.job == number))
            for number in range(len(jobs))
        ],
    }
    return Outcome(rows, facts, head="\n".join(head) + "\n", end="\n".join(end))


def headline(job: Job, share: Share, args) -> str:
    """Return the job, and how long its step takes."""
    grid, times = job.config.grid, sorted(1e3 * seconds for seconds in share.steps)
    order = f"{grid.schedule_csv or grid.schedule}, {counted(grid.num_microbatches, 'microbatch')}"
    computing = f"{args.compute:g} times its modelled time" if args.compute else "no time"
    slower = "" if share.slowdown is None else f"; {share.slowdown:.2f} times as long beside"
    return (
        f"{' '.join(job.words)}: {counted(len(job.ranks), 'rank')}, {order};"
        " every payload as it should be\n"
        f"a step takes {statistics.median(times):.2f} ms ({times[0]:.2f} to {times[-1]:.2f},"
        f" {counted(len(times), 'step')}), computing {computing}{slower}"
    )


def barrier_rows(by_rank: list[list], rate: float | None) -> list[dict]:
    """Return a row for each barrier of a job. rate: GB/s of a rank's link, one way, or None."""
    found: dict = defaultdict(list)
    for sums in by_rank:
        for key, values in sums:
            found[tuple(key)].append(dict(zip(SUMS, values, strict=True)))
    rows = []
    for key, ranks in sorted(found.items()):
        row = dict(zip(("axis", "barrier", "operation", "phase"), key, strict=True))
        mean = {name: sum(one[name] for one in ranks) / len(by_rank) for name in SUMS}
        row |= {
            "calls": round(sum(one["calls"] for one in ranks)),
            "bytes": round(sum(one["payload"] for one in ranks)),
            "waited_ms": mean["waited_ns"] * 1e-6,
            "most_ms": max(one["waited_ns"] for one in ranks) * 1e-6,
            "flight_ms": mean["flight_ns"] * 1e-6,
        }
        row |= {} if rate is None else {"bound_ms": mean["sent"] / rate * 1e-6}
        rows.append(row)
    return rows


main = Program(
    "rehearse",
    __doc__,
    measure,
    together=True,
    add=add_flags,
    check=check,
    counts={"--steps": (20, "timed steps")},
    takes_words=True,
).started(__name__)
