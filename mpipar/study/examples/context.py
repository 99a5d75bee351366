"""Example of context parallelism: keys and values travel round the ring of ranks."""

from __future__ import annotations

import numpy as np

from mpipar.comm.grid import token_pieces
from mpipar.layers.parallel.local_attention import LocalAttention
from mpipar.layers.parallel.ring_attention import RingAttention
from mpipar.layers.stash import Batch
from mpipar.study.examples.wires import difference

TOKENS = 8


def context(case) -> list[float]:
    """Attend with keys of zero, so that y is the mean of the v that a token sees.

    v of token t is 2t, so the mean over tokens 0 to t is t. Every y can be checked by eye.
    """
    q = np.ones((1, TOKENS, 1, 1))
    k, v = np.zeros(q.shape), 2 * np.arange(float(TOKENS)).reshape(q.shape)
    held = np.concatenate(
        [
            np.arange(one.start, one.stop)
            for one in token_pieces(TOKENS, "ring", case.comm.size, case.comm.index)
        ]
    )
    case.board.note(
        "positions of the tokens that each rank holds: from both ends of the row", held[None]
    )
    case.board.note("their v", v[0, held, 0, 0][None])
    case.board.say("k and v travel together, k in the first row and v in the second")

    def attended(method, group, places, all_places):
        batch = Batch(None, None, places, all_places)
        mine = [np.ascontiguousarray(one[:, places]) for one in (q, k, v)]
        return method(case.ops, group, "k and v").forward(*mine, batch)[0][0, :, 0, 0]

    every = np.arange(TOKENS)
    found = attended(RingAttention, case.comm, held, every)
    case.board.note(
        "y, the mean of all v up to its token, equals the token's position", found[None]
    )
    return [difference(found, attended(LocalAttention, case.alone, every, None)[held])]
