"""The parts of a training run, in execution order; `commands.train` puts them together."""

import os
from contextlib import ExitStack, closing, suppress
from functools import partial
from statistics import median
from time import perf_counter

from mpipar.comm.grid import Grid
from mpipar.comm.objects import gather_objects
from mpipar.comm.recorder import Recorder
from mpipar.config.run import TEMPERATURE, trace_steps, traced_steps
from mpipar.config.text import counted, one_line, quoted
from mpipar.errors import (
    EXIT_OK,
    EXIT_STOPPED,
    EnvironmentProblem,
    OutputError,
    UsageError,
    broken,
)
from mpipar.ops.timed_ops import TimedOps
from mpipar.pipeline.check import check
from mpipar.run import checks, resume
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.state import Saver
from mpipar.run.console import tables as console
from mpipar.run.console.metrics import Metrics, PeakMemory
from mpipar.run.console.output import (
    SECONDS,
    Events,
    GrowingFile,
    Log,
    tensorboard_problems,
    watched,
)
from mpipar.run.data import parts, rows
from mpipar.run.data.tokenizer import BYTE_VOCABULARY
from mpipar.run.files.settings import to_toml
from mpipar.run.folder import (
    CHECKPOINTS,
    EVALUATIONS,
    LOG,
    METRICS,
    WEIGHTS,
    Sources,
    folder_problems,
    keep,
    truncate_after,
    write_result,
)
from mpipar.run.generation import Sampling, continue_one
from mpipar.run.process.environment import host_name
from mpipar.run.replicas import Replicas
from mpipar.run.resolve import Inputs, compare_inputs
from mpipar.run.trace.tracer import Tracer
from mpipar.train.build import configured_schedule
from mpipar.train.worker import StepVotes, Worker


class Run:
    """One training run of one rank.

    Every rank calls all methods, in the order in which they are defined.
    """

    def __init__(self, session):
        self.session, self.world, self.recorder = session, session.start(), Recorder()
        self.files = ExitStack()  # closes the files of the run folder

    def with_saved_settings(self, parsed):
        """Find what the run starts from; return the flags together with its saved settings.

        Comm: agreements, and that of `resume.agreed_start`.
        """
        self.start = resume.agreed_start(self.session, parsed.config.run)
        return self.session.agree(
            lambda: resume.with_saved_settings(parsed, self.start, self.world.size)
        )

    def prepare(self, parsed, machine_path) -> bool:
        """Check all that can be checked, create the run folder, and open its log.txt.

        machine_path: of a data sheet that is said to have chosen the layout.
        Return False if --resume names a run that has ended, so that there is nothing to do.
        Comm: agreements, and that of the functions of `resume`.
        """
        session, world, start = self.session, self.world, self.start
        first = next(iter(start.candidates), "")
        known = [
            (partial(resume.start_problems, start), UsageError),
            (tensorboard_problems, EnvironmentProblem),
            # World rank 0 alone checks the disk.
            *[(folder_problems, UsageError)] * (world.rank == 0 and start.folder is None),
        ]
        inputs = session.agree(
            lambda: Inputs(
                parsed,
                world.size,
                session.host_rank,
                known,
                first,
                machine_path,
            )
        )
        if 0 < inputs.config.train.steps <= start.finished:
            if world.rank == 0:
                print(
                    f"{start.folder}: this run ended with step {start.finished}; nothing is left"
                    " to do. For more steps, add --steps"
                )
            return False
        self.inputs, self.config = inputs, inputs.config
        self.fingerprint, digest = compare_inputs(session, inputs, first)
        session.agree(lambda: resume.check_begin(start, self.fingerprint, digest))
        sources = Sources(self.config.run.init_from or "", digest, first, self.fingerprint)
        self.grid = Grid.of(self.config.grid, world.rank)
        self.folder = resume.agreed_folder(session, start, inputs, sources)
        session.use_folder(self.folder)
        self.log = Log(world.rank, *self.opened(LOG))
        return True

    def opened(self, name) -> list[GrowingFile]:
        """Return a file of the run folder for appending, on world rank 0; none elsewhere."""
        if self.world.rank > 0:
            return []
        return [self.files.enter_context(closing(GrowingFile(self.folder, name)))]

    def describe(self, predicted) -> None:
        """Print layout and memory, before anything is allocated.

        predicted: a step on shapes of this rank. Comm: an agreement, and a gather over the world.
        """
        session, config, grid, log = self.session, self.config, self.grid, self.log
        self.schedule = schedule = configured_schedule(config.grid)
        # One proof covers all ranks: a schedule that could deadlock never starts.
        session.agree(lambda: check(schedule) if grid.world_rank == 0 else None)
        # The ring has room for two whole steps, so that it still holds what led to a failure.
        self.recorder.resize(2 * (len(predicted.recorder.records) + len(predicted.recorder.spans)))
        self.fact = console.holding(config, schedule, predicted, host_name(os.environ))
        facts = gather_objects(self.world, self.fact | {"cores": len(os.sched_getaffinity(0))})
        if not facts:
            return
        hosts = [one["host"] for one in facts]
        headline = console.headline(config, len(facts), len({*hosts}), schedule.num_stages)
        self.told = {"ranks": facts, "headline": headline}
        log(headline)
        trace, done = config.run.trace, self.start.step
        missed = broken(
            (
                (trace_steps(trace) or (done + 1,))[0] <= done,
                f"--trace {trace}: the run resumes after step {done}: nothing is traced",
            )
        )
        notes = [*self.start.notes, *missed, *self.inputs.notes]
        for note in filter(None, (*notes, console.short_warm_up(config.train), session.held.note)):
            log(one_line(note))
        log(console.holdings(facts))
        if note := console.crowded(hosts, [one["cores"] for one in facts]):
            log(f"\n{note}")

    def allocate(self) -> None:
        """Create the worker and its weights, data, metrics, tracer and saver.

        Comm: the worker's groups; that of `restore` and of a new `Saver`.
        """
        config, ops, recorder = self.config, self.inputs.ops, self.recorder
        self.memory = PeakMemory(ops)
        if config.train.steps:
            self.memory.start()
        timed_ops = TimedOps(ops, recorder) if trace_steps(config.run.trace) else None
        self.worker = Worker(config, self.grid, timed_ops or ops, recorder, self.world)
        if carriers := self.worker.comms.carriers:
            self.log(f"messages are carried by {' and '.join(carriers)}")
        self.replicas = Replicas(self.worker)
        self.rows = rows.Rows(ops, self.inputs.train_part, config, self.grid)
        self.first = self.restore() + 1
        traced = traced_steps(config.run.trace, self.first, config.train.steps)
        self.tracer = Tracer(self.worker, self.world, self.folder, traced, timed_ops)
        metrics, self.evaluations = self.opened(METRICS), self.opened(EVALUATIONS)
        self.growing = [*metrics, *self.evaluations]
        if config.run.tensorboard and self.log.speaks:
            events = self.files.enter_context(closing(Events(self.folder, self.first)))
            metrics, self.evaluations = [*metrics, events], [*self.evaluations, events]
        self.metrics = Metrics(
            recorder,
            self.worker.comms.groups,  # the same on every rank, even if it is alone in one
            self.worker.num_tokens,
            metrics,
        )
        held_out = parts.evaluated(self.inputs.held_out, config)
        self.held_out = rows.Rows(self.worker.ops, held_out, config, self.grid)
        self.saver = Saver(
            self.worker,
            self.folder / CHECKPOINTS,
            keep=config.run.keep_checkpoints,
            background=config.run.save_async,
            facts={"config": to_toml(config), "data": self.fingerprint},
            ready=self.keep_folder,
            **({"watch": partial(watched, "checkpoint")} if self.log.speaks else {}),
        )
        if self.start.folder and self.start.candidates:
            self.saver.saved = self.first - 1  # this folder already has that checkpoint
        if config.run.init_from or self.start.candidates:
            self.check_replicas(self.first - 1, True)
        recorder.reset_counters()
        self.metrics.skip()

    def restore(self) -> int:
        """Give the worker the state that the run starts with; return the number of steps done.

        Comm: that of `resume.load_newest`.
        """
        session, worker, start = self.session, self.worker, self.start
        done = 0
        if start.candidates:
            done = resume.load_newest(session, worker, start, self.log)
        elif self.config.run.init_from:
            session.agree(lambda: checkpoint.load(worker, self.config.run.init_from))
        else:
            worker.initialize()
        if start.folder is not None:
            for note in session.agree(
                lambda: truncate_after(self.folder, done) if self.log.speaks else []
            ):
                self.log(note)
        return done

    def loop(self) -> None:
        """Take, report and save the remaining steps; every rank leaves at the same step.

        Comm: that of a training step, `Tracer`, `Metrics` and `Saver`; one gather for the report.
        """
        steps = self.config.train.steps
        start, self.stopped, self.last = perf_counter(), False, self.first - 1
        self.shown = start
        self.durations: list[float] = []
        with self.log.steps(self.first - 1, steps):
            for step in range(self.first, steps + 1):
                self.take(step)
                if self.stopped:
                    break
        self.seconds = perf_counter() - start
        if self.tracer.finish():
            self.log(
                f"\nthe trace of {len(self.tracer.steps)} steps is in {self.folder / 'trace'};"
                f" see it with: mpipar trace {self.folder}"
            )
        if count := self.replicas.count:
            each = self.replicas.seconds / count * 1e3
            self.log(
                "all copies of tensors were equal: compared"
                f" {counted(count, 'time')}, {each:.1f} ms each"
            )

    def take(self, step: int) -> None:
        """Take a step, report it, and evaluate and save after it where that is due."""
        session, steps = self.session, self.config.train.steps
        session.where = lambda: f"step {step}"
        with self.tracer.step(step):
            result = checks.train_step(
                self.worker,
                step,
                lambda mb: self.rows.train(step, mb),
                lambda: StepVotes(
                    session.stop_requested, session.save_requested, self.saver.written()
                ),
            )
        self.last = step
        self.show_step(result)
        self.check_replicas(step, step == steps or result.votes.stop)
        every = self.config.run.eval_interval
        if every and step % every == 0 and step < steps:
            session.where = lambda: f"evaluation after step {step}"
            self.evaluate(step)  # before a stop too: a resumed run starts after it
        self.stopped = result.votes.stop
        session.where = lambda: f"step {step}"
        if step < steps and not self.stopped:
            self.save_after(step, result.votes)

    def show_step(self, result) -> None:
        """Record a step, and print it if it is time to. Comm: that of `Metrics.flush`."""
        step, steps, run = result.step, self.config.train.steps, self.config.run
        self.metrics.add(result)
        stops = step == steps or result.votes.stop
        if not self.memory.after_step(stops):  # a step whose memory is watched takes longer
            self.durations = [*self.durations[-50:], result.step_seconds]
        seconds = median(self.durations or [result.step_seconds])
        line, now = [], perf_counter()
        if step % run.log_interval == 0 or step == self.first or stops:
            line = self.flush()[-1:]
        elif self.log.speaks and now - self.shown >= SECONDS:
            line = [self.metrics.newest()]  # without asking the other ranks for theirs
        if line:
            self.log.step(console.step_line(steps, line[0], seconds), stops)
            self.shown = now
        speed = console.short_count(self.worker.num_tokens / seconds)
        self.log.status(f"loss {result.loss:.4f}, {speed} tok/s")

    def check_replicas(self, step, now) -> None:
        """Compare all replicas of tensors every --check-replicas steps, and if `now` is true.

        That is after loading, and before the last save. Comm: see `Replicas.check`.
        """
        every, outer = self.config.run.check_replicas, self.worker.outer
        if every and (
            now  # or where all ranks share weights, if a multiple of `every` is not further back
            or (self.worker.meets(step) and step % every < outer.interval)
        ):
            self.replicas.check(step)
            self.metrics.skip()

    def flush(self) -> list[dict]:
        """Write the lines of metrics that are due, report skipped steps, and return the lines.

        Comm: that of `Metrics.flush`.
        """
        lines = self.metrics.flush(self.worker.comms.mpi_inner)
        for line in lines:
            if line.get("skipped"):
                self.log(
                    f"step {line['step']}: a gradient overflowed in float16; every rank skipped the"
                    f" update, loss scale {line['loss_scale']:g} -> {line['loss_scale'] / 2:g}"
                )
        return lines

    def evaluate(self, step: int) -> tuple[float, int]:
        """Return (mean held-out loss, number of tokens); evaluations.jsonl gets them too.

        The loss depends on the weights alone, and nothing changes that a step reads.
        Comm: that of `checks.evaluate`.
        """
        start = perf_counter()
        loss, count = checks.evaluate(self.worker, self.held_out)
        seconds = perf_counter() - start
        line = {"step": step, "held_out_loss": loss, "tokens": count, "seconds": seconds}
        for file in self.evaluations:
            file.add(line)
        if step < self.config.train.steps:
            self.log(
                f"step {step}: held-out loss {loss:.4f} nats per token over {count:,}"
                f" tokens, {seconds:.2f} s"
            )
        self.metrics.skip()
        return loss, count

    def save_after(self, step: int, votes) -> None:
        """Commit what all ranks have written, and save if it is time or a rank asks for it.

        Comm: that of `attempt`.
        """
        every = self.config.run.save_interval
        due = votes.save or (every and step % every == 0)
        if not (due or votes.written):
            return
        with self.recorder.at("save"):
            if votes.written:
                self.attempt(self.saver.commit)
            if due:
                self.attempt(lambda: self.save(step))
        self.session.save_requested = self.session.save_requested and not votes.save
        self.metrics.skip()

    def attempt(self, function) -> None:
        """Call a function that commits a save, and print what it has cost.

        If it fails, all ranks warn, and the next save tries again.
        """
        saver, before, blocked = self.saver, self.saver.saved, self.saver.blocked_seconds
        try:
            function()
        except OutputError as error:
            self.log(f"WARNING: {error}; the next save tries again")
        if saver.saved != before:  # beside training, a later save may have begun, and blocked too
            cost = blocked if self.config.run.save_async else saver.blocked_seconds
            self.log(f"saved step {saver.saved}: {cost:.2f} s blocked")

    def save(self, step: int) -> None:
        """Save the whole state; with --save-async it is written while the next steps run.

        All lines so far are written first, so that what precedes a checkpoint never needs its steps
        repeated, and weights that are not finite are refused.
        Raises OutputError on every rank. Comm: that of `flush`, `check_weights` and `Saver`.
        """
        self.flush()
        checks.check_weights(self.worker, self.last)
        self.saver.save(step)

    def keep_folder(self) -> None:
        """Sync all lines to disk, in a folder that is still this run's. World rank 0 only."""
        for note in keep(self.folder, self.session.held, (self.log.file, *self.growing)):
            self.log(note)

    def save_last(self) -> None:
        """Write checkpoint and weights; when any rank returns, they are on disk.

        A run of no steps has the weights that it was given, and writes none.
        Comm: that of `save`; see `checkpoint.stream`; a barrier over the world.
        """
        if self.last == 0:
            return

        def save_state():
            self.attempt(self.saver.commit)
            if self.saver.saved != self.last:
                start = perf_counter()
                self.save(self.last)
                self.saver.commit()  # one beside training has only begun
                self.log(f"\nsaved step {self.last}: {perf_counter() - start:.2f} s blocked")

        with self.recorder.at("save"):
            self.session.agree(save_state)
            checkpoint.save(self.worker, self.folder / WEIGHTS)
            self.worker.comms.world.barrier("save.written")
        self.session.saved = str(self.folder / WEIGHTS)  # a signal from here on loses nothing

    def written_bytes(self) -> int:
        """Return, for the watchdog, the bytes of checkpoint and weights written so far.

        They grow on a slow disk even while this rank waits for another one.
        """
        with suppress(OSError):  # a file may be renamed at this moment
            places = ("checkpoints/*.partial-*/*", f"{WEIGHTS}/*")
            return sum(file.stat().st_size for one in places for file in self.folder.glob(one))
        return 0

    def finish(self) -> int:
        """Show the results, and leave MPI; return the exit code.

        Comm: forward passes, that of leave_mpi().
        """
        steps = self.config.train.steps
        if self.stopped:
            self.state = f"stopped on request after step {self.last} of {steps}"
            self.last_words = (
                f"stopped on request after step {self.last}; checkpoint and weights are in"
                f" {self.folder}; resume with --resume auto --out {self.folder}"
            )
            return self.session.leave_mpi(EXIT_STOPPED)
        self.session.where = lambda: "evaluation"
        if self.session.stop_requested:  # too late for a step: during the last save
            self.session.fail(KeyboardInterrupt("stopped on request"))
        loss, count = self.evaluate(self.last)
        found, trained = f"{loss:.4f} nats per token over {count:,} tokens", ""
        if steps:
            after = f", after step {self.first - 1}" if self.first > 1 else ""
            trained = (
                f" (trained on {self.worker.num_tokens * steps:,} tokens{after}"
                f" in {self.seconds:.1f} s)"
            )
        self.log(f"\nheld-out loss {found}{trained}")
        self.show_text()
        if self.log.speaks:
            self.keep_folder()
            write_result(self.folder, {"step": self.last, "held_out_loss": loss})
        code = self.session.leave_mpi(EXIT_OK)
        if self.log.speaks:
            self.compare_with_bigrams(loss, count)
        self.state = f"ended after step {self.last}"
        weights = "weights, checkpoints, " if self.last else ""
        self.last_words = (
            f"{weights}metrics, report.html, config.toml and log.txt are in {self.folder}"
        )
        return code

    def show_text(self) -> None:
        """Print text that continues the prompt. Comm: generation."""
        run, prompt, tokenizer = self.config.run, self.inputs.prompt, self.inputs.tokenizer
        if run.sample_tokens:
            stop = () if tokenizer.end is None else (tokenizer.end,)
            sampling = Sampling(run.sample_tokens, TEMPERATURE, run.seed, stop=stop)
            text = [*prompt, *continue_one(self.worker, prompt, sampling)]
            self.log(f"\ntext generated from {tokenizer.decode(prompt)!r}:")
            self.log(quoted(tokenizer.decode(text)))

    def compare_with_bigrams(self, loss: float, count: int) -> None:
        """Print the loss of a bigram model of bytes on the same split, beside that of the decoder.

        It takes long for much text, so no rank may wait for it.
        """
        inputs, vocab_size = self.inputs, self.config.model.vocab_size
        # With more ids, a table of pairs would fill the memory.
        if inputs.tokenizer.is_bytes and vocab_size <= BYTE_VOCABULARY:
            bar = parts.bigram_loss(inputs.train_part, inputs.held_out[: count + 1], vocab_size)
            self.log(
                f"\nbyte-bigram model of the same split: {bar:.4f}; the decoder is"
                f" {abs(bar - loss):.4f} nats {'better' if loss < bar else 'worse'}"
            )
