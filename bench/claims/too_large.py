"""Layers too large for one device: which layouts train under the same --memory-limit.

Each of the two blocks is too large for one device alone. A pipeline gives each stage a whole block,
so it is legal but does not help. Only cutting the layers themselves helps.
"""

from __future__ import annotations

from dataclasses import replace

from bench.places import by_function
from mpipar import ops as ops_module
from mpipar.comm.facts import gather_facts
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.commands.memory_limit import MemoryLimit, fullest
from mpipar.config.grid import GridConfig
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config
from mpipar.data.rows import Rows
from mpipar.data.source import load_source
from mpipar.errors import OutOfMemory
from mpipar.train.worker import Worker

MODEL = {"layers": 2, "d_model": 256, "heads": 8, "seq_len": 16, "ffn": 32768}
LIMIT_MIB = 190
LAYOUTS = [{}, {"dp": 2}, {"pp": 2}, {"tp": 2}, {"tp": 4}, {"pp": 2, "tp": 2}]
STEPS = 2


def configure(axes: dict):
    """The model in a layout, 4 rows per step, with the limit."""
    grid = GridConfig(**({"dp": 1, "pp": 1, "tp": 1} | axes), num_microbatches=1)
    config = Config()
    return resolve(replace(
        config, model=replace(config.model, **MODEL), grid=grid,
        train=replace(config.train, batch_size=4),
        run=replace(config.run, memory_limit=LIMIT_MIB << 20)), replace(grid, cp=1).num_ranks)[0]


def attempt(config, world) -> str:
    """Train two steps; return "trains", or what did not fit.

    If one rank of these layouts lacks memory, all do. They notice it at the optimizer, before the
    first message, so that no rank is left waiting.
    Comm: everything of those steps.
    """
    ops, recorder = ops_module.make("cpu", "float32"), Recorder(1 << 16)
    tokens = load_source((), config.model.vocab_size).tokens
    try:
        with MemoryLimit(config, ops, recorder):
            grid = Grid.of(config.grid, world.rank)
            worker = Worker(config, grid, ops, recorder, world)
            worker.initialize()
            rows = Rows(ops, tokens, config, grid)
            for step in range(1, STEPS + 1):
                worker.train_step(step, lambda mb, step=step: rows.train(step, mb))
            worker.close()
    except OutOfMemory as error:
        return by_function(error.problems[0].partition(", but")[0])
    return "trains"


def too_large(world) -> list[dict] | None:
    """A row per layout, on world rank 0. Comm: a split of the world per layout, and training."""
    rows = []
    for axes in LAYOUTS:
        config = configure(axes)
        count = config.grid.num_ranks
        part = world.Split(0 if world.rank < count else 1, world.rank)
        outcome = attempt(config, part) if world.rank < count else ""
        part.Free()
        outcomes = gather_facts(world, outcome)
        if outcomes:
            rows.append({
                "layout": " x ".join(f"{axis} {size}" for axis, size in axes.items()) or "one rank",
                "predicted_peak_MiB": fullest(config).peak_total / 2**20,
                "limit_MiB": LIMIT_MIB, "outcome": outcomes[0]})
    return rows if world.rank == 0 else None
