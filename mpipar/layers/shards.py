"""How ZeRO cuts what a stage keeps over the ranks that hold the same stage.

ZeRO shares out what all ranks of the data group would else keep alike (arXiv 1910.02054). Level 1
shares out master weights and moments, level 3 weights and gradients too. A flat buffer is divided
into *segments*, and each segment into equal pieces, one for each rank of the group. A rank owns its
piece of every segment: it updates these numbers, and no other rank does.
"""

from __future__ import annotations

from typing import NamedTuple

from mpipar.comm.grid import runs


class Segment(NamedTuple):
    """A run of a flat buffer that is cut into equal pieces: of one unit, with equal groups."""

    groups: tuple[str, ...]
    unit: int
    run: slice


class Sharding(NamedTuple):
    """How a Config shares out what stages keep.

    level: of ZeRO, 0 where every rank keeps everything. index, count: of this rank among those that
    share. bucket: most elements of a segment of level 1. whole_grads: whether a rank keeps whole
    gradients during a step.
    """

    level: int = 0
    index: int = 0
    count: int = 1
    bucket: int = 1
    whole_grads: bool = True

    def segments(self, runs, total: int) -> list[Segment]:
        """The segments of a flat buffer of `total` elements, in its order.

        runs: ((groups, unit), slice) of the buffer, whose lengths are multiples of `count`.
        """
        if self.level == 0:
            return [Segment((), -1, slice(0, total))]
        limit = self.bucket if self.level == 1 else total
        size = max(1, limit // self.count) * self.count
        return [Segment(groups, unit, slice(first, min(first + size, run.stop)))
                for (groups, unit), run in runs for first in range(run.start, run.stop, size)]

    def own(self, segments: list[Segment]) -> list[slice]:
        """This rank's piece of each segment, in the whole buffer."""
        pieces = []
        for _, _, run in segments:
            length = (run.stop - run.start) // self.count
            pieces.append(slice(run.start + self.index * length,
                                run.start + (self.index + 1) * length))
        return pieces


WHOLE = Sharding()


def packed(own: list[slice]) -> list[slice]:
    """Where the pieces of a rank lie in a buffer that holds nothing else."""
    return runs([one.stop - one.start for one in own])
