"""Gradient synchronization: sums over the groups that hold partial gradients, the norm, and
clipping.

Gradients lie in one flat buffer per stage. Most are partial over the data group only: the ranks
that read different tokens, dp x cp. These are cut into buckets, each of one unit. A unit's
all-reduces start as soon as its last weight gradient is done, while the units below it and other
stages still compute. A tied table can lie on two pipeline ranks. It is first summed over those two
(group "tie"), then over the data group, after everything else. An earlier sum would make one end
wait for the other's backward.
"""

from __future__ import annotations

from mpipar.train.non_finite import seen


class GradSync:
    """Owns the pending all-reduces of one step.

    comms: the groups of this rank. stages: {stage: Stage}.
    """

    def __init__(self, ops, stages, comms, recorder, bucket_bytes):
        self.ops, self.stages, self.comms, self.recorder = ops, stages, comms, recorder
        self.bucket = max(1, bucket_bytes // ops.statistics.itemsize)  # elements
        self.pending = []
        self.started: set[tuple[int, int]] = set()  # (stage, unit)
        # All ranks of the data group have the same sums, and one of them counts these.
        self.counts = comms.data.index == 0

    def start(self, stage: int) -> None:
        """Post what is left of a stage's finished gradients.

        Comm: that of `start_unit`, for each unit that has not been started.
        """
        for unit in self.stages[stage].flat.units:
            if (stage, unit) not in self.started:
                self.start_unit(stage, unit)

    def begin_unit(self, stage: int, unit: int) -> None:
        """Called before a pass makes weight gradients of a unit."""

    def end_unit(self, stage: int, unit: int, last: bool) -> None:
        """Called behind a pass that made weight gradients of a unit. last: of the stage.

        Comm: that of `start_unit` behind the last pass, whose sums are complete.
        """
        if last:
            self.start_unit(stage, unit)

    def start_unit(self, stage: int, unit: int) -> None:
        """Post the buckets of a unit's finished gradients.

        All ranks of the data group run the same passes, so they post the same buckets in the same
        order.
        Comm: that of `post`.
        """
        self.started.add((stage, unit))
        phase, self.recorder.phase = self.recorder.phase, "sync"
        self.post(self.stages[stage].flat, unit)
        self.recorder.phase = phase

    def post(self, flat, unit: int) -> None:
        """Comm: one all_reduce per bucket over the data group."""
        for groups, run in flat.units.get(unit, {}).items():
            data = self.comms.by_axis[groups[-1]]
            if len(groups) > 1 or data.size == 1:
                continue
            for first in range(run.start, run.stop, self.bucket):
                piece = flat.grad[first:min(first + self.bucket, run.stop)]
                self.pending.append(data.iall_reduce(piece, "grads.bucket"))

    def finish(self) -> None:
        """Return when every gradient is the sum over all its groups.

        Comm: waits for the buckets; then, per run of parameters with further groups, one all_reduce
        over each of its groups.
        """
        self.wait()
        for stage in sorted(self.stages):
            flat = self.stages[stage].flat
            for groups, run in flat.by_groups:
                *earlier, data = groups
                for group in earlier:
                    self.comms.by_axis[group].all_reduce(flat.grad[run], f"grads.{group}")
                if earlier:
                    self.comms.by_axis[data].all_reduce(flat.grad[run], "grads.late")

    def wait(self) -> None:
        """Return when nothing is pending any more."""
        for pending in self.pending:
            pending.wait()
        self.pending = []
        self.started.clear()

    def test(self) -> None:
        """Let pending all-reduces progress: MPI may do nothing until it is called."""
        self.pending = [pending for pending in self.pending if not pending.test()]

    def zero(self) -> None:
        """Set all gradients to zero, before the first backward of a step."""
        for stage in self.stages.values():
            self.ops.fill(stage.flat.grad, 0)

    def square_sum(self) -> float:
        """This rank's share of the squared gradient norm; not finite if any gradient here is not.

        Only owned parameters count, and of equal sums those of one rank. All others are read too,
        because a copy may be the only one with a number that is not finite. That costs no time.
        While the first rank adds up its squares, the others do the same.
        """
        total = 0.0
        for stage in self.stages.values():
            flat = stage.flat
            for counts, places in ((self.counts, flat.owned), (False, flat.copies)):
                for segment, place in places:
                    total += seen(self.ops.square_sum(flat.summed[segment][place]), counts)
        return total

    def unscale(self, loss_scale: float) -> None:
        """Divide all gradients by the factor that multiplied the loss."""
        if loss_scale != 1:
            self._scale(1 / loss_scale)

    def clip(self, norm: float, limit: float) -> None:
        """Scale all gradients so that their global norm is at most `limit` (0: no limit)."""
        if limit and norm > limit:
            self._scale(limit / (norm + 1e-6))

    def _scale(self, factor: float) -> None:
        for stage in self.stages.values():
            for summed in stage.flat.summed:
                self.ops.scale(summed, factor)


def agree(ops, comms, values: list[float], name: str) -> list[float]:
    """Sum a few numbers over all ranks: the one scalar barrier of a step.

    Comm: one all_reduce over world.
    """
    import numpy as np

    x = ops.asarray(np.array(values, dtype=np.float64))
    return [float(value) for value in ops.to_host(comms.world.all_reduce(x, name))]
