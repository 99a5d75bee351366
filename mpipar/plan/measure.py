"""Measured costs of this model on this machine: f, i, w and memory of each layer.

Times come from the real layers in the real groups of tp and ep, with all stages running at once as
in a step. Memory comes from running the layers on shapes. The result is one `Costs` whose values
are by *unit*: embedding, each block, head and loss. `merged` adds them up to the stages of any
schedule.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median
from time import perf_counter, sleep, thread_time

import numpy as np

from mpipar import models
from mpipar import ops as ops_module
from mpipar.comm.facts import gather_facts
from mpipar.comm.grid import Grid
from mpipar.comm.groups import Comms
from mpipar.comm.hosts import cores_of, in_turns, quiet_barrier
from mpipar.comm.record import Recorder
from mpipar.comm.request import NAP_SECONDS
from mpipar.config.memory import MemoryConfig
from mpipar.data import rows
from mpipar.files.text import counted
from mpipar.layers.context import Context, recompute_options
from mpipar.layers.stash import Stash
from mpipar.models.decoder import Stage
from mpipar.pipeline.costs import Costs
from mpipar.train.optim import OPTIMIZERS
from mpipar.train.worker import Worker

REPEATS = 5  # microbatches of a measurement, after a warm-up
EQUAL_SHARES = "in the prediction, ranks that compute at the same time get equal shares"


def crowding(grid_config, cores: int) -> float:
    """Return the slowdown of work that all ranks of a layout do at the same time; at least 1.

    A group of tp and cp counts as fast as it is measured, even if it has fewer cores than ranks.
    """
    return max(1.0, grid_config.num_ranks / max(cores, grid_config.tp * grid_config.cp))


def pipeline_cores(grid_config, cores: int) -> float | None:
    """Return `Costs.cores`: one pipeline's share of the cores; None if ranks share none."""
    share = crowding(grid_config, cores)
    return None if share == 1 else grid_config.pp / share


def sharing_note(grid_config, cores: int, sharing: float) -> str:
    """Return a prediction's note on more ranks than cores, or "". sharing: as in `Costs`."""
    if grid_config.num_ranks <= cores:
        return ""
    more = f", and passes take {sharing:.2f} times as much of a core" if sharing > 1 else ""
    return f"{grid_config.num_ranks} ranks share {counted(cores, 'core')}: {EQUAL_SHARES}{more}"


def stage_units(stage: int, stage_layers) -> range:
    """Return the units of a stage: 0 is the first layer, 1 .. L the blocks, L + 1 norm, head and
    loss.
    """
    first = 1 + sum(stage_layers[:stage])
    last = first + stage_layers[stage]
    ends = stage == len(stage_layers) - 1
    return range(first - (stage == 0), last + ends)


def unit_counts(config, schedule) -> tuple[int, ...]:
    """Return how many units each stage of the schedule has, for `Costs.merged`."""
    split = models.layer_split(config, schedule)
    return tuple(len(stage_units(stage, split)) for stage in range(len(split)))


class Watch:
    """Replaces the engine that a stage's passes report to, and records what each unit took.

    look: returns a number or an array of current values, times or bytes. nap: seconds of sleep
    after each unit. taken: {(kind of pass, unit of the stage): how much it rose between entering
    and leaving the unit, each time}.
    """

    def __init__(self, look, nap: float = 0.0):
        self.look, self.nap, self.kind, self.taken = look, nap, "f", {}

    def enter(self, unit):
        self.before = self.look()

    def leave(self, unit):
        self.taken.setdefault((self.kind, unit), []).append(self.look() - self.before)
        if self.nap:
            sleep(self.nap)


def watch_passes(stage, watch, stashes, x, dy) -> None:
    """Run all passes of a stage on as many microbatches as there are empty stashes.

    All forward passes come first, as with gpipe, so that a backward finds its stash as cold as in a
    step. Comm: the layers' barriers over tp.
    """
    watch.kind = "f"
    for stash in stashes:
        stage.forward(x, stash, watch)
    for stash in stashes:
        watch.kind = "i"
        stage.backward_input(None if stage.loss is not None else dy, stash, watch)
        watch.kind = "w"
        stage.backward_weight(stash, watch)


def measure_times(worker, repeats: int, nap: float = 0.0) -> dict:
    """Return {kind: {unit: [mean seconds, mean core seconds]}} of the units that this rank holds.

    repeats: microbatches, after a warm-up; 0 takes the warm-up itself. They are averaged, because a
    step adds its passes up. While a pass waits for its core, only the first number grows. nap:
    seconds of sleep after each unit, which gives the core to another rank.

    Comm: the layers' barriers over tp.
    """
    ops, config = worker.ops, worker.config
    batch = rows.blank_batch(ops, config)
    # Activations between any two stages have the same shape.
    activation = next(iter(worker.stages.values())).in_shape(batch)
    rng = np.random.default_rng(0)
    x, dy = (ops.asarray(rng.standard_normal(activation).astype(ops.dtype)) for _ in range(2))

    def now():
        ops.synchronize()
        return np.array((perf_counter(), thread_time()))

    found: dict = {kind: {} for kind in "fiw"}
    for number, stage in worker.stages.items():
        for microbatches in (1, repeats) if repeats else (1,):
            watch = Watch(now, nap)
            watch_passes(stage, watch, [Stash(batch) for _ in range(microbatches)], x, dy)
        first = stage_units(number, worker.stage_layers)[0]
        for (kind, unit), times in watch.taken.items():
            found[kind][first + unit] = np.mean(times, axis=0).tolist()
    return found


def unit_memory(config) -> dict:
    """Return {field of Costs: bytes by unit}: a microbatch's stash, weights, gradients and moments.

    They come from the real layers on shapes, for one rank of the tp group. A recomputed unit
    temporarily holds what it would otherwise keep.
    """
    memory = plain = _unit_memory(config)
    if config.memory.recompute == "block":
        plain = _unit_memory(replace(config, memory=MemoryConfig()))
    more = zip(plain["stash_bytes"], memory["stash_bytes"], strict=True)
    return memory | {"transient_bytes": tuple(full - kept for full, kept in more)}


def _unit_memory(config) -> dict:
    """Return `unit_memory` without transient_bytes."""
    recorder = Recorder()
    ops = ops_module.shapes_for(config.run, recorder)
    comms = Comms.solo(ops, Grid.of(config.grid, 0), recorder)
    context = Context(ops, comms, **recompute_options(config))
    stage = Stage(context, config.model, 0, (config.model.layers,), {})
    num_units = config.model.layers + 2

    def held():
        """Return the bytes alive, without the scratch that the first unit leaves to all others."""
        return sum(size for label, size in ops.live.items() if label != "scratch")

    batch = rows.blank_batch(ops, config)
    watch = Watch(held)
    watch_passes(stage, watch, [Stash(batch)], None, None)
    kept = {key: sum(rises) for key, rises in watch.taken.items()}
    moments = len(OPTIMIZERS[config.train.optimizer].kinds)
    copies = 1 + moments + (ops.dtype != ops.statistics)
    each = ops.dtype.itemsize + copies * ops.statistics.itemsize
    weights = [
        each * sum(p.size for layer in layers for p in layer.params) for layers in stage.units
    ]
    return {
        "stash_bytes": tuple(kept["f", unit] for unit in range(num_units)),
        "kept_bytes": tuple(-kept["w", unit] for unit in range(num_units)),
        "weight_bytes": tuple(weights),
    }


def measure_costs(config, grid, ops, mpi_world=None, repeats: int = REPEATS) -> Costs | None:
    """Return costs by unit, on world rank 0; None elsewhere.

    config: resolved, except for the schedule's name. Passes are measured on as many ranks at once
    as have a core each; the costs contain a pipeline's share of the cores. Where ranks share cores,
    all of them also run their passes at once, which shows what sharing costs. They sleep for a
    moment after each unit, like pipeline ranks that wait, so that others fill the caches.

    Comm: makes the groups of a worker. Then a few passes of every layer over tp, cp and expert,
    barriers and a gather over the world.
    """
    plain = replace(
        config, grid=replace(config.grid, schedule="gpipe", chunks=None, stage_layers=None)
    )
    worker = Worker(plain, grid, ops, Recorder(), mpi_world)
    worker.initialize()
    # Data ranks that wait for each other inside passes: neighbours that exchange tokens.
    together = math.lcm(grid.size("cp"), grid.size("expert"))
    runs = grid.size("data") // together
    times = in_turns(
        mpi_world,
        grid.place("pp") * runs + grid.place("data") // together,
        grid.size("pp") * runs,
        together * grid.size("tp"),
        lambda: measure_times(worker, repeats),
    )
    cores = cores_of(mpi_world).cores
    share = pipeline_cores(config.grid, cores)
    shared = None
    # Ranks that wait for each other use core time for that too, so it is invisible in their passes.
    single = config.grid.tp * together == 1
    if share is not None and single and repeats and ops.device == "cpu":
        quiet_barrier(mpi_world)
        shared = measure_times(worker, repeats, NAP_SECONDS)
    worker.close()
    facts = gather_facts(mpi_world, (times, shared))
    if facts is None:
        return None
    num_units = config.model.layers + 2

    def by_unit(kind):
        """Return the median over the ranks that have a unit; JSON has made its number a string."""
        times: dict = {}
        for fact, _ in facts:
            for unit, (seconds, _) in fact[kind].items():
                times.setdefault(int(unit), []).append(seconds)
        return tuple(median(times[unit]) for unit in range(num_units))

    sharing = 1.0
    if shared is not None:
        sharing = max(
            1.0, median(_core_seconds(crowded) / _core_seconds(alone) for alone, crowded in facts)
        )
    return Costs(
        f=by_unit("f"),
        i=by_unit("i"),
        w=by_unit("w"),
        cores=share,
        sharing=sharing,
        **unit_memory(config),
    )


def _core_seconds(times) -> float:
    """Return the core seconds of all passes of `measure_times`."""
    return sum(core for units in times.values() for _, core in units.values())
