"""Sampling the next token: the most likely one, or one drawn from the most likely.

No rank ever sees all logits. Each rank offers the largest in its part of the vocabulary, and the
largest of these are the same on every layout. A draw is a pure function of them and of (seed,
number of the prompt, position), so every layout draws the same text.
"""

from typing import NamedTuple

import numpy as np


class Sampling(NamedTuple):
    """Sampling parameters.

    num_tokens: the most that are added. temperature: 0 takes the most likely token. top_k: draw
    only from this many of the most likely. top_p: of these, only the first that add up to this
    probability. stop: ids that end a text.
    """

    num_tokens: int
    temperature: float = 0.0
    seed: int = 0
    top_k: int = 50
    top_p: float = 1.0
    stop: tuple[int, ...] = ()

    @property
    def candidates(self) -> int:
        """How many of the most likely tokens a choice considers."""
        return self.top_k if self.temperature > 0 else 1


def best(worker, logits, count: int) -> np.ndarray:
    """Return the `count` largest of each row of logits (N, V/tp) with ids: (N, count, 2), on host.

    The largest comes first; of equal ones the lowest id does, as the first rank has the lowest ids.
    Comm: one all_gather of 2 * count numbers per row over tp.
    """
    ops, loss = worker.ops, worker.stages[worker.schedule.num_stages - 1].loss
    offers = ops.top_forward(logits, loss.start, loss.vocab_size, min(count, loss.vocab_size))
    offers = ops.to_host(worker.comms["tp"].all_gather(offers, "best"))  # (tp, N, count, 2)
    if len(offers) == 1:
        return offers[0]
    merged = np.concatenate(list(offers), axis=1)
    order = np.argsort(-merged[..., 0], axis=1, kind="stable")[:, : offers.shape[2], None]
    order[np.isnan(merged[..., 0]).any(axis=1)] = 0  # that row has no largest
    return np.take_along_axis(merged, order, axis=1)


def draw(candidates: np.ndarray, sampling: Sampling, number: int, position: int) -> float:
    """Return the id of a prompt's next token from candidates (count, 2).

    NaN if the largest logit is not a finite number.

    number: of the prompt. position: of the new token in its text.
    """
    values, ids = candidates.T
    if not np.isfinite(values[0]):
        return np.nan
    if len(ids) == 1:
        return ids[0]
    reached = np.cumsum(np.exp((values - values[0]) / sampling.temperature))
    reached /= reached[-1]
    kept = reached[: 1 + np.searchsorted(reached, sampling.top_p)]
    philox = np.random.Philox(key=sampling.seed, counter=[0, position, number, 1])
    chance = np.random.Generator(philox).random() * kept[-1]
    return ids[np.searchsorted(kept, chance, side="right")]
