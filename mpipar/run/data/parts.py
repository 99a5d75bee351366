"""The two parts of the text, to train on and held out, and the loss of the simplest model of it."""

import numpy as np

from mpipar.errors import DataError
from mpipar.run.data.source import load_source
from mpipar.run.data.token_file import BLOCK

HELD_OUT = 10  # one part in ten is held out
PSEUDO_COUNT = 0.1  # of the bigram model; the best of 1, 0.3, ..., 0.01 on the built-in text


def split(tokens, seq_len: int):
    """Return the training part and the held-out part: the last tenth, but at least one row."""
    held_out = max(len(tokens) // HELD_OUT, seq_len + 1)
    return tokens[:-held_out], tokens[-held_out:]


def load(config, thorough: bool = True):
    """Return ((training part, held-out part), a description of them).

    The held-out part is --val-data, else what the data itself holds out, else its last tenth.
    thorough: see `load_source`. Raises DataError if the text cannot be used.
    """
    run, model = config.run, config.model
    source = load_source(run.data, model.vocab_size, thorough)
    tokens, held_out, what = source.tokens, source.held_out, source.what
    if tokens is None:
        raise DataError(
            f"--data {run.data[0]}: is held out, as its name says, so there is nothing"
            " to train on; give training files too, or another name"
        )
    if run.val_data:
        other = load_source(run.val_data, model.vocab_size, thorough)
        held_out = other.tokens if other.held_out is None else other.held_out
        what = f"{what}; held out: {other.what}"
        if (tokens.dtype == np.uint8) != (held_out.dtype == np.uint8):
            raise DataError("--val-data: either it or --data is text, the other tokens")
        if source.tokenizer and other.tokenizer not in ("", source.tokenizer):
            raise DataError(
                "--val-data: its tokens were made by another tokenizer than --data's; prepare"
                f" it with --tokenizer {run.data[0]}"
            )
    if held_out is None:
        tokens, held_out = split(tokens, model.seq_len)
    if min(len(tokens), len(held_out)) <= model.seq_len:
        raise DataError(
            f"the data has fewer than one row to train on or to hold out: {len(tokens):,} and"
            f" {len(held_out):,} tokens, but a row needs {model.seq_len} + 1; give more data, or a"
            " smaller --seq-len"
        )
    return (tokens, held_out), what


def evaluated(part, config):
    """Return what evaluations read of the held-out part: the rows that --eval-tokens reaches."""
    tokens, seq_len = config.run.eval_tokens, config.model.seq_len
    return part if tokens is None else part[: -(-tokens // seq_len) * seq_len + 1]


def bigram_loss(train, held_out, vocab_size: int) -> float:
    """Return the mean loss of a bigram model on the held-out part, in nats per byte.

    The model sees only the previous byte: the baseline for a trained one. Bigrams are counted on
    the training part, and each row of counts is smoothed with a share of the unigram.
    """
    pairs, wanted = (_pairs(part, vocab_size) for part in (train, held_out))
    unigram = (pairs.sum(0) + 1) / (pairs.sum() + vocab_size)
    smooth = pairs + PSEUDO_COUNT * vocab_size * unigram
    probability = smooth / smooth.sum(1, keepdims=True)
    return float(-(wanted * np.log(probability)).sum() / wanted.sum())


def _pairs(tokens, vocab_size: int) -> np.ndarray:
    """Return how often each token follows each other (V, V), reading the text in blocks."""
    counts = np.zeros(vocab_size**2)
    for first in range(0, len(tokens) - 1, BLOCK):
        block = np.asarray(tokens[first : first + BLOCK + 1]).astype(np.int64)
        counts += np.bincount(block[:-1] * vocab_size + block[1:], minlength=vocab_size**2)
    return counts.reshape(vocab_size, vocab_size)
