"""Vets the hosts of a job: which of them is slower than the others, in computing or in messages.

    mpiexec -n 8 python -m bench interconnect vet [--limit 1.5] [--rounds 3]

Every rank repeats the same piece of work, and every pair of ranks exchanges messages of 8 bytes and
of 1 MiB. Pairs that have no rank in common do so at the same time, each time with other neighbours.
For each rank and pair the best time is taken, because other programs spoil some, not all.

A pair is compared with the median pair on the same kind of link. A rank is rated by its median
partner, so that one slow rank does not spoil the others. It is a suspect if it takes --limit times
the median of all, and is further from it than five times the usual distance (MAD). A pair is a
suspect if it is that slow although neither of its ranks is. Where ranks share cores, a message
takes as long as its receiver waits for one, so only computing is compared. The last line names
hosts for --exclude of sbatch and srun. Exit codes: 0 none is suspected, 1 some are, 2 there are too
few to compare.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import combinations
from statistics import median
from typing import NamedTuple

import numpy as np

from bench import results
from bench.interconnect.groups import link_of
from bench.interconnect.noise import BASE, MODULUS, Noise
from bench.interconnect.places import place_fact
from bench.program import Program
from bench.timing import seconds_of
from mpipar.comm.facts import broadcast_text, gather_facts, gather_numbers
from mpipar.comm.hosts import cores_of
from mpipar.config import flags
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK, EXIT_USAGE
from mpipar.job.watchdog import state_of
from mpipar.ops import make

LEAST_RANKS = 3  # with two it is unclear which one is slow
SIZES = {"latency": 8, "transfer": 1 << 20}  # bytes of the messages
TRIPS = {"latency": 30, "transfer": 3}  # in one turn of a pair
WORKS = 40  # pieces of work in one round
FAR = 5.0  # times the usual distance from the median
NORMAL = 1.4826  # a normal distribution's standard deviation over its MAD
TAG = 9
Pair = tuple[int, int]


class Suspect(NamedTuple):
    """What is slow: the ranks, in what, how many times the median, and the hosts to leave out."""

    ranks: tuple[int, ...]
    what: str
    factor: float
    hosts: tuple[str, ...]

    def __str__(self) -> str:
        names = " and ".join(map(str, self.ranks))
        return (
            f"rank{'s' * (len(self.ranks) > 1)} {names}: {self.what} {self.factor:.1f} times"
            " the median"
        )


def rounds_of(size: int) -> list[list[Pair]]:
    """Return all pairs of ranks, in rounds of pairs that have no rank in common (a round robin)."""
    circle = [*range(size), *([-1] if size % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def outliers(values: dict, limit: float) -> dict:
    """Return {name: times the median} of outliers. Fewer than three values are not compared."""
    if len(values) < LEAST_RANKS:
        return {}
    middle = median(values.values())
    usual = NORMAL * median(abs(value - middle) for value in values.values())
    return {
        name: value / middle
        for name, value in values.items()
        if value > limit * middle and value - middle > FAR * usual
    }


def suspects(
    work: list[float],
    pairs: dict[str, dict[Pair, float]],
    links: dict[Pair, str],
    hosts: list[str],
    limit: float,
) -> list[Suspect]:
    """Return the slow ranks and pairs.

    work: of each rank; pairs: {what: {pair: seconds}}; links: the kind of each.
    """
    found = [
        Suspect((rank,), "computing", factor, (hosts[rank],))
        for rank, factor in outliers(dict(enumerate(work)), limit).items()
    ]
    for what, times in pairs.items():
        kinds = {
            kind: median(time for pair, time in times.items() if links[pair] == kind)
            for kind in set(links.values())
        }
        over = {pair: time / kinds[links[pair]] for pair, time in times.items()}
        ranks = {
            rank: median(value for pair, value in over.items() if rank in pair)
            for rank in range(len(work))
        }
        slow = outliers(ranks, limit)
        found += [Suspect((rank,), what, factor, (hosts[rank],)) for rank, factor in slow.items()]
        found += [
            Suspect(pair, f"{what} between them", factor, ())
            for pair, factor in outliers(over, 2 * limit).items()
            if not {*pair} & {*slow}
        ]
    return found


def work_seconds(exponent: int) -> float:
    """Return the best time of a fixed piece of work on this rank's core."""
    return min(seconds_of(partial(pow, BASE, exponent, MODULUS), WORKS))


def pair_seconds(world, pair: Pair, what: str) -> float:
    """Return the best half of a round trip of this pair. Comm: TRIPS round trips."""
    x = np.zeros(SIZES[what], np.uint8)

    def trip() -> None:
        if world.rank == pair[0]:
            world.Send(x, pair[1], TAG)
            world.Recv(x, pair[1], TAG)
        else:
            world.Recv(x, pair[0], TAG)
            world.Send(x, pair[0], TAG)

    return min(seconds_of(trip, TRIPS[what])) / 2


def measure(world, rounds: int, progress) -> tuple[list[float], dict] | None:
    """Return (work of each rank, {what: {pair: seconds}}) on world rank 0, None elsewhere.

    Comm: a broadcast, the messages of all pairs, barriers, and a gather.
    """
    exponent = (1 << int(broadcast_text(world, str(Noise.bits())))) - 1
    table = np.full((1 + len(SIZES), world.size), np.inf)
    for number in range(rounds):
        table[0] = np.minimum(table[0], work_seconds(exponent))
        turns = rounds_of(world.size)
        for turn in turns[number % len(turns) :] + turns[: number % len(turns)]:
            progress()
            world.Barrier()
            for pair in (pair for pair in turn if world.rank in pair):
                peer = sum(pair) - world.rank
                for row, what in enumerate(SIZES, 1):
                    table[row, peer] = min(table[row, peer], pair_seconds(world, pair, what))
    tables = gather_numbers(world, table)
    if tables is None:
        return None
    return tables[:, 0, 0].tolist(), {
        what: {
            pair: float(tables[pair[0], row, pair[1]])
            for pair in combinations(range(world.size), 2)
        }
        for row, what in enumerate(SIZES, 1)
    }


def lines_of(work, pairs, hosts) -> list[dict]:
    """Return a line for each rank: its work, and the median of its pairs."""
    return [
        {
            "rank": rank,
            "host": hosts[rank],
            "work_us": f"{own * 1e6:.1f}",
            **{
                f"{what}_us": f"{median(t for pair, t in times.items() if rank in pair) * 1e6:.1f}"
                for what, times in pairs.items()
            },
        }
        for rank, own in enumerate(work)
    ]


def add_flags(parser) -> None:
    """Add the flags for what counts as slow, and how often to look."""
    parser.add_argument(
        "--limit",
        type=float,
        default=1.5,
        help="a rank is slow from this many times the median (1.5)",
    )
    parser.add_argument("--rounds", type=flags.count, default=3, help="of everything (3)")


def check(args, parser) -> None:
    """Check that the limit is above 1, which all ranks would pass. Raises UsageError."""
    if not args.limit > 1:
        parser.error("--limit must be above 1")


def vetted(args, session) -> int:
    """Measure, print the verdict; return the exit code."""
    world = session.world
    if world.size < LEAST_RANKS:
        if world.rank == 0:
            print(
                f"too few to compare: {world.size} of at least {LEAST_RANKS} ranks; with two it"
                " is unclear which one is slow",
                file=sys.stderr,
            )
        return EXIT_USAGE
    places = gather_facts(world, place_fact(world.rank, make("cpu", "float32")))
    steps: list[int] = []
    with session.watch.following(lambda: len(steps), lambda: state_of(where="vetting"), 60.0):
        found = measure(world, args.rounds, lambda: steps.append(1))
    crowded = cores_of(world).crowded
    code = say(found, places, args.limit, crowded) if found else EXIT_OK
    return int(broadcast_text(world, str(code)))


def say(found, places, limit: float, crowded: bool = False) -> int:
    """Print what was measured and who is suspected (world rank 0); return the exit code.

    crowded: ranks share cores, so messages say nothing.
    """
    work, pairs = found
    hosts = [place["host"] for place in places]
    links = {pair: link_of(places, pair) for pair in pairs["latency"]}
    print(results.text_table(lines_of(work, pairs, hosts)))
    if crowded:
        print("more ranks than cores on a host: only computing is compared")
    slow = suspects(work, {} if crowded else pairs, links, hosts, limit)
    for one in slow:
        print(f"suspect: {one}" + "".join(f" ({host})" for host in one.hosts))
    out = sorted({host for one in slow for host in one.hosts})
    if not slow:
        print(f"no suspects: {len(work)} ranks on {len(set(hosts))} hosts")
    elif out and len(out) < len(set(hosts)):
        print(f"--exclude={','.join(out)}")
    return EXIT_CHECK_FAILED if slow else EXIT_OK


main = Program(
    "interconnect.vet", __doc__, vetted, together=True, json=None, add=add_flags, check=check
).started(__name__)
