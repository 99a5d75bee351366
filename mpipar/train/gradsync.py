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

    def start(self, stage: int) -> None:
        """Post what is left of a stage's finished gradients.

        Comm: that of `start_unit`, for each unit that has not been started.
        """
        for unit in self.stages[stage].flat.units:
            if (stage, unit) not in self.started:
                self.start_unit(stage, unit)

    def start_unit(self, stage: int, unit: int) -> None:
        """Post the buckets of a unit's finished gradients.

        All ranks of the data group run the same passes, so they post the same buckets in the same
        order.
        Comm: one all_reduce per bucket over the data group.
        """
        self.started.add((stage, unit))
        flat, phase = self.stages[stage].flat, self.recorder.phase
        self.recorder.phase = "sync"
        for groups, run in flat.units.get(unit, {}).items():
            data = self.comms.by_axis[groups[-1]]
            if len(groups) > 1 or data.size == 1:
                continue
            for first in range(run.start, run.stop, self.bucket):
                piece = flat.grad[first:min(first + self.bucket, run.stop)]
                self.pending.append(data.iall_reduce(piece, "grads.bucket"))
        self.recorder.phase = phase

    def finish(self) -> None:
        """Return when every gradient is the sum over all its groups.

        Comm: waits for the buckets; then, per run of parameters with further groups, one all_reduce
        over each of its groups.
        """
        for pending in self.pending:
            pending.wait()
        self.pending = []
        self.started.clear()
        for stage in sorted(self.stages):
            flat = self.stages[stage].flat
            for groups, run in flat.by_groups:
                *earlier, data = groups
                for group in earlier:
                    self.comms.by_axis[group].all_reduce(flat.grad[run], f"grads.{group}")
                if earlier:
                    self.comms.by_axis[data].all_reduce(flat.grad[run], "grads.late")

    def test(self) -> None:
        """Let pending all-reduces progress: MPI may do nothing until it is called."""
        self.pending = [pending for pending in self.pending if not pending.test()]

    def zero(self) -> None:
        """Set all gradients to zero, before the first backward of a step."""
        for stage in self.stages.values():
            self.ops.fill(stage.flat.grad, 0)

    def square_sum(self) -> float:
        """This rank's share of the squared gradient norm; not finite if any gradient here is not.

        Only owned parameters of the first rank of the data group count. All others are read too,
        because a copy may be the only one with a number that is not finite. That costs no time.
        While the first rank adds up its squares, the others do the same.
        """
        total = 0.0
        for stage in self.stages.values():
            for counts, runs in ((self.comms.data.index == 0, stage.flat.owned),
                                 (False, stage.flat.copies)):
                for run in runs:
                    total += seen(self.ops.square_sum(stage.flat.grad[run]), counts)
        return total

    def unscale(self, loss_scale: float) -> None:
        """Divide all gradients by the factor that multiplied the loss."""
        if loss_scale != 1:
            for stage in self.stages.values():
                self.ops.scale(stage.flat.grad, 1 / loss_scale)

    def clip(self, norm: float, limit: float) -> None:
        """Scale all gradients so that their global norm is at most `limit` (0: no limit)."""
        if limit and norm > limit:
            for stage in self.stages.values():
                self.ops.scale(stage.flat.grad, limit / (norm + 1e-6))


def agree(ops, comms, values: list[float], name: str) -> list[float]:
    """Sum a few numbers over all ranks: the one scalar barrier of a step.

    Comm: one all_reduce over world.
    """
    import numpy as np

    x = ops.asarray(np.array(values, dtype=np.float64))
    return [float(value) for value in ops.to_host(comms.world.all_reduce(x, name))]
