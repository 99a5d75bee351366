"""metrics.jsonl: one object per step, with every rank's time inside communication, per axis.

Ranks keep their own numbers and gather them only when lines are due, so measuring adds no barrier
to a step.
"""

import numpy as np

from mpipar.comm.objects import gather_numbers
from mpipar.comm.record import Sums


class Metrics:
    """Collects steps; `flush` gathers them on world rank 0, which adds the lines to its files.

    axes: names of the groups that exist. files: a `GrowingFile` and perhaps `Events` on world
    rank 0, none elsewhere.
    """

    def __init__(self, recorder, axes, tokens_per_step, files=()):
        self.recorder, self.axes, self.files = recorder, list(axes), files
        self.tokens_per_step = tokens_per_step
        self.before = self._totals()
        self.steps, self.numbers = [], []

    def _totals(self) -> np.ndarray:
        """Return calls, payload bytes and seconds since the run began, as an array (axes, 3)."""
        totals = self.recorder.totals("axis")
        rows = [totals.get((axis,), Sums()) for axis in self.axes]
        return np.array([[row.calls, row.payload_bytes, row.nanoseconds * 1e-9] for row in rows])

    def skip(self) -> None:
        """Ignore communication since the last step, such as evaluation or saving."""
        self.before = self._totals()

    def add(self, result) -> None:
        """Add a StepResult, and the communication since the previous step."""
        now = self._totals()
        self.steps.append(result)
        self.numbers.append(np.append((now - self.before).ravel(), result.step_seconds))
        self.before = now

    def flush(self, mpi_inner) -> list[dict]:
        """Write the collected steps; return their objects on the first of these ranks.

        Comm: one Gather over the ranks that take a step together, without a record; all of them
        must call it at the same step.
        """
        if not self.steps:
            return []
        stacked = gather_numbers(mpi_inner, np.array(self.numbers))  # (ranks, steps, numbers)
        objects = []
        if stacked is not None:
            objects = [self._object(step, stacked[:, i]) for i, step in enumerate(self.steps)]
        for file in self.files:
            for line in objects:
                file.add(line)
        self.steps, self.numbers = [], []
        return objects

    def newest(self) -> dict:
        """Return the object of the step that was added last, from this rank's numbers alone."""
        return self._object(self.steps[-1], np.array(self.numbers[-1:]))

    def _object(self, result, numbers: np.ndarray) -> dict:
        """Return one line. numbers: (ranks, axes * 3 + 1). The slowest rank sets the step time."""
        seconds = float(numbers[:, -1].max())
        per_axis = numbers[:, :-1].reshape(len(numbers), len(self.axes), 3)
        inside = per_axis[:, :, 2].sum(1) / numbers[:, -1]
        return {
            "step": result.step,
            "loss": result.loss,
            "grad_norm": None if result.skipped else result.grad_norm,
            **(
                {}
                if result.loss_scale is None
                else {"loss_scale": result.loss_scale, "skipped": result.skipped}
            ),
            "lr": result.lr,
            "step_seconds": seconds,
            "tokens_per_second": self.tokens_per_step / seconds,
            "comm_share_mean": float(inside.mean()),
            "comm_share_max": float(inside.max()),
            "comm": {
                axis: {
                    "calls": int(per_axis[:, i, 0].sum()),
                    "bytes": int(per_axis[:, i, 1].sum()),
                    "seconds_mean": float(per_axis[:, i, 2].mean()),
                    "seconds_max": float(per_axis[:, i, 2].max()),
                }
                for i, axis in enumerate(self.axes)
                if per_axis[:, i, 0].any()
            },
        }
