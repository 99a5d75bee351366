"""`mpipar train`: from flags to a trained model, in execution order."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter

from mpipar import checkpoint, flags
from mpipar.commands.inputs import prepare
from mpipar.data.bigram import bigram_loss
from mpipar.data.rows import Rows
from mpipar.data.source import BYTE_VOCABULARY
from mpipar.errors import EXIT_OK, EXIT_STOPPED, OutputError, UsageError
from mpipar.generate import decode, encode, generate
from mpipar.grid import Grid
from mpipar.pipeline import draw
from mpipar.plan.predict import predict
from mpipar.report import console
from mpipar.report.gather import gather_facts
from mpipar.report.memory import PeakMemory, process_peak
from mpipar.report.metrics import Metrics
from mpipar.trace import Recorder
from mpipar.train import Worker


class Log:
    """Prints on world rank 0 and keeps a copy in the run folder's log.txt."""

    def __init__(self, world_rank: int, file=None):
        self.speaks, self.file = world_rank == 0, file

    def __call__(self, text: str = "") -> None:
        if self.speaks:
            print(text, flush=True)
            if self.file is not None:
                self.file.write(text + "\n")
                self.file.flush()


def make_run_folder(config, world_rank: int) -> Path:
    """Create the run folder on world rank 0; an existing one is never written to.

    Raises UsageError when it exists, OutputError when it can't be made.
    """
    run = config.run
    if run.out is not None:
        folder = Path(run.out)
    else:
        parent = Path("runs")
        numbers = [int(p.name) for p in parent.glob("[0-9]*") if p.name.isdecimal()]
        folder = parent / (run.run_name or f"{max(numbers, default=0) + 1:04d}")
    if world_rank > 0:
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} exists and is not empty; a run never overwrites another:"
            " give another --out or --run-name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(flags.to_toml(config))
    except OSError as error:
        raise OutputError(f"{folder}: the run folder can't be made: {error.strerror}") from None
    return folder


def facts_of(worker, predicted) -> dict:
    """What this rank tells about itself before the run."""
    tp = worker.comms.tp
    return {
        "rank": worker.grid.world_rank, "host": os.uname().nodename.split(".")[0],
        "place": worker.grid.describe(),
        "stages": [console.describe_stage(stage, worker.stage_layers) for stage in worker.stages],
        "share": f"{tp.index + 1}/{tp.size} of heads, ffn, vocabulary" if tp.size > 1 else "all",
        "params": predicted.num_params, "memory": predicted.peak_bytes,
    }


def train(session, worker, rows, metrics, memory, log, folder) -> tuple[int, bool]:
    """The loop; returns (last step, whether somebody asked to stop). Every rank leaves at the same step."""
    config = worker.config
    steps, run = config.train.steps, config.run
    durations: list[float] = []
    for step in range(1, steps + 1):
        session.where = lambda step=step: f"step {step}"
        result = worker.train_step(
            step, lambda mb, step=step: rows.train(step, mb), session.stop_requested)
        metrics.add(result)
        if step == 1:
            memory.stop()
        else:  # the first step also pays for what later ones reuse
            durations = [*durations[-50:], result.step_seconds]
        if step % run.log_interval == 0 or step in (1, steps) or result.stop:
            lines = metrics.flush(session.world)
            if lines:
                seconds = median(durations or [result.step_seconds])
                log(console.step_line(steps, lines[-1], seconds))
        if result.stop:
            return step, True
        if run.save_interval and step % run.save_interval == 0 and step < steps:
            worker.recorder.phase = "save"
            checkpoint.save(worker, folder / "weights")
            metrics.skip()
    return steps, False


def describe(worker, config, log, session) -> dict:
    """Print who holds what and the schedule of a step, before anything runs."""
    predicted = predict(config, worker.grid.world_rank)
    # Room for two whole steps, so that what led to a failure is still there.
    worker.recorder.resize(2 * (len(predicted.recorder.records) + len(worker.program)))
    fact = facts_of(worker, predicted)
    facts = gather_facts(session.world, fact)
    if facts:
        log(console.holdings(facts))
        if config.run.memory:
            log("\n" + console.memory_breakdown(facts))
        log(f"\none step of {worker.schedule.name}, one row per pipeline rank:")
        log(draw.grid(worker.schedule) + "\n")
    return fact


def report(session, worker, fact, memory, steps, log) -> None:
    """Print the barriers of a step, overlap and memory, as measured. Comm: one gather over the world."""
    fact = fact | {
        "counters": [[*key, *counter] for key, counter in worker.recorder.counters.items()
                     if key[3] in ("F", "I", "W", "sync")],
        "flight_ns": worker.gradsync.flight_ns, "overlapped_ns": worker.gradsync.overlapped_ns,
        "measured": memory.peak, "process": process_peak(),
    }
    facts = gather_facts(session.world, fact)
    if facts:
        log("\nbarriers of a step, by name (calls and bytes summed over ranks):")
        log(console.barriers([fact["counters"] for fact in facts], steps, len(facts)))
        log("\n" + console.overlap(facts))
        log("\nmemory per rank, peak of the first step:")
        log(console.measured_memory(facts))


def finish(session, worker, parts, log, folder, seconds) -> None:
    """Held-out loss beside the bigram model's, the weights, and text. Comm: evaluation, saving, generation."""
    config = worker.config
    train_part, held_out = parts
    rows = Rows(worker.ops, held_out, config, worker.grid.dp_rank)
    loss, count = worker.evaluate(rows)
    trained = worker.num_tokens * config.train.steps
    log(f"\nheld-out loss {loss:.4f} nats per token over {count:,} tokens"
        f" (trained on {trained:,} tokens in {seconds:.1f} s)")
    if config.model.vocab_size <= BYTE_VOCABULARY:
        bar = bigram_loss(train_part, held_out[:count + 1], config.model.vocab_size)
        log(f"byte-bigram model of the same split: {bar:.4f}; the decoder is {bar - loss:+.4f} nats better")
    worker.recorder.phase = "save"
    checkpoint.save(worker, folder / "weights")
    run = config.run
    if run.sample_tokens:
        prompt = encode(run.prompt, config.model.vocab_size)
        text = list(generate(worker, prompt, run.sample_tokens, run.temperature, run.seed))
        log(f"\ntext generated from {run.prompt!r}:")
        log(decode([*prompt, *text], config.model.vocab_size))
    log(f"\nweights, metrics.jsonl, config.toml and log.txt are in {folder}")


def run(session, reading) -> int:
    """Train as the flags say; returns the exit code. Comm: everything."""
    world = session.start()
    config, notes, ops, parts = session.agree(lambda: prepare(reading, world.size))
    folder = session.agree(lambda: make_run_folder(config, world.rank))
    session.run_folder = str(folder)
    memory = PeakMemory(ops)
    memory.start()
    recorder = Recorder()
    worker = Worker(config, Grid.of(config.grid, world.rank), ops, recorder, world)
    with ExitStack() as stack:
        def opened(name):
            return stack.enter_context(open(folder / name, "w")) if world.rank == 0 else None

        log = Log(world.rank, opened("log.txt"))
        num_hosts = len({min(ranks) for ranks in gather_facts(world, session.host_ranks) or [(0,)]})
        log(console.headline(config, world.size, num_hosts, worker.schedule.num_stages))
        for note in notes:
            log(note)
        fact = describe(worker, config, log, session)
        if config.run.init_from:
            session.agree(lambda: checkpoint.load(worker, config.run.init_from))
        else:
            worker.initialize()
        rows = Rows(ops, parts[0], config, worker.grid.dp_rank)
        axes = [axis for axis, comm in worker.comms.by_axis.items() if comm.size > 1]
        metrics = Metrics(recorder, [*axes, "world"], worker.num_tokens, opened("metrics.jsonl"))
        recorder.reset_counters()
        start = perf_counter()
        with session.stop_on_request():
            last, stopped = train(session, worker, rows, metrics, memory, log, folder)
            seconds = perf_counter() - start
            if stopped:
                recorder.phase = "save"
                checkpoint.save(worker, folder / "weights")
                log(f"stopped on request after step {last}; the weights are in {folder / 'weights'}")
                return EXIT_STOPPED
        report(session, worker, fact, memory, last, log)
        finish(session, worker, parts, log, folder, seconds)
    return EXIT_OK
