"""Computing for the cost model: products by shape, reductions, and the passes of a model's parts.

Products and passes run on as many ranks at the same time as there are cores: they share caches and
memory, as in training. Of products the quietest round counts, and of passes the median round of the
quietest spell. So a slow spell of the machine does not count.

Training steps, predicted and then measured: every layout and schedule that a machine allows.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from itertools import product
from time import perf_counter

from bench.machine.predicted import Subject, line
from mpipar import data
from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.hosts import in_turns
from mpipar.comm.record import Recorder
from mpipar.config.grid import GridConfig
from mpipar.config.model import model_config
from mpipar.config.resolve import resolve
from mpipar.config.run import RunConfig
from mpipar.config.sections import Config
from mpipar.config.train import TrainConfig
from mpipar.pipeline.costs import Costs
from mpipar.plan.machine import Product
from mpipar.plan.measure import measure_costs
from mpipar.plan.measure_units import largest
from mpipar.plan.step import step_estimate
from mpipar.train.worker import Worker

GEMM_SIDES = (32, 128, 512)
HELD_OUT_SIDES = (64, 256)  # between GEMM_SIDES
GEMM_SECONDS = 0.02
REDUCE_SIZES = tuple(1 << k for k in range(10, 23))
ROUNDS, PASS_ROUNDS, STEPS = 3, 6, 5
MICROBATCHES = 4  # of a measured step, for each pipeline rank


def time_product(ops, m: int, k: int, n: int) -> float:
    """Seconds of one product (M, K) x (K, N), median."""
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
            rounds.append(largest(world, in_turns(world, world.rank, world.size, 1,
                                                  partial(time_product, ops, *shape))))
        found.append(Product(*shape, min(rounds)))
    return tuple(found)


def measure_reduction(arena, repeats: int = 30) -> dict:
    """{bytes: [times in us]} of adding one buffer to another as MPI does it, on this rank."""
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
    """The resolved config of a layout with microbatches of `rows` rows. Raises UsageError."""
    axes = {"dp": 1, "pp": 1, "tp": 1} | axes
    num_microbatches = MICROBATCHES * axes["pp"]
    return resolve(replace(
        config, grid=GridConfig(**axes, num_microbatches=num_microbatches),
        train=replace(config.train, batch_size=axes["dp"] * num_microbatches * rows)),
        world_size)[0]


def step_seconds(world, ops, config, budget) -> float:
    """Seconds of a real training step, median of a few.

    A step lasts from the first rank's start to the last rank's end. The batch is made beforehand.
    The first step counts only where the budget has no time for a second.
    Comm: the steps', a barrier before and after each, and those of the budget.
    """
    worker = Worker(config, Grid.of(config.grid, world.rank), ops, Recorder(), world)
    worker.initialize()
    batch, seconds = data.data_of(config.model).blank_batch(ops, config), []
    for number in budget.rounds(STEPS + 1):
        world.Barrier()
        start = perf_counter()
        worker.train_step(number + 1, lambda mb: batch)
        world.Barrier()
        seconds.append(perf_counter() - start)
    worker.close()
    return statistics.median(seconds[1:] or seconds)


def measure_passes(world, ops, configs, budget) -> list[list[Costs | None]]:
    """The costs of each config in some rounds; None for each outside world rank 0.

    Comm: see `measure_costs`, and those of the budget.
    """
    return [[measure_costs(config, Grid.of(config.grid, world.rank), ops, world)
             for _ in own.rounds(PASS_ROUNDS)] for config, own in budget.shares(configs)]


SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved")
CHUNKS = 2  # of each rank with interleaved


def layouts(world_size: int, tp: int) -> list[tuple[str, dict]]:
    """(name, settings of the grid) of the steps that passes of a `tp` predict."""
    if tp > 1:
        return [(f"tp={tp}" if tp == world_size else f"dp={world_size // tp},tp={tp}",
                 {"dp": world_size // tp, "tp": tp})]
    found = [(f"dp={world_size}", {"dp": world_size})]
    found += [(f"pp={world_size} {name}", {"pp": world_size, "schedule": name})
              for name in SCHEDULES]
    if world_size % 2 == 0 and world_size > 2:
        half = world_size // 2
        found.append((f"dp=2,pp={half} 1f1b", {"dp": 2, "pp": half, "schedule": "1f1b"}))
    return found


def verify_steps(world, machine, budget) -> list[dict]:
    """Compare a training step of each layout that the measured passes allow.

    The quietest of a few rounds counts. The layouts follow each other in each round, so that a slow
    spell of the machine hits all of them, and none in every round.
    Comm: the steps', and those of the budget.
    """
    cases: list[tuple] = []
    largest = {(str(units.model), units.tp): units
               for units in sorted(machine.units, key=lambda units: units.rows)}
    for units in largest.values():
        if world.size % units.tp:
            continue
        settings = {name: tuple(value) if isinstance(value, list) else value
                    for name, value in units.model.items()}  # JSON has no tuples
        model = model_config(settings | {"layers": CHUNKS * max(2, world.size)})
        base = Config(model, train=TrainConfig(optimizer=units.optimizer, warmup_steps=0),
                      run=RunConfig(dtype=units.dtype))
        for name, grid in layouts(world.size, units.tp):
            chunks = CHUNKS if grid.get("schedule") == "interleaved" else None
            config = step_config(base, units.rows, world.size, **grid, chunks=chunks)
            cases.append((name, config, units))
    guesses = [step_estimate(machine, config) for _, config, _ in cases]
    rounds = [[step_seconds(world, ops_module.make("cpu", units.dtype), config, own)
               for (_, config, units), own in budget.part(1 / (ROUNDS - number)).shares(cases)]
              for number in budget.rounds(ROUNDS)]
    return [line(Subject(f"step {name}", world.size, "-"), f"{units.rows} rows",
                 guess.total * 1e6, min(seconds) * 1e6, bool(guess.extrapolated))
            for (name, _, units), guess, *seconds in zip(cases, guesses, *rounds, strict=True)]
