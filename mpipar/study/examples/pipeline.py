"""Example of a pipeline: two stages of one product each, run by the engine on two microbatches."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from mpipar.pipeline.engine import Engine
from mpipar.pipeline.instructions import lower
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.study.examples.wires import difference

MICROBATCHES = np.array([[[1.0, 2.0]], [[3.0, 1.0]]])  # one row of two numbers each
WEIGHTS = np.array([[[1.0, 2.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 1.0]]])  # of two stages


class ProductStage:
    """y = x w. The last stage's loss is the sum of y, so its dy is all ones."""

    def __init__(self, case, stage: int, count: int, board):
        self.ops, self.stage, self.board = case.ops, stage, board
        self.is_first, self.is_last = stage == 0, stage == count - 1
        self.w, self.dw = WEIGHTS[stage].copy(), np.zeros(WEIGHTS[stage].shape)
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
        for stage in schedule.stages_by_rank[group.index]
    }
    # No gradient is summed over ranks: there is one copy of each stage.
    no_sums = SimpleNamespace(start=lambda stage: None, test=lambda: None)
    engine = Engine(case.ops, stages, schedule, group, case.recorder, no_sums, None)
    engine.run(lower(schedule, group.index), lambda mb: MICROBATCHES[mb])
    return stages


def pipeline(case) -> list[float]:
    """Compare each stage's gradient with the chain rule written out on one rank."""
    stages = stages_run(case, case.comm, case.board, case.comm.size)
    expected = [np.zeros((2, 2)), np.zeros((2, 2))]
    for x in MICROBATCHES:
        h, dy = x @ WEIGHTS[0], np.ones((1, 2))
        expected[1] += h.T @ dy
        expected[0] += x.T @ (dy @ WEIGHTS[1].T)
    return [difference(one.dw, expected[stage]) for stage, one in stages.items()]
