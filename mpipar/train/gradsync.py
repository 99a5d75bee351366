"""Gradient synchronization: sums over groups, the global norm and clipping.

Each stage has a flat buffer of gradients for each set of groups over which they are partial. Most
are partial over the data group only, the ranks that read different tokens (dp x cp). These are
divided into buckets, each within one unit, and a unit's all-reduces start as soon as its last
weight gradient is done, while the units below it and other stages still compute. Others are also
partial over a further group: a tied table over the two ends of the pipeline (`tie`, see
`build.groups_of`), norms over tp where its ranks hold different tokens (`Param.partial_groups`).
They are summed after everything else, over that group last, because an earlier sum of a tie would
make one end wait for the other's backward pass.

Where gradients are sharded over the data group, `train/zero.py` sums them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Generic, TypeVar, cast

import numpy as np

from mpipar.comm.group import Pending
from mpipar.comm.groups import Comms
from mpipar.comm.recorder import Recorder
from mpipar.layers.flat import FlatParams
from mpipar.models.stage import PipelineStage
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array

Flat = TypeVar("Flat", bound=FlatParams)


class GradSync(Generic[Flat]):
    """Owns the pending all-reduces of one step. It is the `Gradients` of an engine.

    comms: the groups of this rank. stages: {stage: Stage}.
    """

    def __init__(
        self,
        ops: Ops,
        stages: Mapping[int, PipelineStage],
        comms: Comms,
        recorder: Recorder,
        bucket_bytes: int,
    ):
        self.ops, self.stages, self.comms, self.recorder = ops, stages, comms, recorder
        self.flats_of = {
            number: cast(list[Flat], stages[number].flats) for number in sorted(stages)
        }
        # The order is the same on every rank: sums over further groups follow it.
        self.flats = [flat for flats in self.flats_of.values() for flat in flats]
        # What the norm counts. Signs are not gradients of the loss: see `optim.Signs`.
        self.of_loss = [flat for flat in self.flats if flat.rule != "signs"]
        self.bucket = max(1, bucket_bytes // ops.accum_dtype.itemsize)  # elements
        self.pending: list[Pending] = []
        self.started: set[tuple[int, int]] = set()  # (stage, unit)

    def start(self, stage: int) -> None:
        """Post the sums of a stage's finished gradients that have not been posted yet.

        Comm: that of `end_unit`, for each unit that has not been started.
        """
        for unit in dict.fromkeys(unit for flat in self.flats_of[stage] for unit in flat.units):
            if (stage, unit) not in self.started:
                self.end_unit(stage, unit, last=True)

    def begin_unit(self, stage: int, unit: int) -> None:
        """Prepare for a pass that computes weight gradients of a unit."""

    def end_unit(self, stage: int, unit: int, last: bool) -> None:
        """Finish a pass that computed weight gradients of a unit. last: whether it was the last.

        All ranks of the data group run the same passes, so they post the same buckets in the same
        order.
        Comm: after the last pass, when the gradients are complete, one all_reduce per bucket.
        """
        if not last:
            return
        self.started.add((stage, unit))
        with self.recorder.at("sync"):
            for flat in self.flats_of[stage]:
                for bucket in self.buckets(flat, unit):
                    self.pending.append(flat.group.iall_reduce(bucket, "grads.bucket"))

    def buckets(self, flat: Flat, unit: int) -> list[Array]:
        """Return the parts of a unit's gradients that are summed as soon as they are complete."""
        if flat.group.size == 1 or flat.further_groups or unit not in flat.units:
            return []
        run = flat.units[unit]
        firsts = range(run.start, run.stop, self.bucket)
        return [flat.grad[first : min(first + self.bucket, run.stop)] for first in firsts]

    def post_late(self, flat: Flat) -> None:
        """Post a buffer's sums over the data group after all others. Comm: one all_reduce."""
        self.pending.append(flat.group.iall_reduce(flat.grad, "grads.late"))

    def finish(self) -> None:
        """Return when every gradient, or this rank's piece of it, is the sum over all its groups.

        Comm: that of `post_late` for each flat buffer with further groups; then, for each of its
        sums, one all_reduce over each of these groups.
        """
        further = [flat for flat in self.flats if flat.further_groups]
        for flat in further:
            self.post_late(flat)
        self.wait()
        for flat in further:
            for summed in flat.reduced_grads:
                for group in flat.further_groups:
                    self.comms[group].all_reduce(summed, f"grads.{group}")

    def wait(self) -> None:
        """Return when no sum is pending any more."""
        for pending in self.pending:
            pending.wait()
        self.pending = []
        self.started.clear()

    def test(self) -> None:
        """Let pending all-reduces progress: MPI may do nothing until it is called."""
        self.pending = [pending for pending in self.pending if not pending.test()]

    def zero(self) -> None:
        """Set all gradients to zero, before the first backward of a step."""
        for flat in self.flats:
            self.ops.fill(flat.grad, 0)

    def square_sums(self) -> list[tuple[Array, bool]]:
        """Return (sum of squares, whether it counts in the norm) of each part of the gradients.

        The sums are for `ops.to_floats`. Only owned parameters count, and of equal sums only those
        on one rank. The others are read too, because a copy may be the only one with a number
        that is not finite. This costs no time, because these ranks would otherwise wait while the
        first one adds up its squares.
        """
        return [
            (self.ops.square_sum(flat.reduced_grads[piece][run]), counts)
            for flat in self.of_loss
            for counts, piece, run in flat.norm_runs
        ]

    def unscale(self, loss_scale: float) -> None:
        """Divide all gradients by the factor that multiplied the loss."""
        if loss_scale != 1:
            self._scale(1 / loss_scale)

    def clip(self, norm: float, limit: float) -> None:
        """Scale all gradients so that their global norm is at most `limit` (0: no limit)."""
        if limit and norm > limit:
            self._scale(limit / (norm + 1e-6))

    def _scale(self, factor: float) -> None:
        for flat in self.of_loss:
            for summed in flat.reduced_grads:
                self.ops.scale(summed, factor)


def masked_contribution(value: float, counts: bool) -> float:
    """Return what a rank adds to a sum: `value` if it counts or is not finite, else 0."""
    return value if counts or not math.isfinite(value) else 0.0


def all_reduce_scalars(
    ops: Ops, comms: Comms, values: list[float], name: str, group: str = "world"
) -> list[float]:
    """Return the sums of a few numbers over all ranks of a group.

    Comm: one all_reduce over the group.
    """
    if comms[group].size == 1:  # saves the way to a device and back
        return values
    x = ops.asarray(np.array(values, dtype=np.float64))
    return [float(value) for value in ops.to_host(comms[group].all_reduce(x, name))]
