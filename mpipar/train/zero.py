"""ZeRO: shards what all ranks of a data group would otherwise hold as copies (arXiv 1910.02054).

Level 1 shards master weights and moments: each rank sums and updates its own pieces, and
`Optimizer.step` gathers the updated weights. Level 3 shards weights and gradients too, and each
unit's weights are gathered just before a pass needs them. Three parts: `ShardedFlatParams` holds
pieces, `ReduceScatterGradSync` and `ShardedGradSync` sum gradients into them, `FullyShardedUnits`
and `ReshardAfterStep` gather weights.

A flat buffer is divided into *segments*, and each segment into equal pieces, one for each rank of
the group. A rank owns its piece of every segment: it updates these numbers, and no other does.

A pass that reads weights, F, B or I, finds its unit's weights in a buffer. While it computes, the
next unit of the same pass travels into the other buffer. W reads no weights, because the backward
pass is split: only its other half, I, does. A B gathers once for both halves, and a block that is
recomputed reruns forward while its weights are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple, cast

from mpipar.comm.grid import consecutive_slices
from mpipar.comm.group import Comm, Pending
from mpipar.layers.flat import FlatParams, Runs, Value, shared_run
from mpipar.layers.param import Param
from mpipar.models.stage import PipelineStage
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, Dtype
from mpipar.pipeline.engine import WholeWeights
from mpipar.pipeline.instructions import Instr
from mpipar.train.gradsync import GradSync

READERS = ("F", "B", "I")  # kinds of passes that read weights

Stages = Mapping[int, PipelineStage]


class Segment(NamedTuple):
    """A run of a flat buffer that is divided into equal pieces. unit: the unit it belongs to."""

    unit: int
    run: slice


class ShardedFlatParams(FlatParams):
    """Flat buffers of which this rank holds some whole, and of others only its own pieces.

    A sharded buffer has the pieces one after another. level: of ZeRO. bucket: maximum number of
    elements of a segment with level 1; with level 3 a segment is a unit.
    """

    group: Comm

    def __init__(
        self,
        ops: Ops,
        params: Iterable[Param],
        groups: tuple[str, ...],
        group: Comm,
        rule: str = "sgd",
        *,
        level: int,
        bucket: int,
    ):
        self.level, self.bucket, self.multiple = level, bucket, group.size
        super().__init__(ops, params, groups, group, rule)

    def cut(self) -> None:
        """Determine segments, this rank's piece of each, and the runs of these."""
        size = max(1, (self.bucket if self.level == 1 else self.total) // self.multiple)
        self.segments = [
            Segment(unit, slice(first, min(first + size * self.multiple, run.stop)))
            for unit, run in self.units.items()
            for first in range(run.start, run.stop, size * self.multiple)
        ]
        self.lengths = [run.stop - run.start for _, run in self.segments]
        self.local_slices = [
            self.piece_in(run, self.group.group_rank) for _, run in self.segments
        ]  # slices of a whole buffer
        # Where these pieces are in a sharded buffer.
        self.shard_slices = consecutive_slices([own.stop - own.start for own in self.local_slices])
        decays = list(self.within_own(self.runs(attrgetter("decay"))))
        self.decay_runs = [
            [(decay, run) for decay, segment, run in decays if segment == number]
            for number in range(len(self.segments))
        ]
        # No two ranks of the data group have the same piece.
        self.norm_runs = list(self.within_own(self.runs(attrgetter("owner"))))

    def piece_in(self, run: slice, group_rank: int) -> slice:
        """Return the piece of a segment that a rank of the group owns."""
        length = (run.stop - run.start) // self.group.size
        first = run.start + group_rank * length
        return slice(first, first + length)

    def within_own(self, runs: Runs[Value]) -> Iterator[tuple[Value, int, slice]]:
        """Yield (value, segment, slice of its piece) of the parts of runs that this rank owns."""
        for value, run in runs:
            for segment, own in enumerate(self.local_slices):
                if (part := shared_run(run, own)) is not None:
                    yield value, segment, part

    def is_sharded(self, kind: str) -> bool:
        """Return whether a rank keeps only its own pieces of data, grad, master or a moment."""
        if kind in ("data", "grad") or (kind == "master" and not self.rounds):
            return self.level == 3
        return True

    def zeros(self, kind: str, dtype: Dtype, label: str) -> Array:
        """Return a new buffer of a kind: whole, or as large as this rank's pieces."""
        parts = self.group.size if self.is_sharded(kind) else 1
        return self.ops.zeros((self.total // parts,), dtype, label=label)

    def pieces(self, kind: str) -> list[Array]:
        """Return this rank's piece of each segment in a buffer."""
        slices = self.shard_slices if self.is_sharded(kind) else self.local_slices
        return [self.buffer(kind)[piece] for piece in slices]

    def sums(self) -> list[Array]:
        """Return where sums of this rank's pieces arrive: at the beginning of each segment."""
        if self.level == 3:
            return self.pieces("grad")
        return [
            self.grad[run.start : run.start + own.stop - own.start]
            for (_, run), own in zip(self.segments, self.local_slices, strict=True)
        ]

    def piece_of(self, param: Param) -> int:
        """Return the number of the segment in which a parameter begins."""
        start = self.starts[param]
        return next(k for k, (_, run) in enumerate(self.segments) if run.start <= start < run.stop)

    def parts(self, param: Param, pieces: list[Array]) -> Iterator[tuple[int, Array]]:
        """Yield (first, values) of what this rank's pieces hold of a parameter."""
        whole = self.run_of(param)
        for own, piece in zip(self.local_slices, pieces, strict=True):
            if (part := shared_run(whole, own)) is not None:
                yield own.start + part.start - whole.start, piece[part]

    def runs_of(self, param: Param, piece: int) -> list[slice]:
        whole = self.run_of(param)
        found = (shared_run(self.piece_in(run, piece), whole) for _, run in self.segments)
        return [run for run in found if run is not None]

    def parts_of(self, param: Param, kind: str) -> Iterator[tuple[int, Array]]:
        """Yield (first, values) of all that a buffer holds of a parameter."""
        if self.is_sharded(kind):
            return super().parts_of(param, kind)
        return FlatParams.parts(self, param, [self.buffer(kind)])

    @property
    def weights(self) -> list[str]:
        """The kinds to fill with weights from outside."""
        same = self.is_sharded("master") == self.is_sharded("data")
        return ["master"] if same else ["master", "data"]

    def title(self, number: int) -> str:
        """Return the layer of a segment's first parameter, as in block3, to name a barrier."""
        return self.params_in(self.segments[number].run)[0].name.split(".", maxsplit=1)[0]

    def gather(self, number: int) -> Pending:
        """Start to gather a segment of whole data. Comm: one all_gather over the data group."""
        parts = self.data[self.segments[number].run].reshape(self.group.size, -1)
        return self.group.iall_gather(parts, "weights.bucket")


Needs = list[tuple[ShardedFlatParams, int]]  # the segments that a unit's layers use, by number
Posted = list[tuple[Pending, ShardedFlatParams, int, Array]]


class ReduceScatterGradSync(GradSync[ShardedFlatParams]):
    """Each rank keeps whole gradients during a step, and the sums of its own pieces at its end.

    All ranks of a further group own the same pieces of what they sum.
    """

    def end_unit(self, stage: int, unit: int, last: bool) -> None:
        """Finish a pass. Comm: after the last one, one reduce_scatter per segment of the unit."""
        if not last:
            return
        self.started.add((stage, unit))
        with self.recorder.at("sync"):
            for flat in self.flats_of[stage]:
                for segment in () if flat.further_groups else flat.segments:
                    if segment.unit == unit:
                        grad = flat.grad[segment.run]
                        self.pending.append(self.scatter(flat, grad, "grads.bucket"))

    def scatter(self, flat: ShardedFlatParams, grad: Array, name: str) -> Pending:
        """Post the sum of a segment of gradients. Comm: one reduce_scatter over the data group."""
        return flat.group.ireduce_scatter(grad.reshape(flat.group.size, -1), name)

    def post_late(self, flat: ShardedFlatParams) -> None:
        """Post a buffer's sums over the data group. Comm: one reduce_scatter per segment."""
        self.pending += [
            self.scatter(flat, flat.grad[segment.run], "grads.late") for segment in flat.segments
        ]


class ShardedGradSync(ReduceScatterGradSync):
    """A rank keeps only its own pieces of the gradients.

    Each pass computes the gradients of a unit in one scratch buffer. They are summed over the data
    group, and each rank adds its piece to those it has, so a step sends all gradients once for each
    microbatch. The next pass that computes gradients waits until the buffer is free.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.needs = unit_segments(self.stages)
        size = largest(unit for units in self.needs.values() for unit in units)
        self.scratch = self.ops.zeros((size,), self.ops.accum_dtype, label="gradients")
        self.scattered: list[tuple[Pending, ShardedFlatParams, int]] = []  # int: of the segment

    def begin_unit(self, stage: int, unit: int) -> None:
        """Wait until the scratch buffer is free, and give it to the unit."""
        self.collect()
        self.ops.fill(self.scratch, 0)
        for flat, number, part in views_in(self.scratch, self.needs[stage][unit]):
            flat.bind("grad", part, flat.segments[number].run)

    def end_unit(self, stage: int, unit: int, last: bool) -> None:
        """Post the sums of the unit's gradients. Comm: one reduce_scatter per segment."""
        with self.recorder.at("sync"):
            for flat, number, part in views_in(self.scratch, self.needs[stage][unit]):
                flat.unbind("grad", flat.segments[number].run)
                pending = self.scatter(flat, part, f"{flat.title(number)}.scatter")
                self.scattered.append((pending, flat, number))

    def start(self, stage: int) -> None:
        """Do nothing: every pass has already posted what it computed."""

    def post_late(self, flat: ShardedFlatParams) -> None:
        """Do nothing: no sum is posted late."""

    def collect(self) -> None:
        """Wait for the pending sums, and add this rank's part of each to its piece."""
        for pending, flat, number in self.scattered:
            self.ops.accumulate(flat.reduced_grads[number], pending.wait()[0])
        self.scattered = []

    def wait(self) -> None:
        """Return when no sum is pending any more, and every sum is in its piece."""
        self.collect()
        super().wait()

    def test(self) -> None:
        """Let pending sums progress; `collect` takes them in their order."""
        for pending, *_ in self.scattered:
            pending.test()


class FullyShardedUnits(WholeWeights):
    """Gathers each unit for each pass, into one of two buffers.

    A rank that holds several stages runs one pass at a time, so all its stages share the buffers.
    Neighbouring units never use the same one: units with even and odd numbers alternate. A tied
    table may be in the flat buffers of another unit or stage; it is gathered for both of its users.

    Comm: per unit and pass, one all_gather for each segment that the unit reads.
    """

    def __init__(self, ops: Ops, stages: Stages):
        self.ops = ops
        self.needs = unit_segments(stages)
        self.coming: dict[tuple[int, int], Posted] = {}  # by (stage, unit)
        self.room = self.make_room()

    def make_room(self) -> list[Array]:
        """Return the two buffers, each as large as the largest unit that it ever holds."""
        sizes = [
            largest(needs for units in self.needs.values() for needs in units[odd::2])
            for odd in (0, 1)
        ]
        return [self.ops.empty((size,), label="weights") for size in sizes]

    def enter(self, passing: Instr, unit: int) -> None:
        """Wait for the unit's weights, point its layers at them, and post the next unit."""
        if passing.kind not in READERS:
            return
        stage, step = passing.stage, 1 if passing.kind == "F" else -1
        if (stage, unit) not in self.coming:
            self.post(stage, unit, self.room[unit % 2])
        self.arrive(self.coming.pop((stage, unit)))
        if 0 <= unit + step < len(self.needs[stage]):
            self.post(stage, unit + step, self.room[(unit + step) % 2])

    def leave(self, passing: Instr, unit: int) -> None:
        """Release the unit's weights: the buffer is free for another unit."""
        if passing.kind in READERS:
            self.forget(self.needs[passing.stage][unit])

    def post(self, stage: int, unit: int, room: Array) -> None:
        """Start to gather a unit into a buffer. Comm: one all_gather per segment."""
        posted = []
        for flat, number, whole in views_in(room, self.needs[stage][unit]):
            parts = whole.reshape(flat.group.size, -1)
            self.ops.copy(parts[flat.group.group_rank], flat.pieces("data")[number])
            pending = flat.group.iall_gather(parts, f"{flat.title(number)}.gather")
            posted.append((pending, flat, number, whole))
        self.coming[stage, unit] = posted

    def arrive(self, posted: Posted) -> None:
        """Wait for what has been posted for a unit, and point the layers at it."""
        for pending, flat, number, whole in posted:
            pending.wait()
            flat.bind("data", whole, flat.segments[number].run)

    def forget(self, needs: Needs) -> None:
        """Detach the layers from the weights, so that none reads what a buffer held before."""
        for flat, number in needs:
            flat.unbind("data", flat.segments[number].run)


class ReshardAfterStep(FullyShardedUnits):
    """Gathers all units of a stage once, before its first pass, and keeps them until its last.

    Comm: per stage and step, one all_gather for each segment that each unit reads.
    """

    def make_room(self) -> list[Array]:
        """Return no buffers: each stage gets its own in each step."""
        return []

    def unshard(self, stage: int) -> None:
        """Start to gather all units of a stage."""
        for unit, needs in enumerate(self.needs[stage]):
            self.post(stage, unit, self.ops.empty((largest([needs]),), label="weights"))

    def enter(self, passing: Instr, unit: int) -> None:
        """Wait for the unit's weights, and point its layers at them."""
        if passing.kind in READERS:
            self.arrive(self.coming[passing.stage, unit])

    def leave(self, passing: Instr, unit: int) -> None:
        """Keep the weights."""

    def reshard(self, stage: int) -> None:
        """Release the weights of a stage."""
        for unit, needs in enumerate(self.needs[stage]):
            self.forget(needs)
            del self.coming[stage, unit]


def unit_segments(stages: Stages) -> dict[int, list[Needs]]:
    """Return {stage: [(flat, number of a segment), ...] of each unit}: what its layers use."""
    homes = {
        param: (flat, flat.piece_of(param))
        for stage in stages.values()
        for flat in cast(list[ShardedFlatParams], stage.flats)
        for param in flat.params
    }
    return {
        number: [
            list(dict.fromkeys(homes[param] for layer in layers for param in layer.params))
            for layers in stage.units
        ]
        for number, stage in stages.items()
    }


def largest(units: Iterable[Needs]) -> int:
    """Return the number of elements in the segments of the largest of some units."""
    return max((sum(flat.lengths[number] for flat, number in needs) for needs in units), default=0)


def views_in(room: Array, needs: Needs) -> list[tuple[ShardedFlatParams, int, Array]]:
    """Return (flat, number of a segment, view): a unit's segments, side by side in a buffer."""
    runs = consecutive_slices([flat.lengths[number] for flat, number in needs])
    return [(*need, room[run]) for need, run in zip(needs, runs, strict=True)]
