"""ZeRO-3: all-gathers each unit's sharded weights just before a pass needs them.

A pass that reads weights, F, B or I, finds its unit's weights in a buffer. While it computes, the
next unit of the same pass travels into the other buffer. W reads no weights. A B gathers once for
both of its halves, and a block that is recomputed reruns forward while its weights are there.
Source: arXiv 1910.02054; that W needs no weights is due to the split backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mpipar.comm.group import Pending
from mpipar.layers.flat import FlatParams
from mpipar.ops.signature import Array

READERS = ("F", "B", "I")  # kinds of passes that read weights

Stages = Mapping[int, Any]  # {stage: Stage}, with its units and flats
Needs = list[tuple[FlatParams, int]]  # the segments that a unit's layers use, by their numbers
Posted = list[tuple[Pending, FlatParams, int, Array]]


class GatheredUnits:
    """Gathers each unit for each pass, into one of two buffers. It is the `Weights` of an engine.

    A rank that holds several stages runs one pass at a time, so all its stages share the buffers.
    Neighbouring units never use the same one: units with even and odd numbers alternate. A tied
    table may be in the flat buffers of another unit or stage; it is gathered for both of its users.

    Comm: per unit and pass, one all_gather for each segment that the unit reads.
    """

    def __init__(self, ops: Any, stages: Stages):
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

    def enter(self, passing: Any, unit: int) -> None:
        """Wait for the unit's weights, point its layers at them, and post the next unit."""
        if passing.kind not in READERS:
            return
        stage, step = passing.stage, 1 if passing.kind == "F" else -1
        if (stage, unit) not in self.coming:
            self.post(stage, unit, self.room[unit % 2])
        self.arrive(self.coming.pop((stage, unit)))
        if 0 <= unit + step < len(self.needs[stage]):
            self.post(stage, unit + step, self.room[(unit + step) % 2])

    def leave(self, passing: Any, unit: int) -> None:
        """Release the unit's weights: the buffer is free for another unit."""
        if passing.kind in READERS:
            self.forget(self.needs[passing.stage][unit])

    def unshard(self, stage: int) -> None:
        """Prepare a stage whose weights are kept, before its first pass that reads them."""

    def reshard(self, stage: int) -> None:
        """Release a stage, after its last pass that reads weights."""

    def post(self, stage: int, unit: int, room: Array) -> None:
        """Start to gather a unit into a buffer. Comm: one all_gather per segment."""
        posted = []
        for flat, number, whole in views_in(room, self.needs[stage][unit]):
            comm = flat.sharding.comm
            parts = whole.reshape(comm.size, -1)
            self.ops.copy(parts[comm.index], flat.piece("data", number))
            pending = comm.iall_gather(parts, f"{flat.title(number)}.gather")
            posted.append((pending, flat, number, whole))
        self.coming[stage, unit] = posted

    def arrive(self, posted: Posted) -> None:
        """Wait for what has been posted for a unit, and point the layers at it."""
        for pending, flat, number, whole in posted:
            pending.wait()
            flat.place("data", whole, flat.segments[number].run)

    def forget(self, needs: Needs) -> None:
        """Detach the layers from the weights, so that none reads what a buffer held before."""
        for flat, number in needs:
            flat.displace("data", flat.segments[number].run)


class KeptUnits(GatheredUnits):
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

    def enter(self, passing: Any, unit: int) -> None:
        """Wait for the unit's weights, and point its layers at them."""
        if passing.kind in READERS:
            self.arrive(self.coming[passing.stage, unit])

    def leave(self, passing: Any, unit: int) -> None:
        """Keep the weights."""

    def reshard(self, stage: int) -> None:
        """Release the weights of a stage."""
        for unit, needs in enumerate(self.needs[stage]):
            self.forget(needs)
            del self.coming[stage, unit]


UNITS = {"yes": GatheredUnits, "no": KeptUnits}  # by --reshard-after-forward


def unit_segments(stages: Stages) -> dict[int, list[Needs]]:
    """Return {stage: [(flat, number of a segment), ...] of each unit}: what its layers use."""
    homes = {
        param: (flat, number)
        for stage in stages.values()
        for flat in stage.flats
        for number, segment in enumerate(flat.segments)
        for param in flat.params_in(segment.run)
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
    return max((sum(flat.length(number) for flat, number in needs) for needs in units), default=0)


def views_in(room: Array, needs: Needs) -> Iterator[tuple[FlatParams, int, Array]]:
    """Yield (flat, number of a segment, view): a unit's segments, side by side in a buffer."""
    first = 0
    for flat, number in needs:
        stop = first + flat.length(number)
        yield flat, number, room[first:stop]
        first = stop
