"""Vets the hosts of a job: which of them, or which link, is slower than what is normal.

    mpiexec -n 8 mpipar net vet [--limit 1.5] [--machine SHEET]

Every pair of ranks exchanges messages of 8 bytes and of 1 MiB. Pairs that have no rank in common do
so at the same time, each time with other neighbours. For each pair the best time is taken, because
other programs spoil some, not all.

A pair is compared with the median pair on the same kind of link. A rank is rated by its median
partner, so that one slow rank does not spoil the others. It is slow if it takes --limit times the
median of all, and is further from it than five times the usual distance (MAD). A link is slow if
its pair is twice that slow although neither of its ranks is, or, with a machine sheet, if it takes
--limit times as long as the sheet says. Where ranks share cores, a message takes as long as its
receiver waits for one, so nothing can be compared.
"""

from collections.abc import Callable
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from mpipar.comm.objects import gather_numbers
from mpipar.interconnect.hosts import LINKS, link_of, seconds_of
from mpipar.run.console.tables import table

LEAST_RANKS = 3  # with two it is unclear which one is slow
SIZES = {"latency": 8, "transfer": 1 << 20}  # bytes of the messages
TRIPS = {"latency": 30, "transfer": 3}  # in one turn of a pair
ROUNDS, TAG = 3, 9
FAR, NORMAL = 5.0, 1.4826  # times the usual distance; a deviation over a MAD
Pair = tuple[int, int]
Places = list[dict[str, Any]]
Found = dict[str, dict[Pair, float]]  # {what: {pair: best half of a round trip, in seconds}}
Link = tuple[float, float]  # GB/s one way, latency in us of a collective


class Slow(NamedTuple):
    """What is slow: the ranks, in what, and how many times what is normal."""

    ranks: tuple[int, ...]
    what: str
    factor: float


def rounds_of(ranks: int) -> list[list[Pair]]:
    """Return all pairs of ranks, in rounds of pairs that have no rank in common (a round robin)."""
    circle = [*range(ranks), *([-1] if ranks % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def outliers(values: dict[Any, float], limit: float) -> dict[Any, float]:
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


def normal_seconds(what: str, link: Link) -> float:
    """Return how long a message takes on a sheet's link."""
    return link[1] * 1e-6 + (SIZES[what] / (link[0] * 1e9) if what == "transfer" else 0.0)


def slow_ones(
    found: Found, places: Places, limit: float, sheet: dict[str, Link] | None = None
) -> list[Slow]:
    """Return the slow ranks and links. sheet: {kind of link: what it should do}."""
    slow: list[Slow] = []
    for what, times in found.items():
        kinds = {pair: link_of(places, pair) for pair in times}
        middle = {
            kind: median(time for pair, time in times.items() if kinds[pair] == kind)
            for kind in set(kinds.values())
        }
        over = {pair: time / middle[kinds[pair]] for pair, time in times.items()}
        ranks = {
            one: median(value for pair, value in over.items() if one in pair)
            for one in range(len(places))
        }
        bad = outliers(ranks, limit)
        slow += [Slow((one,), what, factor) for one, factor in bad.items()]
        pairs = outliers(over, 2 * limit)
        if sheet:
            share = {
                pair: t / normal_seconds(what, sheet[kinds[pair]]) for pair, t in times.items()
            }
            pairs |= {pair: value for pair, value in share.items() if value > limit}
        slow += [Slow(pair, what, value) for pair, value in pairs.items() if not {*pair} & {*bad}]
    return slow


def pair_seconds(world: Any, pair: Pair, what: str) -> float:
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


def measure(world: Any, rounds: int, advance: Callable[[], None]) -> Found | None:
    """Return what was found on world rank 0, None elsewhere.

    Comm: the messages of all pairs, barriers, and a gather.
    """
    best = np.full((len(SIZES), world.size), np.inf)
    for number in range(rounds):
        turns = rounds_of(world.size)
        for turn in turns[number % len(turns) :] + turns[: number % len(turns)]:
            advance()
            world.Barrier()
            for pair in (pair for pair in turn if world.rank in pair):
                peer = sum(pair) - world.rank
                for row, what in enumerate(SIZES):
                    best[row, peer] = min(best[row, peer], pair_seconds(world, pair, what))
    every = gather_numbers(world, best)
    if every is None:
        return None
    pairs = list(combinations(range(world.size), 2))
    return {
        what: {pair: float(every[pair[0], row, pair[1]]) for pair in pairs}
        for row, what in enumerate(SIZES)
    }


def host_table(found: Found, hosts: list[str]) -> str:
    """Return a line for each host: its median messages."""
    rows: list[tuple[Any, ...]] = [("host", "ranks", "latency_us", "transfer_GB/s")]
    for name in dict.fromkeys(hosts):
        own = {one for one, host in enumerate(hosts) if host == name}
        latency, transfer = (
            median(time for pair, time in times.items() if own & {*pair})
            for times in found.values()
        )
        rate = SIZES["transfer"] / transfer * 1e-9
        rows.append((name, len(own), f"{latency * 1e6:.2f}", f"{rate:.4g}"))
    return table(rows)


def verdict(slow: list[Slow], hosts: list[str]) -> list[str]:
    """Return the lines that name slow links, hosts to keep, hosts to cordon, and --exclude=."""
    lines, why = [], dict[str, str]()
    for one in slow:
        text = f"{one.what} {one.factor:.1f} times the normal"
        if len(one.ranks) == 1:
            why.setdefault(hosts[one.ranks[0]], f"rank {one.ranks[0]}: {text}")
        else:
            ends = " - ".join(hosts[end] for end in one.ranks)
            lines.append(f"Slow link: {ends} (ranks {one.ranks[0]} and {one.ranks[1]}): {text}")
    names = list(dict.fromkeys(hosts))
    lines += [f"Vetted: {name}" for name in names if name not in why]
    lines += [f"Cordon: {name} ({text})" for name, text in why.items()]
    if 0 < len(why) < len(names):
        lines.append(f"--exclude={','.join(sorted(why))}")
    return lines


def links_of_sheet(machine: Any) -> dict[str, Link]:
    """Return what each kind of link should do, by a machine sheet."""
    return {
        kind: (machine.links[place].gbytes_s, machine.links[place].latency_us)
        for kind, place in zip(LINKS, (0, -1), strict=True)
    }
