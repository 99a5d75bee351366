"""Measures for the cost model: products by shape, reductions, passes, messages, and whole steps.

Products and passes run on as many ranks at the same time as there are cores, which share caches and
memory as in training. For products we keep the fastest round; for passes, the median round of the
least disturbed interval, so that a slow spell of the machine does not count.

Messages and collectives have as many sizes and rounds as there is time for. Training steps are
predicted and then measured: every layout and schedule that a machine allows.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from dataclasses import replace
from functools import partial
from itertools import product, takewhile
from time import perf_counter

from bench.interconnect import plans
from bench.interconnect.groups import link_of
from bench.interconnect.plans import GROUP_CASES, PAIR_CASES, Job, Section
from bench.interconnect.records import COMPLETE, INTERRUPTED, Writer
from bench.interconnect.sampling import Plan
from bench.interconnect.session import Bench
from bench.machine.link import WORKS, goes_alone, measure_hop, measure_sending
from bench.machine.predicted import Subject, line
from bench.machine.units import largest
from bench.training import worker_of
from mpipar import ops as ops_module
from mpipar.comm.facts import broadcast_text
from mpipar.comm.grid import Grid
from mpipar.comm.groups import Comms
from mpipar.comm.hosts import in_turns
from mpipar.comm.record import Recorder
from mpipar.config.grid import GridConfig
from mpipar.config.layout import divisors
from mpipar.config.model import model_config
from mpipar.config.resolve import resolve
from mpipar.config.run import RunConfig
from mpipar.config.sections import Config
from mpipar.config.sizes import read_bytes
from mpipar.config.train import TrainConfig
from mpipar.data import rows
from mpipar.errors import DataError, UsageError
from mpipar.pipeline.costs import Costs
from mpipar.plan.machine import HOP, SENDING, STREAM, Curve, Eager, Product
from mpipar.plan.measure import measure_costs
from mpipar.plan.step import step_estimate

GEMM_SIDES = (32, 128, 512)
HELD_OUT_SIDES = (64, 256)  # between GEMM_SIDES
GEMM_SECONDS = 0.02
REDUCE_SIZES = tuple(1 << k for k in range(10, 23))
ROUNDS, PASS_ROUNDS, STEPS = 3, 6, 5
MICROBATCHES = 4  # of a measured step, for each pipeline rank


def time_product(ops, m: int, k: int, n: int) -> float:
    """Return the seconds of one product (M, K) x (K, N), median."""
    x, w = ops.zeros((m, k), label="buffers"), ops.zeros((k, n), label="buffers")
    ops.fill(x, 1)
    ops.fill(w, 1)
    ops.matmul(x, w)
    seconds, begin = [], perf_counter()
    while len(seconds) < 5 or perf_counter() - begin < GEMM_SECONDS:
        start = perf_counter()
        ops.matmul(x, w)
        ops.synchronize()
        seconds.append(perf_counter() - start)
    return statistics.median(seconds)


def measure_products(world, ops, sides=GEMM_SIDES) -> tuple[Product, ...]:
    """Time every shape of these sides; world rank 0 gets the slowest rank's times.

    Comm: a barrier and a gather for each; ranks take turns on the cores.
    """
    found = []
    for shape in product(sides, repeat=3):
        rounds = []
        for _ in range(ROUNDS):
            world.Barrier()
            rounds.append(
                largest(
                    world,
                    in_turns(world, world.rank, world.size, 1, partial(time_product, ops, *shape)),
                )
            )
        found.append(Product(*shape, min(rounds)))
    return tuple(found)


def measure_reduction(arena, repeats: int = 30) -> dict:
    """Return {bytes: [times in us]} of adding one buffer to another, as MPI does it here."""
    from mpi4py import MPI

    found = {}
    for size in REDUCE_SIZES:
        count = size // arena.ops.dtype.itemsize
        sources, targets = arena.cut("send", 1, count), arena.cut("receive", 1, count)
        times = []
        for _ in range(repeats):
            x, y = sources.take()[0], targets.take()[0]
            start = perf_counter()
            MPI.SUM.Reduce_local(x, y)
            times.append((perf_counter() - start) * 1e6)
        found[size] = [times]
    return found


def step_config(config: Config, rows: int, world_size: int, **axes: int) -> Config:
    """Return a layout's resolved config with microbatches of `rows` rows. Raises UsageError."""
    axes = {"dp": 1, "pp": 1, "tp": 1} | axes
    num_microbatches = MICROBATCHES * axes["pp"]
    return resolve(
        replace(
            config,
            grid=GridConfig(**axes, num_microbatches=num_microbatches),
            train=replace(config.train, batch_size=axes["dp"] * num_microbatches * rows),
        ),
        world_size,
    )[0]


def step_seconds(world, ops, config, budget) -> float:
    """Return the seconds of a real training step, median of a few.

    A step lasts from the first rank's start to the last rank's end. The batch is made beforehand.
    The first step counts only if the budget has no time for a second. Comm: the steps', a barrier
    before and after each, and those of the budget.
    """
    worker = worker_of(config, world, ops)
    batch, seconds = rows.blank_batch(ops, config), []
    for number in budget.rounds(STEPS + 1):
        world.Barrier()
        start = perf_counter()
        worker.train_step(number + 1, lambda mb: batch)
        world.Barrier()
        seconds.append(perf_counter() - start)
    worker.close()
    return statistics.median(seconds[1:] or seconds)


def measure_passes(world, ops, configs, budget) -> list[list[Costs | None]]:
    """Return the costs of each config in some rounds; None for each outside world rank 0.

    Comm: see `measure_costs`, and those of the budget.
    """
    return [
        [
            measure_costs(config, Grid.of(config.grid, world.rank), ops, world)
            for _ in own.rounds(PASS_ROUNDS)
        ]
        for config, own in budget.shares(configs)
    ]


SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved")
CHUNKS = 2  # of each rank with interleaved


def layouts(world_size: int, tp: int) -> list[tuple[str, dict]]:
    """Return (name, settings of the grid) of the steps that passes of a `tp` predict."""
    if tp > 1:
        return [
            (
                f"tp={tp}" if tp == world_size else f"dp={world_size // tp},tp={tp}",
                {"dp": world_size // tp, "tp": tp},
            )
        ]
    found = [(f"dp={world_size}", {"dp": world_size})]
    found += [
        (f"pp={world_size} {name}", {"pp": world_size, "schedule": name}) for name in SCHEDULES
    ]
    if world_size % 2 == 0 and world_size > 2:
        half = world_size // 2
        found.append((f"dp=2,pp={half} 1f1b", {"dp": 2, "pp": half, "schedule": "1f1b"}))
    return found


def verify_steps(world, machine, budget) -> list[dict]:
    """Compare a training step of each layout that the measured passes allow.

    The fastest of a few rounds counts. The layouts follow each other in each round, so that a slow
    spell of the machine hits all of them, but none in every round. Comm: the steps', and those of
    the budget.
    """
    cases: list[tuple] = []
    largest = {
        (str(units.model), units.tp): units
        for units in sorted(machine.units, key=lambda units: units.rows)
    }
    for units in largest.values():
        if world.size % units.tp:
            continue
        settings = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in units.model.items()
        }  # JSON has no tuples
        model = model_config(settings | {"layers": CHUNKS * max(2, world.size)})
        base = Config(
            model,
            train=TrainConfig(optimizer=units.optimizer, warmup_steps=0),
            run=RunConfig(dtype=units.dtype),
        )
        for name, grid in layouts(world.size, units.tp):
            chunks = CHUNKS if grid.get("schedule") == "interleaved" else None
            config = step_config(base, units.rows, world.size, **grid, chunks=chunks)
            cases.append((name, config, units))
    guesses = [step_estimate(machine, config) for _, config, _ in cases]
    rounds = [
        [
            step_seconds(world, ops_module.make("cpu", units.dtype), config, own)
            for (_, config, units), own in budget.part(1 / (ROUNDS - number)).shares(cases)
        ]
        for number in budget.rounds(ROUNDS)
    ]
    return [
        line(
            Subject(f"step {name}", world.size, "-"),
            f"{units.rows} rows",
            guess.total * 1e6,
            min(seconds) * 1e6,
            bool(guess.extrapolated),
        )
        for (name, _, units), guess, *seconds in zip(cases, guesses, *rounds, strict=True)
    ]


COLLECTIVES = ("all-reduce", "iall-reduce", "all-gather", "reduce-scatter", "barrier")
CONTENDED = ("all-reduce", "iall-reduce")
CONTENTION_SIZES = (4 << 10, 64 << 10, 1 << 20)
BEGIN_BYTES, FACTOR = 8, 2.0
EAGER_BYTES, EAGER_FACTOR = 16 << 10, 4.0
END_BYTES = "4M"
MESSAGE_ROUNDS, SIZE_SECONDS = 5, 0.02  # rounds at most; seconds for each way of a size in a round
STALL_SECONDS = 60.0


def pairs_by_link(places, world_size: int) -> list[tuple[int, int]]:
    """Return one pair for each kind of link that world rank 0 has."""
    found: dict = {}
    for peer in range(1, world_size):
        found.setdefault(link_of(places, (0, peer)), (0, peer))
    return list(found.values())


def sections(pairs, world_size: int, sizes, only_steps: bool = False) -> list[Section]:
    """Return messages on each pair, collectives on groups, and a layout's groups alone and
    together.

    Groups have every size that divides the world. only_steps: without what no step's prediction
    reads.
    """
    found = [
        Section(name, case, (pair,), sizes, "pair")
        for pair in pairs
        for name, case in PAIR_CASES.items()
        if not only_steps or name in (HOP, STREAM)
    ]
    counts = divisors(world_size)[1:]
    for count in counts:
        for name in CONTENDED if only_steps else COLLECTIVES:
            case = GROUP_CASES[name]
            found.append(Section(name, case, (tuple(range(count)),), sizes if case.sized else (0,)))
    if len(counts) > 1:
        layout = {"pp": 1, "dp": world_size // counts[0], "cp": 1, "tp": counts[0]}
        found += plans.layout_sections(CONTENDED, layout, CONTENTION_SIZES)
        found += [
            one
            for one in plans.chain_sections(world_size, CONTENTION_SIZES)
            if one.mode and not only_steps
        ]
    return found


def run_rounds(bench, chosen, budget, seed: int, writer) -> list[dict]:
    """Run the rounds that there is time for; return their rows on world rank 0.

    The first round finds the sizes for which each section has time. Later rounds take these in a
    random order, so that no size always has the same neighbour. Comm: the cases, and those of the
    budget.
    """
    rows, shuffled = [], random.Random(seed)  # noqa: S311 - an order, the same on all ranks
    known: list[list[int]] = [[] for _ in chosen]
    for number in budget.rounds(MESSAGE_ROUNDS):
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
    """Raise UsageError if there is no other rank to send messages to."""
    if world_size < 2:
        raise UsageError("messages need at least 2 ranks: start it with mpiexec -n 2")


def open_bench(session, dtype: str, buffers="rotated", transport="mpi-host"):
    """Return (Bench, places of all ranks) for short rounds. Raises UsageError on one rank."""
    session.agree(lambda: several(session.world.size))
    bench = Bench(session, Job(dtype, buffers, transport), 0, Plan(SIZE_SECONDS, warm_up=2))
    if session.world.rank == 0 and bench.crowded():
        print(
            "more ranks than cores on a host: trends are meaningful, times are not", file=sys.stderr
        )
    return bench, json.loads(broadcast_text(session.world, json.dumps(bench.places)))


def measure_rows(session, dtype: str, args, budget) -> tuple[list[dict], list[dict]]:
    """Return (rows, [head]) on world rank 0, ([], []) elsewhere. args: of bench.calibrate.

    Raises UsageError and OutputError. Comm: the cases.
    """
    sizes = session.agree(lambda: plans.geometric(BEGIN_BYTES, read_bytes(args.end_bytes), FACTOR))
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
    """Return what sending over each kind of link means for a sender that computes.

    The result is the largest message that moves meanwhile, and a curve of the sender's core time
    for each size.

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
        eager.append(Eager(link, None if len(early) == len(alone) else early[-1] if early else 0))
        if len(seconds) > 1:
            curves.append(Curve.through(SENDING, link, 2, seconds, WORKS))
    comms.close()
    return tuple(eager), curves
