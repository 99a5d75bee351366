"""`mpipar train`: from flags to a trained model, in execution order."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter

from mpipar import data, models
from mpipar.checkpoint import weights as checkpoint
from mpipar.comm.facts import broadcast_text, gather_facts
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.commands import finish
from mpipar.commands.auto import machine_problems, with_schedule
from mpipar.commands.inputs import prepare
from mpipar.commands.memory_limit import MemoryLimit, tight
from mpipar.commands.run_folder import (
    folder_problems,
    full_disk_is_an_output_error,
    make_run_folder,
)
from mpipar.console import tables as console
from mpipar.console.memory import PeakMemory
from mpipar.console.metrics import Metrics
from mpipar.errors import (
    EXIT_OK,
    EXIT_STOPPED,
    DriftError,
    HangError,
    NonFiniteError,
    UsageError,
)
from mpipar.job import hang
from mpipar.job.environment import host_name
from mpipar.job.watchdog import Watchdog
from mpipar.ops.timed_ops import TimedOps
from mpipar.pipeline import draw
from mpipar.pipeline.check import check
from mpipar.pipeline.costs import Costs
from mpipar.pipeline.simulate import simulate
from mpipar.plan.predict import predict
from mpipar.trace.tracer import Tracer
from mpipar.train.replicas import Replicas
from mpipar.train.worker import Asks, Worker, configured_schedule


def run(session, reading, machine_path: str | None = None) -> int:
    """Train as the flags say; return the exit code. machine_path: costs for --schedule auto.

    Comm: that of every method of `Run`.
    """
    training = Run(session)
    training.prepare(reading, machine_path)
    with full_disk_is_an_output_error(training.folder), training.open_files():
        training.describe()
        with MemoryLimit(training.config, training.inputs.ops, training.recorder):
            training.allocate()
            with training.watchdog():
                with session.stop_on_request():
                    training.loop()
                    training.save()
                return training.finish()


class Log:
    """Prints on world rank 0 and keeps a copy in the run folder's log.txt."""

    def __init__(self, world_rank: int, file=None):
        self.speaks, self.file = world_rank == 0, file

    def __call__(self, text: str = "") -> None:
        if self.speaks:
            print(console.printable(text), flush=True)
            if self.file is not None:
                self.file.write(text + "\n")
                self.file.flush()


class Run:
    """One training run of one rank.

    Every rank calls all methods, in the order in which they stand here.
    """

    def __init__(self, session):
        self.session, self.world, self.recorder = session, session.start(), Recorder()

    def prepare(self, reading, machine_path) -> None:
        """Check all that can be checked, choose the schedule, make the run folder.

        Comm: that of `with_schedule`, and the folder's name from world rank 0.
        """
        session, world = self.session, self.world
        # World rank 0 alone checks the disk.
        checks = [(folder_problems, UsageError)] if world.rank == 0 else []
        checks.append(machine_problems(machine_path))
        inputs = session.agree(lambda: prepare(reading, world.size, session.host_rank, checks))
        self.inputs = with_schedule(session, inputs, machine_path)
        self.config = self.inputs.config
        self.grid = Grid.of(self.config.grid, world.rank)
        folder = session.agree(
            lambda: make_run_folder(self.config, session) if world.rank == 0 else None)
        self.folder = Path(broadcast_text(world, str(folder)))
        session.run_folder = str(self.folder)

    @contextmanager
    def open_files(self):
        """Inside its block world rank 0 writes log.txt and metrics.jsonl."""
        with ExitStack() as stack:
            log, self.metrics_file = (
                stack.enter_context(open(self.folder / name, "w", encoding="utf-8"))
                if self.world.rank == 0 else None for name in ("log.txt", "metrics.jsonl"))
            self.log = Log(self.world.rank, log)
            yield

    def describe(self) -> None:
        """Print layout, holdings and the schedule of a step, before allocating anything.

        Comm: two gathers over the world.
        """
        session, config, grid, log = self.session, self.config, self.grid, self.log
        schedule = configured_schedule(config.grid)
        # One proof covers all ranks: a schedule that could hang never starts.
        session.agree(lambda: check(schedule) if grid.world_rank == 0 else None)
        model = models.model_of(config.model)
        split = models.layer_split(config, schedule)
        hosts = {min(ranks) for ranks in gather_facts(self.world, session.host_ranks) or [(0,)]}
        log(console.headline(config, self.world.size, len(hosts), schedule.num_stages))
        for note in filter(None, (*self.inputs.notes, session.lock_note)):
            log(note)
        predicted = predict(config, grid.world_rank)
        # The ring has room for two whole steps, so that it still holds what led to a failure.
        self.recorder.resize(2 * (len(predicted.recorder.records) + len(predicted.recorder.spans)))
        share = f"{grid.tp_rank + 1}/{grid.tp_size} of {model.CUT}"
        self.fact = {
            "rank": grid.world_rank, "host": host_name(os.environ),
            "place": grid.describe(), "share": share if grid.tp_size > 1 else "all",
            "stages": [console.describe_stage(stage, split, model.ENTRY)
                       for stage in schedule.stages_of(grid.pp_rank)],
            "params": predicted.num_params, "memory": predicted.peak_bytes,
        }
        facts = gather_facts(self.world, self.fact)
        if facts:
            log(console.holdings(facts))
            if config.run.memory:
                log("\n" + console.memory_breakdown(facts))
            peaks = [sum(fact["memory"].values()) for fact in facts]
            if warning := tight(config.run.memory_limit, peaks):
                log(f"\n{warning}")
            log(f"\none step of {schedule.name}, one row per pipeline rank:")
            log(draw.grid(simulate(schedule, Costs())) + "\n")

    def allocate(self) -> None:
        """Make the worker and its weights, data, metrics and tracer. Comm: the worker's groups."""
        config, ops, recorder = self.config, self.inputs.ops, self.recorder
        self.memory = PeakMemory(ops)
        self.memory.start()
        timed_ops = TimedOps(ops, recorder) if config.run.trace_ops else None
        self.worker = Worker(config, self.grid, timed_ops or ops, recorder, self.world)
        self.replicas = Replicas(self.worker)
        self.tracer = Tracer(self.worker, self.world, self.folder, timed_ops)
        if config.run.init_from:
            self.session.agree(lambda: checkpoint.load(self.worker, config.run.init_from))
        else:
            self.worker.initialize()
        self.rows = data.data_of(config.model).Rows(ops, self.inputs.train_part, config, self.grid)
        # Every rank has the same axes, even where it is alone in a group (a tie has two members).
        axes = [*self.worker.comms.by_axis, "world"]
        self.metrics = Metrics(recorder, axes, self.worker.num_tokens, self.metrics_file)
        recorder.reset_counters()

    def watchdog(self) -> Watchdog:
        """The watchdog of a job without progress.

        It reports a hang after --hang-warn seconds and ends the job after --hang-stop.
        """
        recorder, run, size = self.recorder, self.config.run, self.grid.world_size

        def warn(states):
            text = "\n".join([f"no progress for {run.hang_warn:g} s:", *hang.explain(states, size)])
            print(f"mpipar: {text}", file=sys.stderr, flush=True)

        def stop(states):
            self.session.fail(
                HangError([f"no progress for {run.hang_stop:g} s", *hang.explain(states, size)]))

        return Watchdog(
            self.folder / "hang", self.grid.world_rank, progress=lambda: hang.marker(recorder),
            describe=lambda: hang.state_of(recorder, self.worker.comms),
            on_warn=warn, on_stop=stop, warn=run.hang_warn, stop=run.hang_stop)

    def loop(self) -> None:
        """Take and report the steps. Every rank leaves at the same step.

        Comm: that of a training step, `Tracer` and `Metrics`; one gather for the report.
        """
        session, worker, steps = self.session, self.worker, self.config.train.steps
        interval = self.config.run.save_interval
        start, self.stopped = perf_counter(), False
        self.durations: list[float] = []
        for step in range(1, steps + 1):
            session.where = lambda step=step: f"step {step}"
            try:
                with self.tracer.step(step):
                    result = worker.train_step(
                        step, lambda mb, step=step: self.rows.train(step, mb),
                        Asks(session.stop_requested, session.save_requested))
                self.show_step(result)
                self.check_replicas(step)
            except (NonFiniteError, DriftError):  # all ranks raise it: report the steps so far
                self.metrics.flush(self.world)
                raise
            if result.asks.stop:
                self.stopped = True
                break
            due = interval and step % interval == 0
            if (due or result.asks.save) and step < steps:
                session.save_requested = False
                self.save()
                self.metrics.skip()
        self.last, self.seconds = step, perf_counter() - start
        if self.tracer.finish():
            self.log(f"\nthe trace of {self.tracer.steps_text()} is in {self.folder / 'trace'}; see"
                     f" it with: mpipar trace {self.folder}")
        if self.replicas.count:
            self.log(self.replicas.summary())
        if not self.stopped:
            finish.report_step(
                self.world, worker, self.fact, self.memory.peak, self.last, self.log)

    def show_step(self, result) -> None:
        """Record a step, and print it if its turn has come. Comm: that of `Metrics.flush`."""
        step, steps, run = result.step, self.config.train.steps, self.config.run
        self.metrics.add(result)
        if step == 1:
            self.memory.stop()
        else:  # the first step also pays for things that later ones reuse
            self.durations = [*self.durations[-50:], result.step_seconds]
        if step % run.log_interval == 0 or step in (1, steps) or result.asks.stop:
            lines = self.metrics.flush(self.world)
            if lines:
                for text in console.skipped_steps(lines):
                    self.log(text)
                seconds = median(self.durations or [result.step_seconds])
                unit = finish.UNITS[self.config.model.model]
                self.log(console.step_line(steps, lines[-1], seconds, unit))

    def check_replicas(self, step) -> None:
        """Compare the copies of all tensors if it is time to. Comm: see `Replicas.check`."""
        every = self.config.run.check_replicas
        if every and step % every == 0:
            self.replicas.check(step)
            self.metrics.skip()

    def save(self) -> None:
        """Write the weights; when any rank returns, they are on the disk.

        Comm: see `checkpoint.stream`, and a barrier over the world.
        """
        self.recorder.phase = "save"
        checkpoint.save(self.worker, self.folder / "weights")
        self.worker.comms.world.barrier("save.written")

    def finish(self) -> int:
        """Show what the model has learned; return the exit code. Comm: forward passes."""
        weights = self.folder / "weights"
        if self.stopped:
            self.log(f"stopped on request after step {self.last}; the weights are in {weights}")
            return EXIT_STOPPED
        self.session.where, self.session.saved = lambda: "evaluation", str(weights)
        if self.session.stop_requested:  # it came too late for a step, during the last save
            self.session.fail(KeyboardInterrupt("stopped on request"))
        finish.SHOW[self.config.model.model](self.worker, self.inputs, self.log, self.seconds)
        if self.tracer.written and self.log.speaks:
            finish.draw_trace(self.folder, self.log)
        self.log(f"\nweights, metrics.jsonl, config.toml and log.txt are in {self.folder}")
        return EXIT_OK
