"""Runs one rank's step of any layout on shapes, without MPI: the code is the cost model.

The real Worker takes one step on shapes, so memory, FLOPs, and every barrier with its bytes come
from the same lines that will run. A prediction can be wrong only about what shapes do not
determine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.groups import Comms
from mpipar.comm.record import wire_bytes
from mpipar.comm.recorder import Recorder
from mpipar.layers.context import Context, layer_options
from mpipar.layers.stash import Stash
from mpipar.models.decoder import Stage
from mpipar.run.checkpoint.state import copies_of, own_pieces
from mpipar.run.data import rows
from mpipar.train.build import UPDATES
from mpipar.train.muon import STEPS, Muon, Unit
from mpipar.train.outer import KINDS
from mpipar.train.worker import Worker
from mpipar.train.zero import unit_segments


@dataclass(frozen=True)
class Prediction:
    """One training step of one rank.

    peak_bytes: {label: bytes} at the moment of the largest sum. flops: {phase: FLOPs of products}.
    recorder: the records and counters of the step. groups: {axis: world ranks} of this rank.
    num_params: of its stages, without padding. segments: (groups, length) of each segment of its
    flat buffers, see `layers/flat.py`. moments: see `moments_of`, of each segment.
    gram_sums: see `gram_sums`; None with another optimizer.
    reads: {stage: [those that a unit reads, ...]}.
    """

    world_rank: int
    peak_bytes: dict
    flops: dict
    recorder: Recorder
    groups: dict
    num_params: int
    segments: list
    moments: list
    gram_sums: tuple | None
    reads: dict

    @property
    def peak_total(self) -> int:
        return sum(self.peak_bytes.values())


def moments_of(config, rule: str) -> int:
    """Return how many numbers a rule and the outer step keep of each that a rank updates."""
    return len(UPDATES[rule].kinds) + len(KINDS) * (config.grid.islands is not None)


def worker_on_shapes(
    config, world_rank: int, recorder: Recorder, worst_case: bool = False
) -> Worker:
    """Return the real Worker of `world_rank` in the layout of a resolved config, on shapes.

    worst_case: see `predict`.
    """
    ops, grid = ops_module.shapes_for(config.run, recorder), Grid.of(config.grid, world_rank)
    exact, table = getattr(ops, "exact", ops), routed_rows(config, grid)
    exact.worst_case = worst_case
    exact.routed = None if table is None else (table, grid.group_rank("expert"))
    return Worker(config, grid, ops, recorder)


def routed_rows(config, grid) -> np.ndarray | None:
    """Return the rows of a microbatch that each rank of the expert group sends to each expert.

    (q, E). Experts are equally popular, up to one row. None if nothing is routed.
    """
    model = config.model
    if not getattr(model, "experts", 0):
        return None
    ranks, counts = grid.group("expert"), []
    for world_rank in ranks:
        places = rows.token_places(model.seq_len, config.grid, grid.group_rank_of(world_rank, "cp"))
        total = rows.rows_per_microbatch(config) * len(places) * model.experts_per_token
        counts.append(np.diff(total * np.arange(model.experts + 1) // model.experts))
    return np.array(counts)


def predict(config, world_rank: int, worst_case: bool = False) -> Prediction:
    """Run one step of `world_rank` in the layout of a resolved config, on shapes.

    Experts are equally popular. In the worst case all rows of the
    group go to this rank's experts.
    """
    worker = worker_on_shapes(config, world_rank, Recorder(capacity=1 << 20), worst_case)
    ops = worker.ops
    if config.run.save_async and config.run.device == "cpu":  # a GPU's copy is in host memory
        empty = partial(ops.empty, label="snapshot")
        snapshot = copies_of(own_pieces(worker), empty, ops.accum_dtype)  # noqa: F841 (held)
    blank_batch = rows.blank_batch
    # the first step in which islands meet
    worker.train_step(worker.outer.interval, lambda mb: blank_batch(ops, config))
    muon = worker.optimizer.rules.get("muon")
    return Prediction(
        world_rank,
        ops.peak,
        dict(ops.flops),
        worker.recorder,
        {axis: comm.ranks for axis, comm in worker.comms.groups.items()},
        sum(flat.size for flat in worker.flats),
        [(flat.groups, length) for flat in worker.flats for length in flat.lengths],
        [moments_of(config, flat.rule) for flat in worker.flats for _ in flat.lengths],
        gram_sums(muon) if isinstance(muon, Muon) else None,
        {
            number: [
                [(flat.groups, flat.lengths[segment]) for flat, segment in needs] for needs in units
            ]
            for number, units in unit_segments(worker.stages).items()
        },
    )


def gram_sums(muon: Muon) -> tuple[int, int, int]:
    """Return (calls, bytes sent, FLOPs) of Muon on a rank if all matrices stayed cut: not built.

    X X^T over the side that is cut is a sum of what the parts give. So the ranks that hold the
    parts of a matrix could sum that in each step, and once its squared norm; then each goes on with
    its part, and all of them compute the polynomial. What ZeRO shards would have to be cut along
    the same side.
    """
    calls = sent = flops = 0
    for unit in muon.units:
        if muon.places(unit.at, muon.comm.group_rank) == unit.at:
            parts = len(unit.shards) * prod(map(muon.grid.size, unit.sharding))
            side, other = gram_sides(unit)
            calls += unit.count * (STEPS + 1) * (parts > 1)
            payload = (STEPS * side**2 + 1) * muon.ops.accum_dtype.itemsize
            sent += unit.count * wire_bytes("all_reduce", payload, parts)
            flops += unit.count * STEPS * (4 * side**2 * other // parts + 2 * side**3)
    return calls, sent, flops


def gram_sides(unit: Unit) -> tuple[int, int]:
    """Return the rows of a Gram matrix that sums over the parts give, and the side that is cut."""
    lead = len(unit.param.axes) - len(unit.shape)
    for axis in unit.param.placement.values():
        if axis >= lead:
            cut = unit.param.axes[axis]
            return unit.sizes["i" if cut == "o" else "o"], unit.sizes[cut]
    low, high = sorted((unit.sizes["i"], unit.sizes["o"]))  # whole, or cut by ZeRO alone
    return low, high


def predict_stages(config) -> list[Prediction]:
    """Return the prediction of one rank of each pipeline place: the first of its groups.

    Replicas and tensor-parallel ranks do the same work.
    """
    first = Grid.of(config.grid, 0)
    return [predict(config, first.rank_at(pp=place)) for place in range(first.size("pp"))]


def fullest(config) -> Prediction:
    """Return the prediction for the rank that needs most memory."""
    return max(predict_stages(config), key=lambda one: one.peak_total)


class Watch:
    """Replaces the engine that a stage's passes report to, and records what each unit keeps.

    look: returns the bytes that are alive. taken: {(kind of pass, unit of the stage): by how much
    they rose between entering and leaving the unit}.
    """

    def __init__(self, look: Callable[[], int]):
        self.look, self.kind, self.before = look, "f", 0
        self.taken: dict[tuple[str, int], int] = {}

    def enter(self, unit: int) -> None:
        self.before = self.look()

    def leave(self, unit: int) -> None:
        self.taken[self.kind, unit] = self.look() - self.before


def unit_memory(config) -> dict:
    """Return {field: bytes by unit} of what the real layers keep of a microbatch, on shapes."""
    recorder = Recorder()
    ops = ops_module.shapes_for(config.run, recorder)
    comms = Comms.solo(ops, Grid.of(config.grid, 0), recorder)
    context = Context(ops, comms, **layer_options(config))
    stage = Stage(context, config.model, 0, (config.model.layers,), {})
    num_units = config.model.layers + 2

    def held():
        """Return the bytes alive, without the scratch that the first unit leaves to all others."""
        return sum(size for label, size in ops.live.items() if label != "scratch")

    batch = rows.blank_batch(ops, config)
    watch, stash = Watch(held), Stash(batch)
    stage.forward(None, stash, watch)
    watch.kind = "i"
    stage.backward_input(None, stash, watch)
    watch.kind = "w"
    stage.backward_weight(stash, watch)
    kept = watch.taken
    return {
        "stash_bytes": tuple(kept["f", unit] for unit in range(num_units)),
        "kept_bytes": tuple(-kept["w", unit] for unit in range(num_units)),
    }
