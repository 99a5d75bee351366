"""Computing for the cost model: products by shape, reductions, and the passes of a model's parts.

Products and passes run on as many ranks at the same time as there are cores: they share caches and
memory, as in training. Of products the quietest round counts, and of passes the median round of the
quietest spell. So a slow spell of the machine does not count.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from itertools import product
from time import perf_counter

from mpipar import data
from mpipar.comm.grid import Grid
from mpipar.comm.hosts import in_turns
from mpipar.comm.record import Recorder
from mpipar.config.grid import GridConfig
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config
from mpipar.pipeline.costs import Costs
from mpipar.plan.machine import Product
from mpipar.plan.measure import measure_costs
from mpipar.plan.measure_units import largest
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
