"""What a run shows at its end: measured barriers, overlap and memory, a text, a baseline."""

from __future__ import annotations

from mpipar.comm.facts import gather_facts
from mpipar.comm.record import POINT_TO_POINT
from mpipar.config.run import TEMPERATURE
from mpipar.run.console import tables as console
from mpipar.run.console.memory import process_peak
from mpipar.run.console.time_shares import share_facts, share_table
from mpipar.run.data.bigram import bigram_loss
from mpipar.run.data.tokenizer import BYTE_VOCABULARY
from mpipar.run.files.text import quoted
from mpipar.run.inference.generate import continue_one
from mpipar.run.inference.sampling import Sampling
from mpipar.study.schedules.bubble import bubble_rows, bubble_table, recorded_facts
from mpipar.study.trace.flight import flight_ns


def report_step(world, worker, fact, memory, steps, log) -> str:
    """Print a step's measured overlap, shares and memory; return its barriers, on world rank 0.

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
        "buckets_ns": flight_ns(
            worker.recorder, worker.comms["data"].axis, ("all_reduce", "reduce_scatter")
        ),
        "ring_ns": flight_ns(worker.recorder, "tp", POINT_TO_POINT),
        "measured": memory.peak,
        "objects": memory.objects,
        "process": process_peak(),
        "pp_rank": worker.grid.place("pp"),
        "spans": recorded_facts(worker.recorder),
        "shares": share_facts(worker.recorder),
    }
    facts = gather_facts(world, fact)
    if facts:
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
        log("\nmemory per rank, peak of a step:")
        log(console.measured_memory(facts))
        return console.barriers([fact["counters"] for fact in facts], steps)
    return ""


def compare_with_bigrams(inputs, loss: float, count: int, log) -> None:
    """Print the loss of a bigram model of bytes on the same split, beside that of the decoder.

    It takes long for much text, so no rank may wait for it.
    """
    vocab_size = inputs.config.model.vocab_size
    # With more ids, a table of pairs would fill the memory.
    if inputs.tokenizer.is_bytes and vocab_size <= BYTE_VOCABULARY:
        bar = bigram_loss(inputs.train_part, inputs.held_out[: count + 1], vocab_size)
        log(
            f"\nbyte-bigram model of the same split: {bar:.4f}; the decoder is"
            f" {abs(bar - loss):.4f} nats {'better' if loss < bar else 'worse'}"
        )


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
