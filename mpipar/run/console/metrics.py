"""What a run measures of its steps: metrics.jsonl, which is also read here, and peak memory.

A line is one object per step, with every rank's time inside communication, per axis. Ranks keep
their own numbers and gather them only when lines are due, so measuring adds no barrier to a step.
"""

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from mpipar.comm.objects import gather_numbers
from mpipar.comm.record import Sums
from mpipar.run.files.bounded import open_regular

MOST_LINE = 1 << 20  # bytes
ARRAYS = np.lib.tracemalloc_domain  # NumPy's mark for the data of arrays


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
        objects = (
            []
            if stacked is None
            else [self._object(step, stacked[:, i]) for i, step in enumerate(self.steps)]
        )
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


# --- lines that a run has written


def lines_of(folder: Path, name: str) -> Iterator[tuple[bytes, dict | None]]:
    """Yield each whole line of a run's file and its object, or None if the line is damaged.

    A last line without its newline is treated as not written. Nothing is read after a line of more
    than MOST_LINE bytes. Yields nothing if there is no such file. Raises OSError.
    """
    with suppress(FileNotFoundError), open_regular(name, folder) as file:
        while line := file.readline(MOST_LINE):
            if line.endswith(b"\n"):
                yield line, _object_of(line)
            elif len(line) == MOST_LINE:
                yield line, None
                return


def _object_of(line: bytes) -> dict | None:
    """Return the object in a line if it is that of a step, else None."""
    with suppress(ValueError, RecursionError):
        value = json.loads(line.decode())
        if isinstance(value, dict) and type(value.get("step")) is int:
            comm = value.get("comm", {})
            whole = isinstance(comm, dict) and all(isinstance(x, dict) for x in comm.values())
            return value if whole else None
    return None


def read_lines(folder: Path, name: str) -> tuple[list[dict], int]:
    """Return (objects, number of damaged lines) of a file that a run writes; see `lines_of`."""
    found = [value for _, value in lines_of(folder, name)]
    whole = [value for value in found if value is not None]
    return whole, len(found) - len(whole)


# --- memory


class PeakMemory:
    """Peak bytes of arrays in a training step.

    On the CPU Python's allocation tracing counts them, during the first two steps only, because it
    slows down small allocations. Of two steps only the second one's peak is used: in the first, a
    compiler such as Numba's temporarily takes memory that is no array. On a GPU the peak is what
    CuPy's pool holds: arrays, and freed blocks that fitted no later array. `peak` leaves out all
    else that Python allocated meanwhile and still holds, such as what Numba's compiler keeps.
    """

    def __init__(self, ops):
        self.ops, self.counts = ops, ops.device == "cpu"
        self.peak = self.steps = 0

    def start(self) -> None:
        """Begin before the run creates any array."""
        if self.counts:
            tracemalloc.start(1)

    def after_step(self, is_last: bool) -> bool:
        """Return whether this step was watched. is_last: whether no step follows."""
        self.steps += 1
        if self.steps == 2 or (self.steps == 1 and is_last):
            self.stop()
        elif self.steps == 1 and self.counts:
            tracemalloc.reset_peak()
        return self.steps <= 2

    def stop(self) -> None:
        """Record the peak since `start`, or since the first step."""
        if not self.counts:
            self.peak = self.ops.xp.get_default_memory_pool().total_bytes()
            return
        together = tracemalloc.get_traced_memory()[1]
        traces = tracemalloc.take_snapshot().traces
        tracemalloc.stop()
        self.peak = together - sum(trace.size for trace in traces if trace.domain != ARRAYS)
