"""A quick cost model of the ranks at hand: some seconds of measuring, enough to choose a layout.

One block is measured, with the embedding and the head around it, for each number of tp ranks and
rows, followed by a message between two ranks, and sums over groups of ranks. `bench.calibrate`
measures more, takes longer, and writes its model to a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import mean, median
from time import perf_counter

from mpipar.comm.facts import broadcast_text, gather_facts
from mpipar.comm.grid import Grid
from mpipar.comm.groups import Comms
from mpipar.comm.hosts import cores_of, in_turns, quiet_barrier
from mpipar.comm.record import Recorder
from mpipar.config.layout import divisors
from mpipar.data.rows import rows_per_microbatch
from mpipar.pipeline.costs import Costs
from mpipar.plan.link import measure_link
from mpipar.plan.machine import (
    HOP,
    SENDING,
    STREAM,
    Curve,
    Eager,
    Machine,
    Passes,
    Units,
    settings_of,
)
from mpipar.plan.measure import REPEATS, measure_costs
from mpipar.train.worker import Worker

SECONDS = 20.0  # at most, unless a pass has begun
SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 4 << 20)  # bytes of a message, and of a sum
UPDATES = 5  # of a round, after a warm-up
ROUNDS, PATIENCE = 3, 30  # of passes, if PATIENCE times a first look's seconds are left
LINK = "any two ranks"
SUMS = {
    "all-reduce": lambda comm, x: comm.all_reduce(x, "measure.sum"),
    "iall-reduce": lambda comm, x: comm.iall_reduce(x, "measure.sum").wait(),
}


def measure_machine(configs, ops, mpi_world, seconds: float = SECONDS) -> Machine | None:
    """Return the cost model for choosing among resolved configs, on world rank 0; None elsewhere.

    The configs differ in their layouts. Measurements that do not fit into the time are missing, but
    those of the first cut are always there. Comm: makes groups; messages and sums of all sizes; the
    barriers of some passes; one broadcast for each cut of a block.
    """
    end = time.monotonic() + seconds

    def left() -> float:
        """Return the seconds that are left by world rank 0's clock."""
        return float(broadcast_text(mpi_world, repr(end - time.monotonic())))

    curves, eager = measure_links(ops, mpi_world)
    units, a_row = [], {}
    for one in one_blocks(configs, mpi_world.size):
        rows, tp, before = rows_per_microbatch(one), one.grid.tp, left()
        if units and rows * a_row.get(tp, 0.0) > before:
            continue
        units.append(measure_units(one, ops, mpi_world, repeats=0))
        took = before - left()
        a_row[tp] = took / rows
        if left() > PATIENCE * took:
            units[-1] = measure_units(one, ops, mpi_world, ROUNDS)
    update = update_seconds(one, ops, mpi_world, rounds=1, updates=1)
    cores = cores_of(mpi_world).cores
    if mpi_world.rank > 0:
        return None
    units = tuple(replace(one, update_seconds_per_parameter=update) for one in units)
    return Machine(curves, (), eager, (), None, (), units, mpi_world.size, cores, {})


def one_blocks(configs, world_size: int) -> list:
    """Return a one-block config on all ranks for each number of tp ranks and rows of these configs.

    One row comes first, because it tells how long more will take.
    """
    found = {}
    for config in configs:
        tp, cp, rows = config.grid.tp, config.grid.cp, rows_per_microbatch(config)
        dp = world_size // (tp * cp)
        found |= {
            (count, tp): replace(
                config,
                model=replace(config.model, layers=1),
                grid=replace(
                    config.grid,
                    dp=dp,
                    pp=1,
                    num_microbatches=1,
                    schedule="gpipe",
                    schedule_csv=None,
                    chunks=None,
                    group_size=None,
                    stage_layers=None,
                ),
                train=replace(config.train, batch_size=dp * count),
                memory=as_measured(config.memory),
            )
            for count in (1, rows)
        }
    return [found[key] for key in sorted(found)]


def measure_links(ops, mpi_world) -> tuple[tuple[Curve, ...], tuple[Eager, ...]]:
    """Return (curves of messages and sums, Eager sizes) on world rank 0; ((), ()) elsewhere.

    All groups of a size sum at once, as in training. The message goes from the first rank to the
    last, which is the furthest. Comm: makes groups; their sums, and messages of two ranks; one
    gather.
    """
    size = mpi_world.size
    if size == 1:
        return (), ()
    counts = sorted({2, *divisors(size)[1:]})
    groups = {
        f"of {count}": [
            tuple(range(first, first + count)) for first in range(0, size - count + 1, count)
        ]
        for count in counts
    }
    comms = Comms(Grid(mpi_world.rank, {"dp": size}), ops, Recorder(), mpi_world, partitions=groups)
    sums, links = {}, []
    for nbytes in SIZES:
        shape = (nbytes // ops.statistics.itemsize,)
        x, y = (ops.zeros(shape, ops.statistics, label="buffers") for _ in range(2))
        for name in groups:
            comm = comms[name]
            if comm.size > 1:
                for operation, run in SUMS.items():
                    sums.setdefault(f"{operation} {name}", []).append(
                        median_seconds(ops, partial(run, comm, x))
                    )
        links.append(measure_link(comms.world, size - 1, x, y))
    comms.close()
    facts = gather_facts(mpi_world, sums)
    if facts is None:
        return (), ()
    times = {
        (HOP, 2): [link.hop for link in links],
        (STREAM, 2): [link.busy for link in links],
        (SENDING, 2): [link.sending for link in links],
    }
    for operation in SUMS:
        for count in counts:
            several = [fact[name] for fact in facts if (name := f"{operation} of {count}") in fact]
            times[operation, count] = [max(each) for each in zip(*several, strict=True)]
    curves = [
        Curve.through(operation, LINK, ranks, dict(zip(SIZES, seconds, strict=True)), REPEATS)
        for (operation, ranks), seconds in times.items()
    ]
    alone = [link.nbytes for link in links if link.alone]
    eager = Eager(LINK, None if len(alone) == len(links) else max(alone, default=0))
    return tuple(curves), (eager,)


def median_seconds(ops, run: Callable) -> float:
    """Return the median time of a call, without its first. Comm: that of `run`."""
    times = []
    for _ in range(1 + REPEATS):
        start = perf_counter()
        run()
        ops.synchronize()
        times.append(perf_counter() - start)
    return median(times[1:])


def largest(mpi_world, value: float) -> float:
    """Return the largest value of all ranks on world rank 0, a rank's own elsewhere. Comm: one
    gather.
    """
    facts = gather_facts(mpi_world, value)
    return max(facts) if facts is not None else value


def as_measured(memory):
    """Return the memory settings with which passes and updates are measured.

    `step_estimate` adds the cost of ZeRO, and of activation recomputation.
    """
    again = "none" if memory.recompute == "block" else memory.recompute
    return replace(
        memory, recompute=again, recompute_layers=None, zero=0, zero_grads="full", zero_keep="none"
    )


def measure_units(config, ops, mpi_world, rounds: int = 1, repeats: int = REPEATS) -> Units | None:
    """Time the passes of a config's parts, on world rank 0; None elsewhere.

    Comm: that of `measure_costs` for each round.
    """
    grid = Grid.of(config.grid, mpi_world.rank)
    costs = [measure_costs(config, grid, ops, mpi_world, repeats) for _ in range(rounds)]
    return units_of(config, [costs]) if mpi_world.rank == 0 else None


def units_of(config, spells: list[list[Costs]]) -> Units:
    """Combine rounds of `measure_costs` in a few spells of time into a config's Units.

    The times are those of the median round in the quietest spell. The cost of sharing a core is the
    median of all rounds. The update is left at 0.
    """

    def seconds(one: Costs):
        return sum(map(sum, (one.f, one.i, one.w)))

    # Not the quietest round: a step is longer than a round, and no step is that lucky.
    quiet = min((sorted(each, key=seconds)[(len(each) - 1) // 2] for each in spells), key=seconds)
    # A disturbed round's sharing says nothing about its passes, so it may come from another round.
    sharing = median(one.sharing for costs in spells for one in costs)
    times = list(zip(quiet.f, quiet.i, quiet.w, strict=True))
    return Units(
        settings_of(config.model),
        config.run.dtype,
        config.train.optimizer,
        config.grid.tp,
        rows_per_microbatch(config),
        embedding=Passes(*times[0]),
        head=Passes(*times[-1]),
        block=Passes(*map(mean, zip(*times[1:-1], strict=True))),
        update_seconds_per_parameter=0.0,
        sharing=sharing,
        ep=config.grid.ep,
    )


def update_seconds(config, ops, mpi_world, rounds: int, updates: int = UPDATES) -> float:
    """Return the seconds per parameter of a step's end: clearing gradients, norm, clip, optimizer.

    Comm: makes the groups; ranks take turns on the cores; a barrier and a gather for each round.
    """
    worker = Worker(config, Grid.of(config.grid, mpi_world.rank), ops, Recorder(), mpi_world)
    worker.initialize()
    params, found = sum(flat.size for flat in worker.flats), []

    def run() -> float:
        seconds = []
        for step in range(1, updates + 2):
            start = perf_counter()
            worker.gradsync.zero()
            ops.numbers([part for part, _ in worker.gradsync.square_sums()])
            worker.gradsync.clip(2.0, 1.0)
            worker.optimizer.step(1e-4, step)
            ops.synchronize()
            seconds.append((perf_counter() - start) / params)
        return median(seconds[1:])

    for _ in range(rounds):
        quiet_barrier(mpi_world)
        found.append(
            largest(mpi_world, in_turns(mpi_world, mpi_world.rank, mpi_world.size, 1, run))
        )
    worker.close()
    return min(found)
