"""Examples of what travels: a ring by hand, replicas' gradients, a sharded update, two stages."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from mpipar.layers.parallel import chunks, ring
from mpipar.pipeline.engine import Engine
from mpipar.pipeline.lowering import lower
from mpipar.pipeline.schedules.catalog import make_schedule

ROWS = np.array([[1.0, 2.0], [3.0, 1.0], [2.0, 2.0], [1.0, 0.0]])  # of data
GRADIENTS = np.array([[2.0], [1.0], [3.0], [4.0]])  # of the output, for each row
WEIGHTS = np.array([10.0, 20.0, 30.0, 40.0])
RATE = 0.5


def ring_example(case) -> list[float]:
    """Sum round a ring; each rank has its own decimal digit, so that a sum shows its parts."""
    comm, board = case.comm, case.board
    own = np.arange(1.0, comm.size + 1) * 10.0**comm.group_rank
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
    own = slice(case.comm.group_rank * share, (case.comm.group_rank + 1) * share)
    found = gradient(own, case.comm, case.board)
    case.board.say("every replica takes the same step, so the replicas stay equal")
    return [difference(found, gradient(slice(None), case.alone, case.silent))]


def zero_example(case) -> list[float]:
    """Update with ZeRO-1: sums are scattered, each rank updates its piece, weights are gathered."""
    comm, board = case.comm, case.board
    gradient = np.array([1.0, 2.0, 3.0, 4.0]) * (comm.group_rank + 1)
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


# A pipeline: two stages of one product each, run by the engine on two microbatches.

MICROBATCHES = np.array([[[1.0, 2.0]], [[3.0, 1.0]]])  # one row of two numbers each
STAGES = np.array([[[1.0, 2.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 1.0]]])  # of two stages


class ProductStage:
    """y = x w. The last stage's loss is the sum of y, so its dy is all ones."""

    def __init__(self, case, stage: int, count: int, board):
        self.ops, self.stage, self.board = case.ops, stage, board
        self.is_first, self.is_last = stage == 0, stage == count - 1
        self.w, self.dw = STAGES[stage].copy(), np.zeros(STAGES[stage].shape)
        board.note(f"w of stage {stage}", self.w)

    def in_shape(self, batch):
        return batch.shape

    def forward(self, x, stash, engine):
        """Return the stage's output, or the loss after the last stage."""
        self.board.say(f"forward of microbatch {engine.recorder.mb}")
        x = stash["x"] = stash.batch if self.is_first else x
        y = self.ops.matmul(x, self.w)
        self.board.note("x", x)
        self.board.note("y = x w", y)
        return self.ops.sum(y) if self.is_last else y

    def backward(self, dy, stash, engine):
        """Return the gradient of the stage's input; that of its weights is added to dw."""
        self.board.say(f"backward of microbatch {engine.recorder.mb}")
        x = stash["x"]
        dy = np.ones(x.shape) if self.is_last else dy
        self.ops.matmul_tn_add(x, dy, self.dw)
        self.board.note("dy", dy)
        self.board.note("dw, the sum so far", self.dw)
        return self.ops.matmul_nt(dy, self.w)


def stages_run(case, group, board, count: int) -> dict[int, ProductStage]:
    """Return the stages of this rank after a step of 1F1B. Comm: the schedule's messages."""
    schedule = make_schedule("1f1b", count, len(MICROBATCHES))
    stages = {
        stage: ProductStage(case, stage, count, board)
        for stage in schedule.stages_by_rank[group.group_rank]
    }
    # No gradient is summed over ranks: there is one copy of each stage.
    no_sums = SimpleNamespace(start=lambda stage: None, test=lambda: None)
    engine = Engine(case.ops, stages, schedule, group, case.recorder, no_sums, None)
    engine.run(lower(schedule, group.group_rank), lambda mb: MICROBATCHES[mb])
    return stages


def pipeline(case) -> list[float]:
    """Compare each stage's gradient with the chain rule written out on one rank."""
    stages = stages_run(case, case.comm, case.board, case.comm.size)
    expected = [np.zeros((2, 2)), np.zeros((2, 2))]
    for x in MICROBATCHES:
        h, dy = x @ STAGES[0], np.ones((1, 2))
        expected[1] += h.T @ dy
        expected[0] += x.T @ (dy @ STAGES[1].T)
    return [difference(one.dw, expected[stage]) for stage, one in stages.items()]


def difference(found, expected) -> float:
    """Return the largest difference between two arrays."""
    return float(np.abs(np.asarray(found) - np.asarray(expected)).max())
