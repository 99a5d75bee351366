"""The proof any user can run: one float64 step in this layout, compared with one rank's.

Both steps use the same seed and rows, and every parameter is compared. The one-rank step runs the
whole batch as one microbatch, so it shares no schedule, message or reduction with the layout under
test.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.recorder import Recorder
from mpipar.config.grid import GridConfig
from mpipar.config.sections import Config
from mpipar.config.train import MemoryConfig
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.weights import stream
from mpipar.run.data import rows
from mpipar.train.worker import Worker

SPREAD = 0.02  # of biases and norms: a bias of zero that is counted twice is still zero
Tensors = dict[str, np.ndarray]  # by name
StepTensors = tuple[float, float, Tensors, Tensors]  # loss, norm, gradients, weights
TOLERANCE = 1e-12  # of the largest entry; float64 sums in another order differ by less than this


@dataclass(frozen=True)
class Difference:
    """The largest difference of one tensor, relative to its scale, and where it is."""

    name: str
    kind: str
    error: float
    where: tuple[int, ...]
    ok: bool


def serial_config(config: Config) -> Config:
    """Return the same model and rows on one rank, as one microbatch, with nothing recomputed."""
    grid = GridConfig(dp=1, pp=1, tp=1, schedule="naive", num_microbatches=1)
    return replace(config, grid=grid, memory=MemoryConfig())


def full_tensors(worker: Worker, kind: str) -> Tensors:
    """Return whole tensors by name on world rank 0, {} elsewhere. kind: master or grad.

    Comm: see `checkpoint.stream`.
    """
    blocks: dict[str, list[np.ndarray]] = {}
    for name, block in stream(worker, kind):
        blocks.setdefault(name, []).append(block)
    return {name: np.concatenate(parts) for name, parts in blocks.items()}


def step_tensors(
    config: Config,
    part: Any,
    grid: Grid,
    mpi_world: Any = None,
    host_rank: int = 0,
    recorder: Recorder | None = None,
) -> StepTensors:
    """Run one step; return (loss, norm, gradients, weights after the update) as whole tensors.

    recorder: records what this rank sends.
    Comm: all barriers of a training step, and two streams to world rank 0.
    """
    ops = ops_module.make_for(config.run, host_rank)
    worker = Worker(config, grid, ops, recorder or Recorder(), mpi_world)
    if config.run.init_from:
        checkpoint.load(worker, config.run.init_from)
    else:
        worker.initialize(SPREAD)
    own = rows.Rows(ops, part, config, grid)
    loss, norm, _ = worker.gradients(1, lambda mb: own.train(1, mb))
    gradients = full_tensors(worker, "grad")
    worker.optimizer.step(config.train.lr, 1)
    weights = full_tensors(worker, "master")
    worker.close()
    return loss, norm, gradients, weights


def differences(kind: str, actual: Tensors, expected: Tensors) -> list[Difference]:
    """Return the largest difference of every tensor.

    It is ok where |a-b| <= TOLERANCE * max(max|b|, 1e-3 * g). g is the largest |b| of all tensors.
    """
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
    largest = max(float(np.abs(x).max()) for x in expected.values())
    found = []
    for name, right in expected.items():
        difference = np.abs(actual[name] - right)
        where = np.unravel_index(int(np.argmax(difference)), difference.shape)
        scale = max(float(np.abs(right).max()), 1e-3 * largest)
        error = float(difference[where]) / scale
        place = tuple(map(int, where))
        found.append(Difference(name, kind, error, place, error <= TOLERANCE))
    return found


def one_rank_tensors(config: Config, part: Any) -> StepTensors:
    """Return `step_tensors` of one rank, which every layout must equal."""
    return step_tensors(serial_config(config), part, Grid(0))


def compare_with_one_rank(
    config: Config,
    part: Any,
    mpi_world: Any = None,
    expected: Callable[[Config, Any], StepTensors] = one_rank_tensors,
    host_rank: int = 0,
    recorder: Recorder | None = None,
) -> list[Difference]:
    """Return all differences between this layout and one rank on world rank 0, [] elsewhere.

    config: resolved, float64, optimizer sgd (Adam would hide a wrong scale). expected: a function
    that returns the tensors of one rank, so that a caller that compares many layouts of one model
    can cache them. host_rank: place of this process on its host. recorder: see `step_tensors`.
    """
    world_rank = mpi_world.rank if mpi_world else 0
    parallel = step_tensors(
        config, part, Grid.of(config.grid, world_rank), mpi_world, host_rank, recorder
    )
    if world_rank > 0:
        return []
    serial = expected(config, part)
    ours, its = ({"loss and gradient norm": np.array(one[:2])} for one in (parallel, serial))
    return [
        *differences("value", ours, its),
        *differences("gradient", parallel[2], serial[2]),
        *differences("weight", parallel[3], serial[3]),
    ]
