"""`mpipar train`: from flags to a trained model, in execution order."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter

from mpipar import data, models
from mpipar.checkpoint import weights as checkpoint
from mpipar.comm.facts import broadcast_text, gather_facts
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.commands import images, text
from mpipar.commands.auto import machine_problems, with_schedule
from mpipar.commands.inputs import prepare
from mpipar.commands.memory_limit import MemoryLimit, tight
from mpipar.commands.run_folder import (
    folder_problems,
    full_disk_is_an_output_error,
    make_run_folder,
)
from mpipar.console import tables as console
from mpipar.console.bubble import bubble_rows, bubble_table, span_facts
from mpipar.console.memory import PeakMemory, process_peak
from mpipar.console.metrics import Metrics
from mpipar.errors import (
    EXIT_OK,
    EXIT_STOPPED,
    HangError,
    NonFiniteError,
    UsageError,
    UserError,
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
from mpipar.trace import html, trace_file
from mpipar.trace.analysis import analyse
from mpipar.trace.tracer import Tracer
from mpipar.train.worker import Worker, make_schedule

FINISH = {"decoder": text, "convnet": images}  # what is shown when training is done


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


def train(session, worker, rows, metrics, memory, tracer, log, folder) -> tuple[int, bool]:
    """The loop; returns (last step, whether somebody asked to stop). Every rank leaves at the same
    step.
    """
    config = worker.config
    steps, run = config.train.steps, config.run
    unit = FINISH[config.model.model].UNIT
    durations: list[float] = []
    for step in range(1, steps + 1):
        session.where = lambda step=step: f"step {step}"
        try:
            with tracer.step(step):
                result = worker.train_step(
                    step, lambda mb, step=step: rows.train(step, mb), session.stop_requested)
        except NonFiniteError:  # on every rank: the steps that led here are not lost
            metrics.flush(session.world)
            raise
        metrics.add(result)
        if step == 1:
            memory.stop()
        else:  # the first step also pays for what later ones reuse
            durations = [*durations[-50:], result.step_seconds]
            # A step that takes long may be finished, and saved, before a Ctrl-C ends the job.
            session.grace = max(session.grace, 2 * result.step_seconds)
        if step % run.log_interval == 0 or step in (1, steps) or result.stop:
            lines = metrics.flush(session.world)
            if lines:
                for text in console.skipped_steps(lines):
                    log(text)
                seconds = median(durations or [result.step_seconds])
                log(console.step_line(steps, lines[-1], seconds, unit))
        if result.stop:
            return step, True
        if run.save_interval and step % run.save_interval == 0 and step < steps:
            save(worker, folder)
            metrics.skip()
    return steps, False


def describe(session, inputs, recorder, log) -> dict:
    """Print layout, who holds what and the schedule of a step, before anything is allocated.

    Returns what this rank told about itself. Comm: two gathers over the world.
    """
    world, config = session.world, inputs.config
    grid = Grid.of(config.grid, world.rank)
    schedule = make_schedule(config.grid)
    # One proof for all: a schedule that could hang never starts.
    session.agree(lambda: check(schedule) if world.rank == 0 else None)
    model = models.of(config.model)
    split = models.layer_split(config, schedule)
    hosts = {min(ranks) for ranks in gather_facts(world, session.host_ranks) or [(0,)]}
    headline = console.headline(config, world.size, len(hosts), schedule.num_stages)
    for line in (headline, *inputs.notes):
        log(line)
    predicted = predict(config, grid.world_rank)
    # Room for two whole steps, so that what led to a failure is still there.
    recorder.resize(2 * (len(predicted.recorder.records) + len(predicted.recorder.spans)))
    share = f"{grid.tp_rank + 1}/{grid.tp_size} of {model.CUT}"
    fact = {
        "rank": grid.world_rank, "host": host_name(os.environ),
        "place": grid.describe(), "share": share if grid.tp_size > 1 else "all",
        "stages": [console.describe_stage(stage, split, model.ENTRY)
                   for stage in schedule.stages_of(grid.pp_rank)],
        "params": predicted.num_params, "memory": predicted.peak_bytes,
    }
    facts = gather_facts(world, fact)
    if facts:
        log(console.holdings(facts))
        if config.run.memory:
            log("\n" + console.memory_breakdown(facts))
        peaks = [sum(fact["memory"].values()) for fact in facts]
        if warning := tight(config.run.memory_limit, peaks):
            log(f"\n{warning}")
        log(f"\none step of {schedule.name}, one row per pipeline rank:")
        log(draw.grid(simulate(schedule, Costs())) + "\n")
    return fact


def report(session, worker, fact, memory, steps, log) -> None:
    """Print the barriers of a step, overlap and memory, as measured.

    Comm: one gather over the world.
    """
    fact = fact | {
        "counters": [[*key, *counter] for key, counter in worker.recorder.counters.items()
                     if key[3] in ("F", "I", "W", "sync")],
        "flight_ns": worker.gradsync.flight_ns, "overlapped_ns": worker.gradsync.overlapped_ns,
        "ring_ns": worker.recorder.flight_ns("tp"),
        "measured": memory.peak, "process": process_peak(),
        "pp_rank": worker.grid.pp_rank, "spans": span_facts(worker.recorder),
    }
    facts = gather_facts(session.world, fact)
    if facts:
        log("\nbarriers of a step, by name (calls and bytes summed over ranks):")
        log(console.barriers([fact["counters"] for fact in facts], steps, len(facts)))
        log("\n" + console.overlap(facts))
        if console.ring_overlap(facts):
            log(console.ring_overlap(facts))
        if worker.grid.pp_size > 1:
            rows = bubble_rows([fact["spans"] for fact in facts],
                               [fact["pp_rank"] for fact in facts], worker.schedule)
            log(f"\nbusy share and bubble of {worker.schedule.name},"
                " simulated from the measured passes:")
            log(bubble_table(rows))
        log("\nmemory per rank, peak of the first step:")
        log(console.measured_memory(facts))


def save(worker, folder) -> None:
    """Write the weights; they are on the disk when any rank returns.

    Comm: see `checkpoint.stream`, and a barrier over the world.
    """
    worker.recorder.phase = "save"
    checkpoint.save(worker, folder / "weights")
    worker.comms.world.barrier("save.written")


def draw_trace(folder, log) -> None:
    """Make report.html of the trace; every rank must have written its part. Comm: none."""
    try:
        thinned = html.write(analyse(trace_file.read(folder)), folder / "report.html")
    except UserError as error:  # as where the hosts share no disk; the run itself is none the worse
        log(f"no report.html: {error}")
    else:
        log(f"report.html shows who waited for whom{f' ({thinned})' if thinned else ''}; open it in"
            " a browser")


def run(session, reading, machine_path: str | None = None) -> int:
    """Train as the flags say; returns the exit code. machine_path: costs for --schedule auto.

    Comm: everything.
    """
    world = session.start()
    # What lies on the disk is world rank 0's to judge.
    checks = [(folder_problems, UsageError)] if world.rank == 0 else []
    checks.append(machine_problems(machine_path))
    inputs = session.agree(lambda: prepare(reading, world.size, session.host_rank, checks))
    inputs = with_schedule(session, inputs, machine_path)
    folder = session.agree(lambda: make_run_folder(inputs.config) if world.rank == 0 else None)
    folder = Path(broadcast_text(world, str(folder)))
    session.run_folder = str(folder)
    with full_disk_is_an_output_error(folder), ExitStack() as stack:
        def opened(name):
            if world.rank > 0:
                return None
            return stack.enter_context(open(folder / name, "w", encoding="utf-8"))

        log = Log(world.rank, opened("log.txt"))
        return in_folder(session, inputs, folder, log, opened("metrics.jsonl"))


def watchdog(session, worker, folder, log) -> Watchdog:
    """Reports a hang after --hang-warn seconds without progress, ends the job after --hang-stop."""
    recorder, run, size = worker.recorder, worker.config.run, worker.grid.world_size

    def warn(states):
        text = "\n".join([f"no progress for {run.hang_warn:g} s:", *hang.explain(states, size)])
        print(f"mpipar: {text}", file=sys.stderr, flush=True)

    def stop(states):
        session.fail(
            HangError([f"no progress for {run.hang_stop:g} s", *hang.explain(states, size)]))

    return Watchdog(folder / "hang", worker.grid.world_rank, lambda: hang.marker(recorder),
                    lambda: hang.state_of(recorder, worker.comms), warn, stop,
                    run.hang_warn, run.hang_stop)


def in_folder(session, inputs, folder, log, metrics_file) -> int:
    """Describe the run before anything is allocated, then do it within --memory-limit.

    Comm: everything.
    """
    recorder = Recorder()
    fact = describe(session, inputs, recorder, log)
    with MemoryLimit(inputs.config, inputs.ops, recorder):
        return described(session, inputs, recorder, fact, folder, log, metrics_file)


def described(session, inputs, recorder, fact, folder, log, metrics_file) -> int:
    """The run itself: train, report, save, evaluate, generate. Comm: everything."""
    world, config = session.world, inputs.config
    memory = PeakMemory(inputs.ops)
    memory.start()
    timed_ops = TimedOps(inputs.ops, recorder) if config.run.trace_ops else None
    grid = Grid.of(config.grid, world.rank)
    worker = Worker(config, grid, timed_ops or inputs.ops, recorder, world)
    tracer = Tracer(worker, world, folder, timed_ops)
    if config.run.init_from:
        session.agree(lambda: checkpoint.load(worker, config.run.init_from))
    else:
        worker.initialize()
    rows = data.of(config.model).Rows(inputs.ops, inputs.train_part, config, worker.grid)
    # The same axes on every rank, also where this one is in no group of several (a tie has two
    # members).
    axes = [*worker.comms.by_axis, "world"]
    metrics = Metrics(recorder, axes, worker.num_tokens, metrics_file)
    recorder.reset_counters()
    start = perf_counter()
    with watchdog(session, worker, folder, log):
        with session.stop_on_request():
            last, stopped = train(session, worker, rows, metrics, memory, tracer, log, folder)
            seconds = perf_counter() - start
            if tracer.finish():
                log(f"\nthe trace of {tracer.steps_text()} is in {folder / 'trace'}; see it with:"
                    f" mpipar trace {folder}")
            if not stopped:
                report(session, worker, fact, memory, last, log)
            save(worker, folder)
        if stopped:
            log(f"stopped on request after step {last}; the weights are in {folder / 'weights'}")
            return EXIT_STOPPED
        session.where, session.saved = lambda: "evaluation", str(folder / "weights")
        FINISH[config.model.model].finish(worker, inputs, log, seconds)
    if tracer.written and log.speaks:
        draw_trace(folder, log)
    log(f"\nweights, metrics.jsonl, config.toml and log.txt are in {folder}")
    return EXIT_OK
