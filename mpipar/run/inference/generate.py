"""Text generation, token by token, through the pipeline and cut layers that train the model.

Prompts are distributed over groups, which are the microbatches of the pipeline. A first round of
forward passes reads the prompts (prefill); each further round reads one token of every text
(decode), with keys and values of earlier tokens in the cache (layers/parallel/kv_cache.py).
Letters: B rows of a group, T new tokens in a round.

No rank ever sees all logits. Each rank offers the largest in its part of the vocabulary, and the
largest of these are the same on every layout. A draw is a pure function of them and of (seed,
number of the prompt, position), so every layout draws the same text.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpipar.errors import NonFiniteError
from mpipar.layers.parallel.kv_cache import KVCache
from mpipar.layers.stash import Batch
from mpipar.train.gradsync import all_reduce_scalars

# Why a text has ended.
LENGTH, STOP, FULL = "length", "stop", "seq_len"


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


@dataclass(eq=False)
class Text:
    """A prompt and its continuation so far.

    number: of the prompt; draws depend on it. end: why the text has ended, "" until then.
    """

    number: int
    tokens: list[int]
    end: str = ""

    def room(self, sampling: Sampling, seq_len: int) -> int:
        """Return how many tokens may follow: the model reads seq_len, and one follows the last."""
        return min(sampling.num_tokens, seq_len + 1 - len(self.tokens))


class Group:
    """The texts that pass through the pipeline as one microbatch.

    texts: of all replicas. rows: which of them this replica reads. Rows beyond the last text repeat
    it; only one replica reports its tokens. caches: {(stage, mb): KVCache} of the stages here.
    """

    def __init__(self, worker, mb: int, texts, rows: range, sampling):
        self.ops, self.seq_len = worker.ops, worker.config.model.seq_len
        self.texts, self.spoken = texts, {*texts[rows.start : rows.stop]}
        self.own = own = [texts[min(row, len(texts) - 1)] for row in rows]
        self.room = {text: text.room(sampling, self.seq_len) for text in texts}
        self.cut_short = {text for text in texts if self.room[text] < sampling.num_tokens}
        self.length = max(len(text.tokens) for text in own)  # slots filled after the next round
        self.firsts = np.array([self.length - len(text.tokens) for text in own])
        self.fresh = self.length
        # The last token is never read.
        slots = self.ops.asarray(np.arange(self.length + max(self.room.values()) - 1))
        self.caches = {(stage, mb): KVCache(self.firsts.tolist(), slots) for stage in worker.stages}

    def batch(self) -> Batch:
        """Return this replica's next input (B, T): padded whole prompts, or the newest tokens.

        The caches are told where it goes. Positions count from the start of each text: (B, T), or
        (T,) if all texts have the same.
        """
        tokens = np.zeros((len(self.own), self.fresh), np.int64)
        for row, text in zip(tokens, self.own, strict=True):
            newest = text.tokens[-self.fresh :]
            row[self.fresh - len(newest) :] = newest
        new = slice(self.length - self.fresh, self.length)
        for cache in self.caches.values():
            cache.new = new
        # Padding, and texts that have ended, may be at any valid position.
        positions = np.arange(new.start, new.stop) - self.firsts[:, None]
        positions = positions.clip(0, self.seq_len - 1)
        if not self.firsts.any():
            positions = positions[0]
        return Batch(self.ops.asarray(tokens), None, self.ops.asarray(positions))

    def grow(self, ids: dict, sampling: Sampling) -> list[Text]:
        """Append its next token to each text that has not ended, and return these texts."""
        grown = [text for text in self.texts if not text.end]
        for text in grown:
            text.tokens.append(ids[text])
            self.room[text] -= 1
            if ids[text] in sampling.stop:
                text.end = STOP
            elif not self.room[text]:
                text.end = FULL if text in self.cut_short else LENGTH
        self.length, self.fresh = self.length + 1, 1
        return grown

    @property
    def is_active(self) -> bool:
        """Whether any replica's text here has not ended; the same on all replicas."""
        return not all(text.end for text in self.texts)


def deal(worker, texts, sampling) -> dict[int, Group]:
    """Return {microbatch: Group}: equally many rows for all replicas, padded with the last text."""
    dp, replica = worker.grid.size("dp"), worker.grid.group_rank("dp")
    per_replica = -(-len(texts) // dp)
    num_rows = -(-per_replica // min(per_replica, worker.schedule.num_microbatches))
    own = range(replica * num_rows, (replica + 1) * num_rows)
    return {
        mb: Group(worker, mb, texts[first : first + dp * num_rows], own, sampling)
        for mb, first in enumerate(range(0, len(texts), dp * num_rows))
    }


def generate(worker, texts: list[Text], sampling: Sampling) -> Iterator[list[Text]]:
    """Extend texts until each has ended; yield after every round those that have grown.

    All ranks see the same texts. Raises NonFiniteError on every rank if a logit is not finite.
    Comm: per round one forward pass of each group, one all_gather over tp for each, and one
    all_reduce of a number per text over inner.
    """
    for text in texts:
        if text.room(sampling, worker.config.model.seq_len) <= 0:
            text.end = LENGTH if sampling.num_tokens <= 0 else FULL
    going = [text for text in texts if not text.end]
    groups = deal(worker, going, sampling) if going else {}
    speaks = worker.comms["tp"].index == worker.comms["cp"].index == 0
    places = {text: place for place, text in enumerate(going)}
    while groups := {mb: group for mb, group in groups.items() if group.is_active}:
        caches = {key: cache for group in groups.values() for key, cache in group.caches.items()}
        batches = {mb: group.batch() for mb, group in groups.items()}
        outputs = worker.forward(groups, batches.__getitem__, caches)
        chosen = [0.0] * len(going)
        for mb, logits in sorted(outputs.items()):
            for text, candidates in zip(
                groups[mb].own, best(worker, logits, sampling.candidates), strict=True
            ):
                if speaks and text in groups[mb].spoken and not text.end:
                    chosen[places[text]] = draw(candidates, sampling, text.number, len(text.tokens))
        ids = all_reduce_scalars(worker.ops, worker.comms, chosen, "generate.next", "inner")
        if any(np.isnan(ids)):
            raise NonFiniteError(
                "a logit is infinite or not a number, so no token is the most likely; try another"
                " --dtype"
            )
        ids = {text: int(ids[place]) for text, place in places.items()}
        yield [text for group in groups.values() for text in group.grow(ids, sampling)]


def continue_one(worker, prompt: list[int], sampling: Sampling) -> Iterator[int]:
    """Yield the tokens that follow one prompt, the same on every rank. Comm: see `generate`."""
    text = Text(0, list(prompt))
    for _ in generate(worker, [text], sampling):
        yield text.tokens[-1]


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
