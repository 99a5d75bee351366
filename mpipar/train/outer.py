"""DiLoCo: islands of ranks train apart, and average their weights once in many steps.

Each island takes ordinary steps on its own part of the batch: gradients are summed, clipped and
logged inside it, and its moments never leave it. After H of them (`--outer-interval`), and after
the last step of a run, all islands meet in an outer step (Nesterov's momentum, arXiv 2311.08105):

    d = outer weights - mean of the islands' weights      the barrier outer.delta
    v = d + momentum * v
    outer weights -= lr * (d + momentum * v)              and all islands go on from there

Whatever an island cuts or shards is cut alike in all of them, so a rank meets only the ranks at the
same place of the other islands (the axis `island`), and exchanges what it updates itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpipar.comm.grid import ISLAND
from mpipar.comm.group import Pending
from mpipar.comm.groups import Comms
from mpipar.config.train import TrainConfig
from mpipar.layers.flat import FlatParams
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array
from mpipar.train.gradsync import all_reduce_scalars

KINDS = ("outer", "velocity")  # of moments


class Outer:
    """The outer weights and their optimizer. It adds two moments to the flat buffers of a rank.

    `outer` is of use only between two meetings; otherwise all islands have the outer weights.
    """

    begun = False  # whether islands have taken steps since they last met

    def __init__(self, ops: Ops, flats: Sequence[FlatParams], comms: Comms, config: TrainConfig):
        self.ops, self.flats, self.comms, self.config = ops, flats, comms, config
        self.interval = config.outer_interval
        for flat in flats:
            for kind in KINDS:
                flat.add_moment(kind)

    def begin(self) -> None:
        """Keep the weights from which all islands go on, before the first step after a meeting."""
        for flat in self.flats if not self.begun else ():
            for outer, master in zip(flat.pieces("outer"), flat.pieces("master"), strict=True):
                self.ops.copy(outer, master)
        self.begun = True

    def meet(self, votes: list[float]) -> list[float]:
        """Take an outer step, and return the sums of all islands' votes.

        Comm: that of `step`, and one all_reduce of three numbers over the islands.
        """
        recorder = self.comms.recorder
        with recorder.at("opt"):
            start = self.ops.timestamp()
            self.step()
            sums = all_reduce_scalars(self.ops, self.comms, votes, "outer.votes", ISLAND)
            recorder.span("opt", start, end=self.ops.timestamp())
        return sums

    def step(self) -> None:
        """Give all islands the new outer weights.

        Gradients are not needed any more: d is computed where they are.
        Comm: per piece, one all_reduce over the islands; with ZeRO 1, one all_gather.
        """
        ops, islands, config = self.ops, self.comms[ISLAND], self.config
        for d, master, outer, v in self.changing():
            ops.copy(d, outer)
            ops.sgd_step(d, master, 1.0)
            ops.scale(islands.all_reduce(d, "outer.delta"), 1 / islands.size)
            ops.accumulate(ops.scale(v, config.outer_momentum), d)
            ops.sgd_step(outer, d, config.outer_lr)
            ops.sgd_step(outer, v, config.outer_lr * config.outer_momentum)
            ops.copy(master, outer)
        self.begun = False

    def exchange(self) -> None:
        """Exchange the island's weights with the outer ones, by way of its gradients.

        Layers read the outer weights between one call and the next.
        Comm: with ZeRO 1, one all_gather per piece.
        """
        for spare, master, outer, _ in self.changing() if self.begun else ():
            self.ops.copy(spare, master)
            self.ops.copy(master, outer)
            self.ops.copy(outer, spare)

    def changing(self) -> Iterator[tuple[Array, ...]]:
        """Yield the gradients, master weights and two moments of each piece, to change them.

        Changed weights are rounded to the data. Comm: with ZeRO 1, one all_gather per piece.
        """
        pending: list[Pending] = []
        for flat in self.flats:
            pieces = (flat.reduced_grads, *map(flat.pieces, ("data", "master", *KINDS)))
            for number, (grad, data, master, *moments) in enumerate(zip(*pieces, strict=True)):
                yield grad, master, *moments
                if flat.rounds:
                    self.ops.copy(data, master)
                if flat.level == 1:
                    pending.append(flat.gather(number))
        for one in pending:
            one.wait()
