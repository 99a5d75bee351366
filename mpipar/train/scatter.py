"""Gradient sums that the ranks of the data group share out (ZeRO): each rank gets its own pieces.

Sums over further groups come last, of these pieces alone. All ranks of such a group own the same
pieces of what they sum.
"""

from __future__ import annotations

from mpipar.layers.units import largest, unit_segments, views_in
from mpipar.train.gradsync import GradSync


class ScatterSync(GradSync):
    """Each rank keeps whole gradients during a step, and at its end the sums of its pieces."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.counts = True  # no two ranks of the data group have the same piece

    def post(self, flat, unit: int) -> None:
        """Comm: one reduce_scatter per segment over the data group."""
        for segment in flat.segments:
            if segment.unit == unit and len(segment.groups) == 1:
                self.pending.append(self.scatter(flat.grad[segment.run], "grads.bucket"))

    def scatter(self, grad, name: str):
        """Post the sum of a segment of gradients. Comm: one reduce_scatter over the data group."""
        data = self.comms.data
        return data.ireduce_scatter(grad.reshape(data.size, -1), name)

    def finish(self) -> None:
        """Return when every own piece is the sum over all its groups.

        Comm: the sums of segments with further groups over the data group; that of `sum_further`.
        """
        for stage in sorted(self.stages):
            flat = self.stages[stage].flat
            self.pending += [self.scatter(flat.grad[segment.run], "grads.late")
                             for segment in flat.segments if len(segment.groups) > 1]
        self.wait()
        self.sum_further()

    def sum_further(self) -> None:
        """Sum own pieces over further groups. Comm: one all_reduce per segment and group."""
        for stage in sorted(self.stages):
            flat = self.stages[stage].flat
            for segment, summed in zip(flat.segments, flat.summed, strict=True):
                for group in segment.groups[:-1]:
                    self.comms.by_axis[group].all_reduce(summed, f"grads.{group}")


class PieceSync(ScatterSync):
    """A rank keeps its pieces of the gradients alone: --zero-grads sharded.

    Each pass makes the gradients of a unit in one scratch buffer. They are summed over the data
    group, and each rank adds its piece to what it has. So a step sends all gradients once for each
    microbatch. The next pass that makes gradients waits until the buffer is free.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.needs = unit_segments(self.stages)
        size = largest(unit for units in self.needs.values() for unit in units)
        self.scratch = self.ops.zeros((size,), self.ops.statistics, label="gradients")
        self.scattered: list = []  # (pending, flat, number of the segment)

    def begin_unit(self, stage: int, unit: int) -> None:
        """Wait until the scratch buffer is free, and give it to the unit."""
        self.collect()
        self.ops.fill(self.scratch, 0)
        for flat, number, part in views_in(self.scratch, self.needs[stage][unit]):
            flat.place("grad", part, flat.segments[number].run)

    def end_unit(self, stage: int, unit: int, last: bool) -> None:
        """Post the sums of the unit's gradients. Comm: one reduce_scatter per segment."""
        phase, self.recorder.phase = self.recorder.phase, "sync"
        for flat, number, part in views_in(self.scratch, self.needs[stage][unit]):
            flat.displace("grad", flat.segments[number].run)
            pending = self.scatter(part, f"{flat.title(number)}.scatter")
            self.scattered.append((pending, flat, number))
        self.recorder.phase = phase

    def post(self, flat, unit: int) -> None:
        """Nothing is left to post: every pass has posted what it made."""

    def collect(self) -> None:
        """Wait for the sums that are under way, and add this rank's part of each to its piece."""
        for pending, flat, number in self.scattered:
            self.ops.accumulate(flat.summed[number], pending.wait()[0])
        self.scattered = []

    def finish(self) -> None:
        """Return when own pieces are sums over all their groups. Comm: that of `sum_further`."""
        self.collect()
        self.wait()
        self.sum_further()

    def test(self) -> None:
        for pending, *_ in self.scattered:
            pending.test()
