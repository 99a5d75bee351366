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
from statistics import median
from time import perf_counter

from mpipar.comm.facts import broadcast_text, gather_facts
from mpipar.comm.grid import Grid
from mpipar.comm.groups import Comms
from mpipar.comm.hosts import cores_of
from mpipar.comm.record import Recorder
from mpipar.config.layout import divisors
from mpipar.plan.link import measure_link
from mpipar.plan.machine import HOP, SENDING, STREAM, Curve, Eager, Machine
from mpipar.plan.measure_units import as_measured, measure_units, update_seconds
from mpipar.plan.step import microbatch_rows

SECONDS = 20.0  # at most, unless a pass has begun
SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 4 << 20)  # bytes of a message, and of a sum
REPEATS = 5  # of a sum, after a warm-up
ROUNDS, PATIENCE = 3, 30  # of passes, if PATIENCE times a first look's seconds are left
LINK = "any two ranks"
SUMS = {"all-reduce": lambda comm, x: comm.all_reduce(x, "measure.sum"),
        "iall-reduce": lambda comm, x: comm.iall_reduce(x, "measure.sum").wait()}


class Clock:
    """Seconds that are left, the same on every rank: world rank 0 looks at its clock."""

    def __init__(self, mpi_world, seconds: float):
        self.mpi_world, self.end = mpi_world, time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that are left. Comm: one broadcast over the world."""
        return float(broadcast_text(self.mpi_world, repr(self.end - time.monotonic())))


def measure_machine(configs, ops, mpi_world, seconds: float = SECONDS) -> Machine | None:
    """Return the cost model for choosing among resolved configs, on world rank 0; None elsewhere.

    The configs differ in their layouts. Measurements that do not fit into the time are missing, but
    those of the first cut are always there. Comm: makes groups; messages and sums of all sizes; the
    barriers of some passes; one broadcast for each cut of a block.
    """
    clock = Clock(mpi_world, seconds)
    curves, eager = measure_links(ops, mpi_world)
    units, a_row = [], {}
    for one in one_blocks(configs, mpi_world.size):
        rows, tp, before = microbatch_rows(one), one.grid.tp, clock.left()
        if units and rows * a_row.get(tp, 0.0) > before:
            continue
        units.append(measure_units(one, ops, mpi_world, repeats=0))
        took = before - clock.left()
        a_row[tp] = took / rows
        if clock.left() > PATIENCE * took:
            units[-1] = measure_units(one, ops, mpi_world, range(ROUNDS))
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
        tp, cp, rows = config.grid.tp, config.grid.cp, microbatch_rows(config)
        dp = world_size // (tp * cp)
        found |= {(count, tp): replace(
            config, model=replace(config.model, layers=1),
            grid=replace(config.grid, dp=dp, pp=1, num_microbatches=1, schedule="gpipe",
                         schedule_csv=None, chunks=None, group_size=None, stage_layers=None),
            train=replace(config.train, batch_size=dp * count),
            memory=as_measured(config.memory)) for count in (1, rows)}
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
    groups = {f"of {count}": [tuple(range(first, first + count))
                              for first in range(0, size - count + 1, count)] for count in counts}
    comms = Comms(Grid(mpi_world.rank, {"dp": size}), ops, Recorder(), mpi_world,
                  partitions=groups)
    sums, links = {}, []
    for nbytes in SIZES:
        shape = (nbytes // ops.statistics.itemsize,)
        x, y = (ops.zeros(shape, ops.statistics, label="buffers") for _ in range(2))
        for name in groups:
            comm = comms[name]
            if comm.size > 1:
                for operation, run in SUMS.items():
                    sums.setdefault(f"{operation} {name}", []).append(
                        median_seconds(ops, partial(run, comm, x)))
        links.append(measure_link(comms.world, size - 1, x, y))
    comms.close()
    facts = gather_facts(mpi_world, sums)
    if facts is None:
        return (), ()
    curves = [curve(HOP, 2, [link.hop for link in links]),
              curve(STREAM, 2, [link.busy for link in links]),
              curve(SENDING, 2, [link.sending for link in links])]
    for operation in SUMS:
        for count in counts:
            several = [fact[f"{operation} of {count}"] for fact in facts
                       if f"{operation} of {count}" in fact]
            slowest = [max(times) for times in zip(*several, strict=True)]
            curves.append(curve(operation, count, slowest))
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


def curve(operation: str, ranks: int, seconds: list[float]) -> Curve:
    """Return the Curve through the times of SIZES."""
    times = dict(zip(SIZES, seconds, strict=True))
    return Curve.through(operation, LINK, ranks, times, REPEATS)
