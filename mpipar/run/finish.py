"""Evaluation between steps, and the reports at the end of training.

Between steps a run computes held-out losses; at the end it also generates a text, and reports
measured barriers, overlap and memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from time import perf_counter

from mpipar.comm.facts import gather_facts
from mpipar.comm.record import POINT_TO_POINT
from mpipar.config.run import TEMPERATURE
from mpipar.console import tables as console
from mpipar.console.memory import process_peak
from mpipar.console.time_shares import crowded, share_facts, share_table
from mpipar.data import rows
from mpipar.data.bigram import bigram_loss
from mpipar.data.tokenizer import BYTE_VOCABULARY
from mpipar.files.text import quoted
from mpipar.inference.generate import continue_one
from mpipar.inference.sampling import Sampling
from mpipar.study.schedules.bubble import bubble_rows, bubble_table, recorded_facts


class Evaluation:
    """The held-out losses of one run; every rank calls it at the same step.

    They depend on the weights alone, and change nothing that a step reads. file: the
    `GrowingFile` evaluations.jsonl on world rank 0, None elsewhere. events: `Events` or None.
    """

    def __init__(self, worker, inputs, log, file=None, events=None):
        self.worker, self.inputs, self.log = worker, inputs, log
        self.file, self.events = file, events
        self.run, self.steps = worker.config.run, worker.config.train.steps
        self.rows = rows.Rows(
            worker.ops, rows.evaluated(inputs.held_out, worker.config), worker.config, worker.grid
        )

    def after_step(self, step: int) -> bool:
        """Evaluate if it is time; return whether it was.

        The last step is skipped, because the end of the run evaluates.
        Comm: that of `loss`.
        """
        every = self.run.eval_interval
        if evaluates := every and step % every == 0 and step < self.steps:
            start = perf_counter()
            loss, count = self.loss(step)
            self.log(
                f"step {step}: held-out loss {loss:.4f} nats per token over {count:,}"
                f" tokens, {perf_counter() - start:.2f} s"
            )
        return bool(evaluates)

    def loss(self, step: int) -> tuple[float, int]:
        """Return (mean held-out loss, number of tokens); evaluations.jsonl gets them too.

        Comm: that of `Worker.evaluate`.
        """
        start = perf_counter()
        loss, count = self.worker.evaluate(self.rows)
        line = {
            "step": step,
            "held_out_loss": loss,
            "tokens": count,
            "seconds": perf_counter() - start,
        }
        if self.file is not None:
            self.file.write(json.dumps(line) + "\n")
        if self.events is not None:
            self.events.add(line)
        return loss, count


def report_step(world, worker, fact, memory, steps, log) -> None:
    """Print a step's measured barriers, overlap and memory.

    fact: what this rank reported before the run. memory: `PeakMemory` of the first steps. steps:
    number of steps.
    Comm: one gather over the world.
    """
    worker.settle()
    fact = fact | {
        "counters": [
            [*key, *counter]
            for key, counter in worker.recorder.counters.items()
            if key.phase in ("F", "I", "recompute", "W", "sync", "opt")
        ],
        "buckets_ns": worker.recorder.flight_ns(
            worker.comms["data"].axis, ("all_reduce", "reduce_scatter")
        ),
        "ring_ns": worker.recorder.flight_ns("tp", POINT_TO_POINT),
        "measured": memory.peak,
        "objects": memory.objects,
        "process": process_peak(),
        "pp_rank": worker.grid.place("pp"),
        "spans": recorded_facts(worker.recorder),
        "shares": share_facts(worker.recorder),
        "cores": len(os.sched_getaffinity(0)),
    }
    facts = gather_facts(world, fact)
    if facts:
        log("\nbarriers of a step, by name (calls and bytes summed over ranks):")
        log(console.barriers([fact["counters"] for fact in facts], steps))
        sums = f"gradient {'reduce-scatter' if worker.config.memory.zero else 'all-reduce'}"
        overlaps = [
            console.overlap(name, [fact[key] for fact in facts])
            for name, key in ((sums, "buckets_ns"), ("messages of tp", "ring_ns"))
        ]
        log("\n" + (overlaps[0] or f"{sums}: none (dp 1)"))
        if overlaps[1]:
            log(overlaps[1])
        log("\nshares of a step:")
        log(share_table([fact["shares"] for fact in facts], [fact["place"] for fact in facts]))
        if worker.grid.size("pp") > 1:
            shares = bubble_rows(
                [fact["spans"] for fact in facts],
                [fact["pp_rank"] for fact in facts],
                worker.schedule,
            )
            log(
                f"\nbusy share and bubble of {worker.schedule.name},"
                " simulated from the measured passes:"
            )
            log(bubble_table(shares))
            note = crowded([fact["host"] for fact in facts], [fact["cores"] for fact in facts])
            if note:
                log(note)
        log("\nmemory per rank, peak of a step:")
        log(console.measured_memory(facts))


def show_decoder(worker, inputs, evaluate, log, took) -> tuple[dict, Callable]:
    """Print the held-out loss and a text; return what was measured, and `compare`.

    evaluate() -> (loss, tokens). took: how long training took, as text. compare(): prints the loss
    of a bigram model, which takes long for much text, so no rank may wait for it.
    Comm: that of evaluate(), generation.
    """
    config = worker.config
    loss, count = evaluate()
    trained = worker.num_tokens * config.train.steps
    log(
        f"\nheld-out loss {loss:.4f} nats per token over {count:,} tokens"
        + (f" (trained on {trained:,} tokens{took})" if trained else "")
    )
    show_text(worker, inputs, log)

    def compare():
        # With more ids, a table of pairs would fill the memory.
        vocab_size = config.model.vocab_size
        if log.speaks and inputs.tokenizer.is_bytes and vocab_size <= BYTE_VOCABULARY:
            bar = bigram_loss(inputs.train_part, inputs.held_out[: count + 1], vocab_size)
            log(
                f"\nbyte-bigram model of the same split: {bar:.4f}; the decoder is"
                f" {abs(bar - loss):.4f} nats {'better' if loss < bar else 'worse'}"
            )

    return {"held_out_loss": loss}, compare


def show_text(worker, inputs, log) -> None:
    """Print text that continues the prompt. Comm: generation."""
    run, decode = worker.config.run, inputs.tokenizer.decode
    if run.sample_tokens:
        prompt = inputs.prompt or [int(token) for token in inputs.held_out[:1]]
        end = inputs.tokenizer.end
        sampling = Sampling(
            run.sample_tokens, TEMPERATURE, run.seed, stop=() if end is None else (end,)
        )
        text = list(continue_one(worker, prompt, sampling))
        log(f"\ntext generated from {decode(prompt)!r}:")
        log(quoted(decode([*prompt, *text])))
