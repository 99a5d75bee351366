"""The tracer of a running job (`--trace`): keeps all records of chosen steps and writes them."""

from __future__ import annotations

import gc
import os
import secrets
from contextlib import contextmanager
from dataclasses import asdict
from time import perf_counter_ns

from mpipar.comm.grid import EVERY
from mpipar.comm.objects import broadcast_text, gather_objects
from mpipar.models.decoder import ENTRY
from mpipar.run.process.streams import warn
from mpipar.run.trace import trace_file
from mpipar.run.trace.clock import CommonClock, clock_identity, measure_clocks, shared_clocks

SHORTEST_GC_NS = 100_000  # shorter collections are frequent and delay no rank


class Tracer:
    """Traces some steps of one rank.

    The loop runs every step inside `step` and calls `finish` at its end. steps: the first and the
    last one to trace, or None. timed_ops: the wrapper that records each operation of a layer, or
    None.
    """

    def __init__(self, worker, mpi_world, folder, steps: tuple[int, int] | None, timed_ops=None):
        self.worker, self.world, self.folder = worker, mpi_world, folder
        self.timed_ops = timed_ops
        self.first, self.last = steps or (0, -1)
        self.steps: list[tuple[int, int, int]] = []
        self.capacity = None
        self.owners: list[int] = []
        self.before: dict = {}
        self.recording = ""
        self.collecting = 0  # when the current garbage collection began
        self.written: bool | None = None  # None until all ranks have tried

    @contextmanager
    def step(self, number: int):
        """Return the context of one training step.

        A rank that fails in a traced step writes what it has, without MPI. If writing a trace fails
        for any reason, the run continues without it. Comm: the clock measurement before FIRST and
        after LAST, see `clock.measure_clocks`; before FIRST a broadcast of the recording's name.
        """
        if not self.first <= number <= self.last:
            yield
            return
        if number == self.first:
            self._begin()
        start = perf_counter_ns()
        try:
            yield
        except BaseException:
            self.steps.append((number, start, perf_counter_ns()))
            if problem := self._write(complete=False):
                warn(f"cannot write the trace: {problem}")
            raise
        self.worker.settle()  # a device may lag behind, but not beyond the end of a traced step
        self.steps.append((number, start, perf_counter_ns()))
        if number == self.last:
            self.finish()

    def _begin(self) -> None:
        recorder = self.worker.recorder
        self.capacity = recorder.entries.maxlen
        recorder.resize(None)  # no record may be lost until LAST
        self.owners = shared_clocks(self.world, clock_identity())
        self.before = measure_clocks(self.world, self.owners)
        self.recording = broadcast_text(self.world, secrets.token_hex(8))
        if self.timed_ops is not None:
            self.timed_ops.active = True
        gc.callbacks.append(self._collected)
        if self.worker.grid.world_rank == 0:  # so that the files of a run that fails can be read
            self._tried(self._write_meta)

    def _collected(self, phase: str, info: dict) -> None:
        """Note the start and the end of each garbage collection; Python calls this."""
        now = perf_counter_ns()
        if phase == "start":
            self.collecting = now
        elif now - self.collecting >= SHORTEST_GC_NS:
            self.worker.recorder.span("gc", self.collecting)

    def finish(self) -> bool:
        """Write the trace if one was begun; return, on world rank 0, whether it is whole.

        Comm: the clock measurement, see `clock.measure_clocks`, and a gather of facts; every rank
        calls it after the same step.
        """
        if self.steps and self.written is None:
            after = measure_clocks(self.world, self.owners)
            problems = gather_objects(self.world, self._write(complete=True, after=after)) or []
            self.written = not any(problems)
            if not self.written:
                rank, text = next((at, text) for at, text in enumerate(problems) if text)
                warn(f"rank {rank} cannot write its trace: {text}; the run continues without it")
            if self.timed_ops is not None:
                self.timed_ops.active = False
            self.worker.recorder.resize(self.capacity)
        return bool(self.written)

    def _tried(self, write, *arguments) -> str:
        """Call a function that writes; return what went wrong, or ""."""
        try:
            write(*arguments)
        except Exception as error:  # noqa: BLE001 - the run is worth more than its trace
            return str(error) or repr(error)
        return ""

    def _write(self, complete: bool, after: dict | None = None) -> str:
        """Write this rank's file, and on world rank 0 meta.json; return what went wrong, or ""."""
        gc.callbacks.remove(self._collected)
        return self._tried(self._write_rank, complete) or (
            self._tried(self._write_meta, after) if self.worker.grid.world_rank == 0 else ""
        )

    def _write_rank(self, complete: bool) -> None:
        worker, recorder = self.worker, self.worker.recorder
        numbers = {step for step, *_ in self.steps}
        head = {
            "recording": self.recording,
            "world_rank": worker.grid.world_rank,
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "place": {axis: worker.grid.group_rank(axis) for axis in EVERY},
            "stages": sorted(worker.stages),
            "groups": {axis: comm.ranks for axis, comm in worker.comms.groups.items()},
            "steps": self.steps,
            "complete": complete,
            "cores": sorted(os.sched_getaffinity(0)),
        }
        trace_file.write_rank(
            self.folder,
            head,
            [record for record in recorder.records if record.step in numbers],
            [span for span in recorder.spans if span.step in numbers],
            recorder.operations,
        )

    def _write_meta(self, after: dict | None = None) -> None:
        worker, config = self.worker, self.worker.config
        clock = CommonClock(tuple(self.owners), self.before, after or {})
        trace_file.write_meta(
            self.folder,
            trace_file.common_facts(
                worker.schedule,
                worker.stage_layers,
                {axis: worker.grid.size(axis) for axis in EVERY},
                ENTRY,
                recording=self.recording,
                rank_order=worker.grid.axes,
                model=asdict(config.model),
                batch_size=config.train.batch_size,
                dtype=config.run.dtype,
                device=config.run.device,
                clock=asdict(clock),
            ),
        )
