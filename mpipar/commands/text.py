"""What a decoder shows at the end: held-out loss beside a bigram model's, and a text of its own."""

from __future__ import annotations

from mpipar.data.bigram import bigram_loss
from mpipar.data.rows import Rows
from mpipar.data.source import BYTE_VOCABULARY
from mpipar.inference.generate import decode, generate

UNIT = "tok"


def finish(worker, inputs, log, seconds) -> None:
    """Evaluate, and generate. Comm: forward passes."""
    evaluate(worker, inputs, log, seconds)
    show_text(worker, inputs, log)


def evaluate(worker, inputs, log, seconds) -> None:
    """Held-out loss beside the bigram model's. Comm: forward passes over the held-out part."""
    config, held_out = worker.config, inputs.held_out
    rows = Rows(worker.ops, held_out, config, worker.grid)
    loss, count = worker.evaluate(rows)
    trained = worker.num_tokens * config.train.steps
    log(f"\nheld-out loss {loss:.4f} nats per token over {count:,} tokens"
        f" (trained on {trained:,} tokens in {seconds:.1f} s)")
    vocab_size = config.model.vocab_size
    if log.speaks and vocab_size <= BYTE_VOCABULARY:
        bar = bigram_loss(inputs.train_part, held_out[:count + 1], vocab_size)
        log(f"byte-bigram model of the same split: {bar:.4f}; the decoder is"
            f" {abs(bar - loss):.4f} nats {'better' if loss < bar else 'worse'}")


def show_text(worker, inputs, log) -> None:
    """Text that continues the prompt. Comm: generation."""
    run, vocab_size = worker.config.run, worker.config.model.vocab_size
    if run.sample_tokens:
        prompt = inputs.prompt or [int(token) for token in inputs.held_out[:1]]
        text = list(generate(worker, prompt, run.sample_tokens, run.temperature, run.seed))
        log(f"\ntext generated from {decode(prompt, vocab_size)!r}:")
        log(decode([*prompt, *text], vocab_size))
