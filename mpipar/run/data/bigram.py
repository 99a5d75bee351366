"""A byte-bigram model, which sees only the previous byte: the baseline for a trained model."""

import numpy as np

from mpipar.run.data.token_file import BLOCK

PSEUDO_COUNTS = (1.0, 0.3, 0.1, 0.03, 0.01)


def bigram_loss(train, held_out, vocab_size: int) -> float:
    """Return the mean loss of a bigram model on the held-out part, in nats per byte.

    Bigrams are counted on the training part, and each row of counts is smoothed with `pseudo *
    unigram`. Of several pseudo counts, the best one *on the held-out part* is taken, so that the
    baseline is as strong as this kind of model can make it.
    """
    pairs, wanted = (_pairs(part, vocab_size) for part in (train, held_out))
    unigram = (pairs.sum(0) + 1) / (pairs.sum() + vocab_size)
    losses = []
    for pseudo in PSEUDO_COUNTS:
        smooth = pairs + pseudo * vocab_size * unigram
        probability = smooth / smooth.sum(1, keepdims=True)
        losses.append(-(wanted * np.log(probability)).sum() / wanted.sum())
    return float(min(losses))


def _pairs(tokens, vocab_size: int) -> np.ndarray:
    """Return how often each token follows each other (V, V), reading the text in blocks."""
    counts = np.zeros(vocab_size**2)
    for first in range(0, len(tokens) - 1, BLOCK):
        block = np.asarray(tokens[first : first + BLOCK + 1]).astype(np.int64)
        counts += np.bincount(block[:-1] * vocab_size + block[1:], minlength=vocab_size**2)
    return counts.reshape(vocab_size, vocab_size)
