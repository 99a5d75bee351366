"""Text from the model, token by token, through the pipeline and cut layers that train it.

No rank ever sees all logits: each offers its best token, and the best of those wins. Sampling adds
Gumbel noise to logits / temperature and takes the largest sum. That is a draw from the softmax
(arXiv 1611.01144). A token's noise is a pure function of (seed, position, token id), so every
layout draws the same text.
"""

from __future__ import annotations

import numpy as np

from mpipar.comm.grid import PIECES_PER_RANK
from mpipar.data.rows import Batch, positions_of, token_places
from mpipar.data.source import BYTE_VOCABULARY
from mpipar.errors import UsageError


def encode(prompt: str, vocab_size: int) -> list[int]:
    """A prompt's tokens: bytes for a byte model, else ids between blanks. Raises UsageError."""
    if vocab_size <= BYTE_VOCABULARY:
        tokens = list(prompt.encode("utf-8", "surrogateescape"))  # the bytes that were typed
        bad = [token for token in tokens if token >= vocab_size]
    else:
        words = prompt.split()
        bad = [word for word in words if not word.isdecimal() or int(word) >= vocab_size]
        tokens = [] if bad else [int(word) for word in words]
    if bad or not tokens:
        raise UsageError(
            f"--prompt {prompt!r}: needs at least one token, all below the model's vocabulary of"
            f" {vocab_size:,}; a model of bytes takes text, any other takes ids, as in"
            " --prompt '464 318'")
    return tokens


def decode(tokens: list[int], vocab_size: int) -> str:
    """The text of tokens, as the inverse of `encode`. Bytes that are not UTF-8 become replacement
    marks.
    """
    if vocab_size <= BYTE_VOCABULARY:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")
    return " ".join(map(str, tokens))


def best_ids(worker, logits, noise) -> np.ndarray:
    """The id (N,) of the largest logit (+ noise) of each row of logits (N, V/tp), on all tp ranks.

    Comm: one all_gather of two numbers per row over tp.
    """
    ops, loss = worker.ops, worker.stages[worker.schedule.num_stages - 1].loss
    best = ops.argmax_forward(logits, loss.start, loss.vocab_size, noise)
    best = ops.to_host(worker.comms.tp.all_gather(best, "best"))  # (tp, N, 2)
    # The largest value wins. Of equal ones the first rank's wins, which has the lowest id, as on
    # one rank.
    return best[best[..., 0].argmax(axis=0), np.arange(best.shape[1]), 1].astype(np.int64)


def context_batch(worker, tokens: list[int]) -> tuple[Batch, int, int]:
    """(this rank's part of one row, the rank of cp that holds the last token, its place there).

    Over cp the row is filled up to equal pieces with tokens that no earlier one sees.
    """
    grid, ops = worker.config.grid, worker.ops
    unit = grid.cp * PIECES_PER_RANK.get(grid.cp_attention, 1)
    row = np.zeros(-(-len(tokens) // unit) * unit, np.int64)
    row[:len(tokens)] = tokens
    held = [token_places(len(row), grid, index) for index in range(grid.cp)]
    last = len(tokens) - 1
    owner = next(index for index, places in enumerate(held) if last in places)
    own = held[worker.grid.cp_rank]
    batch = Batch(ops.asarray(row[None, own]), None, *positions_of(ops, len(row), own))
    return batch, owner, int(np.searchsorted(held[owner], last))


def generate(worker, prompt: list[int], num_tokens: int, temperature: float, seed: int):
    """Yield num_tokens more tokens, the same on every rank; temperature 0 takes the likeliest.

    The last T tokens are the context. Each new token runs the whole context through the model
    again.
    Comm: per token one forward pass, one all_gather of two numbers over tp, one broadcast over
    world.
    """
    ops, model = worker.ops, worker.config.model
    last_stage = worker.schedule.num_stages - 1
    last_rank = worker.schedule.rank_of(last_stage, 0)
    tokens = list(prompt)
    for position in range(len(prompt), len(prompt) + num_tokens):
        batch, owner, newest = context_batch(worker, tokens[-model.seq_len:])
        root = worker.grid.at(pp=last_rank, dp=0, cp=owner, tp=0)
        outputs = worker.forward(1, lambda mb, batch=batch: batch)
        token = np.zeros(1, np.int64)
        if outputs:
            loss = worker.stages[last_stage].loss
            logits = outputs[0][newest:newest + 1]  # (1, V/tp)
            noise = None
            if temperature > 0:
                own = slice(loss.start, loss.start + logits.shape[1])
                padded = logits.shape[1] * worker.comms.tp.size
                philox = np.random.Philox(key=seed, counter=[0, position, 0, 1])
                generator = np.random.Generator(philox)
                noise = temperature * generator.gumbel(size=padded)[None, own]
                noise = ops.asarray(noise.astype(ops.statistics))
            token[0] = best_ids(worker, logits, noise)[0]
        token = ops.to_host(worker.comms.world.broadcast(ops.asarray(token), root, "generate.next"))
        tokens.append(int(token[0]))
        yield tokens[-1]
