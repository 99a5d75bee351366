"""The passes of a model's units and its update, timed on the ranks at hand."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean, median
from time import perf_counter

from mpipar.comm.facts import gather_facts
from mpipar.comm.grid import Grid
from mpipar.comm.hosts import in_turns, quiet_barrier
from mpipar.comm.record import Recorder
from mpipar.data.rows import rows_per_microbatch
from mpipar.pipeline.costs import Costs
from mpipar.plan.machine import (
    Passes,
    Units,
    settings_of,
)
from mpipar.plan.measure import REPEATS, measure_costs
from mpipar.train.worker import Worker

UPDATES = 5  # of a round, after a warm-up


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
    return replace(memory, recompute=again, zero=0, reshard_after_forward="yes")


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
