"""Runs the cases that a cost model needs, with as many sizes and rounds as there is time for."""

from __future__ import annotations

import json
import random
import sys
from itertools import takewhile

from bench.interconnect import plans
from bench.interconnect.groups import link_of
from bench.interconnect.plans import GROUP_CASES, PAIR_CASES, Job, Section
from bench.interconnect.records import COMPLETE, INTERRUPTED, Writer
from bench.interconnect.sampling import Plan
from bench.interconnect.session import Bench
from mpipar.comm.facts import broadcast_text
from mpipar.comm.grid import Grid
from mpipar.comm.groups import Comms
from mpipar.comm.record import Recorder
from mpipar.config.layout import divisors
from mpipar.config.sizes import read_bytes
from mpipar.errors import DataError, UsageError
from mpipar.plan.link import WORKS, goes_alone, measure_hop, measure_sending
from mpipar.plan.machine import HOP, SENDING, STREAM, Curve, Eager

COLLECTIVES = ("all-reduce", "iall-reduce", "all-gather", "reduce-scatter", "barrier")
CONTENDED = ("all-reduce", "iall-reduce")
CONTENTION_SIZES = (4 << 10, 64 << 10, 1 << 20)
BEGIN_BYTES, FACTOR = 8, 2.0
EAGER_BYTES, EAGER_FACTOR = 16 << 10, 4.0
END_BYTES = "4M"
ROUNDS, SIZE_SECONDS = 5, 0.02  # rounds at most; seconds for each way of a size in a round
STALL_SECONDS = 60.0


def pairs_by_link(places, world_size: int) -> list[tuple[int, int]]:
    """One pair for each kind of link that world rank 0 has."""
    found: dict = {}
    for peer in range(1, world_size):
        found.setdefault(link_of(places, (0, peer)), (0, peer))
    return list(found.values())


def sections(pairs, world_size: int, sizes, only_steps: bool = False) -> list[Section]:
    """Messages on each pair, collectives on groups, and a layout's groups alone and together.

    Groups have every size that divides the world. only_steps: without what no step's prediction
    reads.
    """
    found = [Section(name, case, (pair,), sizes, "pair")
             for pair in pairs for name, case in PAIR_CASES.items()
             if not only_steps or name in (HOP, STREAM)]
    counts = divisors(world_size)[1:]
    for count in counts:
        for name in CONTENDED if only_steps else COLLECTIVES:
            case = GROUP_CASES[name]
            found.append(Section(name, case, (tuple(range(count)),),
                                 sizes if case.sized else (0,)))
    if len(counts) > 1:
        layout = {"pp": 1, "dp": world_size // counts[0], "cp": 1, "tp": counts[0]}
        found += plans.layout_sections(CONTENDED, layout, CONTENTION_SIZES)
        found += [one for one in plans.chain_sections(world_size, CONTENTION_SIZES)
                  if one.mode and not only_steps]
    return found


def run_rounds(bench, chosen, budget, seed: int, writer) -> list[dict]:
    """Run the rounds that there is time for; their rows on world rank 0.

    The first round finds the sizes for which each section has time. Later rounds take these in a
    random order, so that no size always has the same neighbour.
    Comm: the cases, and those of the budget.
    """
    rows, shuffled = [], random.Random(seed)  # noqa: S311 - an order, the same on all ranks
    known: list[list[int]] = [[] for _ in chosen]
    for number in budget.rounds(ROUNDS):
        for (section, own), sizes in zip(budget.shares(chosen), known, strict=True):
            order = shuffled.sample(sizes, len(sizes)) if number else kept(own, section, sizes)
            for row in bench.run(section, order):
                writer.row(row)
                rows.append(row)
            if bench.stopped:
                return rows
    return rows


def kept(budget, section, sizes):
    """Yield the sizes of a section that there is time for, and append each to `sizes`."""
    for size in budget.sizes(section.sizes):
        sizes.append(size)
        yield size


def no_refused(refused) -> None:
    """Raise DataError if a payload was wrong."""
    if refused:
        raise DataError([f"refused: {text}" for text in refused])


def several(world_size: int) -> None:
    """Raise UsageError if there is nobody to send messages to."""
    if world_size < 2:
        raise UsageError("messages need at least 2 ranks: start it with mpiexec -n 2")


def open_bench(session, dtype: str, buffers="rotated", transport="mpi-host"):
    """(Bench, places of all ranks) for short rounds. Raises UsageError on one rank."""
    session.agree(lambda: several(session.world.size))
    bench = Bench(session, Job(dtype, buffers, transport), 0, Plan(SIZE_SECONDS, warm_up=2))
    if session.world.rank == 0 and bench.crowded():
        print("more ranks than cores on a host: shapes only, times say little", file=sys.stderr)
    return bench, json.loads(broadcast_text(session.world, json.dumps(bench.places)))


def measure_rows(session, dtype: str, args, budget) -> tuple[list[dict], list[dict]]:
    """(rows, [head]) on world rank 0, ([], []) elsewhere. args: of bench.calibrate.

    Raises UsageError and OutputError. Comm: the cases.
    """
    sizes = session.agree(
        lambda: plans.geometric(BEGIN_BYTES, read_bytes(args.end_bytes), FACTOR))
    bench, places = open_bench(session, dtype)
    world = session.world
    writer = session.agree(lambda: Writer(args.json if world.rank == 0 else None))
    chosen = sections(pairs_by_link(places, world.size), world.size, sizes, args.only_steps)
    heads = [bench.head([], 0)] if world.rank == 0 else []
    if heads:
        writer.head(heads[0])
    with bench.watchdog(STALL_SECONDS):
        rows = run_rounds(bench, chosen, budget, 0, writer)
    writer.end(INTERRUPTED if bench.stopped else COMPLETE, refused=bench.refused)
    session.agree(lambda: no_refused(bench.refused))
    return rows, heads


def measure_sends(world, ops, heads, end_bytes: int) -> tuple[tuple[Eager, ...], list[Curve]]:
    """What sending by each kind of link means for a sender that computes.

    The result is the largest message that moves meanwhile, and a curve of what each size takes of
    the sender's core.

    heads: of `measure_rows`, on world rank 0. Comm: one broadcast, messages of each pair.
    """
    places = json.loads(broadcast_text(world, json.dumps([head["places"] for head in heads])))[0]
    comms = Comms(Grid(world.rank, {"pp": world.size}), ops, Recorder(), world)
    eager, curves = [], []
    for pair in pairs_by_link(places, world.size):
        link, alone, seconds = link_of(places, pair), {}, {}
        for nbytes in plans.geometric(min(EAGER_BYTES, end_bytes), end_bytes, EAGER_FACTOR):
            x, y = (ops.zeros((nbytes // ops.dtype.itemsize,), label="buffers") for _ in range(2))
            if world.rank in pair:
                hop = measure_hop(comms["pp"], pair[1], x, repeats=1)
                alone[nbytes] = goes_alone(comms["pp"], pair[1], x, y, hop)
                seconds[nbytes] = measure_sending(comms["pp"], pair[1], x, y, hop)
        early = list(takewhile(alone.get, alone))
        eager.append(Eager(link, None if len(early) == len(alone) else
                           early[-1] if early else 0))
        if len(seconds) > 1:
            curves.append(Curve.through(SENDING, link, 2, seconds, WORKS))
    comms.close()
    return tuple(eager), curves
