"""Examples of sums over ranks: a ring all-reduce by hand, replicas' gradients, a sharded update."""

from __future__ import annotations

import numpy as np

from mpipar.layers.parallel import chunks, ring

ROWS = np.array([[1.0, 2.0], [3.0, 1.0], [2.0, 2.0], [1.0, 0.0]])  # of data
GRADIENTS = np.array([[2.0], [1.0], [3.0], [4.0]])  # of the output, for each row
WEIGHTS = np.array([10.0, 20.0, 30.0, 40.0])
RATE = 0.5


def ring_example(case) -> list[float]:
    """Sum round a ring; each rank has its own decimal digit, so that a sum shows its parts."""
    comm, board = case.comm, case.board
    own = np.arange(1.0, comm.size + 1) * 10.0**comm.index
    board.note("each rank's numbers, one piece for each rank", own)
    board.say("first round: the sum of a piece travels round the ring, and every rank adds its own")
    total = ring.total(case.ops, lambda place: own[place : place + 1].copy(), comm, "a sum")
    board.note("each rank now has the complete sum of one piece, its own", total)
    board.say("second round: the finished pieces travel round")
    found = np.empty(comm.size)
    for place, piece in ring.pieces(case.ops, total, comm, "a piece"):
        found[place] = piece[0]
    board.note("the complete sum, on every rank", found)
    expected = np.arange(1.0, comm.size + 1) * sum(10.0**place for place in range(comm.size))
    return [difference(found, expected)]


def data_example(case) -> list[float]:
    """Compute dw = x^T dy: each replica of w has the rows of its own data."""

    def gradient(rows, group, board):
        x, dy, dw = ROWS[rows], GRADIENTS[rows], np.zeros((2, 1))
        board.note("x, this replica's rows of the batch", x)
        board.note("dy, the gradient of its outputs", dy)
        case.ops.matmul_tn_add(x, dy, dw)
        return group.all_reduce(dw, "grads.bucket")

    share = len(ROWS) // case.comm.size
    own = slice(case.comm.index * share, (case.comm.index + 1) * share)
    found = gradient(own, case.comm, case.board)
    case.board.say("every replica takes the same step, so the replicas stay equal")
    return [difference(found, gradient(slice(None), case.alone, case.silent))]


def zero_example(case) -> list[float]:
    """Update with ZeRO-1: sums are scattered, each rank updates its piece, weights are gathered."""
    comm, board = case.comm, case.board
    gradient = np.array([1.0, 2.0, 3.0, 4.0]) * (comm.index + 1)
    board.note("w, the weights, whole on each rank", WEIGHTS)
    board.note("dw, each rank's own gradient", gradient)
    piece = comm.reduce_scatter(gradient.reshape(comm.size, -1), "grads.bucket")
    w = chunks.local_chunk(case.ops, WEIGHTS, 0, comm).copy()
    case.ops.sgd_step(w, piece, RATE)
    board.note(
        f"own piece of w after w -= {RATE} dw: only its owner keeps the optimizer's state", w
    )
    found = comm.all_gather(w, "weights").reshape(-1)
    expected = WEIGHTS.copy()
    factor = sum(range(1, comm.size + 1))
    case.ops.sgd_step(expected, np.array([1.0, 2.0, 3.0, 4.0]) * factor, RATE)
    return [difference(found, expected)]


def difference(found, expected) -> float:
    """Return the largest difference between two arrays."""
    return float(np.abs(np.asarray(found) - np.asarray(expected)).max())
