"""A byte-bigram model, which knows only the last byte: the bar for a trained model."""

from __future__ import annotations

import numpy as np

PSEUDO_COUNTS = (1.0, 0.3, 0.1, 0.03, 0.01)


def bigram_loss(train, held_out, vocab_size: int) -> float:
    """Mean loss of a bigram model on the held-out part, in nats per byte.

    The bigrams are counted on the training part. Each row of counts is smoothed with `pseudo *
    unigram`. Of a few pseudo counts, the best *on the held-out part* is taken. So the bar is as
    high as this kind of model can put it.
    """
    train, held_out = np.asarray(train), np.asarray(held_out)
    pairs = np.bincount(
        train[:-1].astype(np.int64) * vocab_size + train[1:], minlength=vocab_size**2)
    pairs = pairs.reshape(vocab_size, vocab_size).astype(np.float64)
    unigram = (pairs.sum(0) + 1) / (pairs.sum() + vocab_size)
    losses = []
    for pseudo in PSEUDO_COUNTS:
        smooth = pairs + pseudo * vocab_size * unigram
        probability = smooth / smooth.sum(1, keepdims=True)
        losses.append(-np.log(probability[held_out[:-1], held_out[1:]]).mean())
    return float(min(losses))
