"""Gathers and broadcasts of small facts and texts between ranks, outside the records.

They are not recorded, because a report is not a barrier of training. A session gathers facts before
it is decided how many threads NumPy gets, so NumPy is not imported at the top.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI


def gather_objects(mpi_world: MPI.Comm | None, fact: Any) -> list[Any] | None:
    """Return every rank's JSON-able fact, in rank order, on world rank 0; None elsewhere.

    Comm: one Gather of a length and one Gatherv of bytes over the world.
    """
    if mpi_world is None or mpi_world.size == 1:
        return [fact]
    count = mpi_world.size if mpi_world.rank == 0 else 0
    facts = _gathered(fact, count, mpi_world.Gather, mpi_world.Gatherv)
    return facts if count else None


def all_gather_objects(mpi_world: MPI.Comm, fact: Any) -> list[Any]:
    """Return every rank's JSON-able fact, in rank order, on every rank.

    Comm: one Allgather of a length and one Allgatherv of bytes over the world.
    """
    if mpi_world.size == 1:
        return [fact]
    return _gathered(fact, mpi_world.size, mpi_world.Allgather, mpi_world.Allgatherv)


def _gathered(
    fact: Any, count: int, gather: Callable[..., None], gather_unequal: Callable[..., None]
) -> list[Any]:
    """Return the facts of `count` ranks; 0 on a rank that receives none, whose list is empty."""
    own, lengths = json.dumps(fact).encode(), array("q", [0] * count)
    gather(array("q", [len(own)]), lengths if count else None)
    received = bytearray(sum(lengths))
    gather_unequal(own, [received, lengths] if count else None)
    return [
        json.loads(received[end - length : end])
        for end, length in zip(accumulate(lengths), lengths, strict=True)
    ]


def broadcast_text(mpi_world: MPI.Comm | None, text: str) -> str:
    """Return world rank 0's text, on every rank.

    Comm: one Bcast of a length and one of bytes over the world.
    """
    if mpi_world is None or mpi_world.size == 1:
        return text
    own = bytearray(text.encode("utf-8", "surrogateescape"))
    length = array("q", [len(own)])
    mpi_world.Bcast(length, root=0)
    received = own if mpi_world.rank == 0 else bytearray(length[0])
    mpi_world.Bcast(received, root=0)
    return received.decode("utf-8", "surrogateescape")


def gather_numbers(mpi_world: MPI.Comm | None, x: np.ndarray) -> np.ndarray | None:
    """Return all ranks' float64 arrays x, stacked (ranks, ...), on world rank 0; None elsewhere.

    Comm: one Gather over the world.
    """
    import numpy as np

    if mpi_world is None or mpi_world.size == 1:
        return x[None]
    stacked = np.empty((mpi_world.size, *x.shape)) if mpi_world.rank == 0 else None
    mpi_world.Gather(np.ascontiguousarray(x), stacked, root=0)
    return stacked
