"""Small facts of all ranks to world rank 0, or back.

They stay out of the records, because a report is not a barrier of training.
"""

from __future__ import annotations

import json

import numpy as np


def gather_facts(mpi_world, fact) -> list | None:
    """Every rank's JSON-able fact, in rank order, on world rank 0; None elsewhere.

    Comm: one Gather of a length and one Gatherv of bytes over the world.
    """
    if mpi_world is None or mpi_world.size == 1:
        return [fact]
    text = np.frombuffer(json.dumps(fact).encode(), np.uint8)
    lengths = np.empty(mpi_world.size, np.int64) if mpi_world.rank == 0 else None
    mpi_world.Gather(np.array([len(text)], np.int64), lengths, root=0)
    everything = np.empty(lengths.sum(), np.uint8) if mpi_world.rank == 0 else None
    receive = [everything, lengths] if mpi_world.rank == 0 else None
    mpi_world.Gatherv(text, receive, root=0)
    if mpi_world.rank > 0:
        return None
    ends = np.cumsum(lengths)
    return [json.loads(bytes(everything[end - length:end]))
            for end, length in zip(ends, lengths, strict=True)]


def broadcast_text(mpi_world, text: str) -> str:
    """World rank 0's text, on every rank.

    Comm: one Bcast of a length and one of bytes over the world.
    """
    if mpi_world is None or mpi_world.size == 1:
        return text
    own = np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)
    length = np.array([len(own)], np.int64)
    mpi_world.Bcast(length, root=0)
    received = own.copy() if mpi_world.rank == 0 else np.empty(length[0], np.uint8)
    mpi_world.Bcast(received, root=0)
    return bytes(received).decode("utf-8", "surrogateescape")


def gather_numbers(mpi_world, x: np.ndarray) -> np.ndarray | None:
    """Everybody's float64 array x, stacked (ranks, ...), on world rank 0; None elsewhere.

    Comm: one Gather over the world.
    """
    if mpi_world is None or mpi_world.size == 1:
        return x[None]
    stacked = np.empty((mpi_world.size, *x.shape)) if mpi_world.rank == 0 else None
    mpi_world.Gather(np.ascontiguousarray(x), stacked, root=0)
    return stacked
