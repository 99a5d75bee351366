"""What a run shows at its end: a text of the model, and a baseline for its loss."""

from __future__ import annotations

from mpipar.config.run import TEMPERATURE
from mpipar.config.text import quoted
from mpipar.run.data.bigram import bigram_loss
from mpipar.run.data.tokenizer import BYTE_VOCABULARY
from mpipar.run.inference.generate import continue_one
from mpipar.run.inference.sampling import Sampling


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
