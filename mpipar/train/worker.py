"""One rank's part of a training run: the order of a training step, and what it works on.

The same Worker runs on numbers under MPI, on numbers on a single rank, and on shapes without MPI,
which is the cost model. These differ only in the `ops` and the transport that they are given.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING

from mpipar import models
from mpipar.comm.grid import ISLAND, Grid
from mpipar.comm.recorder import Recorder
from mpipar.config.sections import Config
from mpipar.errors import NonFiniteError
from mpipar.layers.parallel.kv_cache import KVCache
from mpipar.layers.param import Param
from mpipar.layers.stash import Batch
from mpipar.models.on_shapes import all_params
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array
from mpipar.pipeline.engine import Engine, Key
from mpipar.pipeline.lowering import forward_only
from mpipar.train import build
from mpipar.train.gradsync import all_reduce_scalars, masked_contribution
from mpipar.train.loss_scale import LossScale
from mpipar.train.optim import Optimizer, learning_rate
from mpipar.train.outer import Outer

if TYPE_CHECKING:
    from mpipar.comm.groups import World

GetBatch = Callable[[int], Batch]  # the rows of a microbatch


@dataclass(frozen=True)
class StepVotes:
    """One rank's votes in a step and, after the all-reduce, the decision that all ranks act on.

    stop, save: whether this rank asks for it; decision: whether any rank does. written: whether
    this rank has written its part of a checkpoint in the background; decision: whether every rank
    has.
    """

    stop: bool = False
    save: bool = False
    written: bool = False

    @classmethod
    def of_sums(cls, sums: Sequence[float], ranks: int) -> StepVotes:
        """Return the decision. sums: of the votes of so many ranks."""
        return cls(sums[0] > 0, sums[1] > 0, sums[2] == ranks)


@dataclass(frozen=True)
class StepResult:
    """What a rank knows after a step; all but step_seconds is the same on every rank.

    loss: mean in nats per token. grad_norm: of the whole gradient. votes: the decision of all
    ranks. loss_scale: of this step's backward pass, None where nothing is scaled. skipped: whether
    the gradients overflowed on some rank, so that no weight has changed. What is shown of a step:
    `run.console.metrics` and `step_line` in `run.console.tables`.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    step_seconds: float
    votes: StepVotes
    loss_scale: float | None = None
    skipped: bool = False


class Worker:
    """One rank of a run: it steps with the engine, gradient sums and optimizer that it builds.

    The step comes first; what it works on follows, built by train/build.py.
    """

    def train_step(
        self, step: int, get_batch: GetBatch, votes: Callable[[], StepVotes] = StepVotes
    ) -> StepResult:
        """Run one training step; update the weights unless float16 gradients overflowed.

        `step` counts from 1. votes() returns this rank's StepVotes.

        Raises NonFiniteError on every rank, before any weight changes, if the loss is not finite.
        The same happens for a gradient that is not finite on any rank, unless the loss scale can
        still be reduced. Islands know only of their own ranks.
        """
        start = perf_counter_ns()
        self.outer.begin()
        loss, norm, agreed = self.gradients(step, get_batch, votes)
        number = step - self.loss_scale.skipped  # of the update: a skipped one uses up no warm-up
        scale = self.loss_scale.value if self.loss_scale.dynamic else None
        skipped = self.loss_scale.dynamic and self.loss_scale.adapt(norm)
        if not math.isfinite(loss) or not (math.isfinite(norm) or skipped):
            raise NonFiniteError(
                f"step {step}: loss {loss}, gradient norm {norm}: stopped before the update"
            )
        lr = learning_rate(self.config.train, number)
        if not skipped:
            self.update(norm, lr, number)
        sums = self.outer.meet([*map(float, astuple(agreed))]) if self.meets(step) else (0, 0, 0)
        agreed = StepVotes.of_sums(sums, self.comms[ISLAND].size)
        seconds = (perf_counter_ns() - start) * 1e-9
        return StepResult(step, loss, norm, lr, seconds, agreed, scale, skipped)

    def update(self, norm: float, lr: float, number: int) -> None:
        """Clip gradients of this norm, and change the weights. number: of the update, from 1.

        Comm: that of the optimizer.
        """
        with self.recorder.at("opt"):
            start = self.ops.timestamp()
            self.gradsync.clip(norm, self.config.train.clip)
            self.optimizer.step(lr, number)
            self.recorder.span("opt", start, end=self.ops.timestamp())

    def gradients(
        self, step: int, get_batch: GetBatch, votes: Callable[[], StepVotes] = StepVotes
    ) -> tuple[float, float, StepVotes]:
        """Run forward and backward of one step; return (mean loss, gradient norm, votes of all).

        get_batch(mb) returns this replica's microbatches. Afterwards every gradient is that of the
        mean loss over the global batch, on every rank that holds the parameter. If a gradient is
        not finite on any rank, the norm is not finite on all of them. votes() returns this rank's
        StepVotes; it is called as late as possible, because a step may take minutes.
        Comm: the schedule's sends and receives, the layers' barriers, the sums of gradients, and
        one all_reduce of five numbers over all ranks that take the step together.
        """
        self.recorder.step = step
        self.gradsync.zero()
        for stage in self.stages.values():
            stage.set_loss_scale(self.loss_scale.value / self.own_tokens)
        start = self.ops.timestamp()
        with self.recorder.at("sync"):
            outputs = self.engine.run(self.program, get_batch)
            self.recorder.span("pipeline", start, end=self.ops.timestamp())
            self.gradsync.finish()
            self.gradsync.unscale(self.loss_scale.value)
            loss, squares = self._loss_and_squares(outputs)
            values = [loss, squares, *map(float, astuple(votes()))]
            loss, squares, *sums = all_reduce_scalars(
                self.ops, self.comms, values, "step.norm", "inner"
            )
        agreed = StepVotes.of_sums(sums, self.comms["inner"].size)
        return loss / self.own_tokens, math.sqrt(squares), agreed

    def _loss_and_squares(self, losses: dict[int, Array]) -> tuple[float, float]:
        """Return this rank's parts of the sum of losses and of the squared gradient norm.

        losses: of its microbatches, on the device.
        All of them are read from a device at once, the only time in a step that the host waits for
        it outside of messages. A part is not finite if any loss or gradient here is not.
        """
        parts = self.gradsync.square_sums()
        numbers = iter(self.ops.to_floats([*losses.values(), *(part for part, _ in parts)]))
        self.recorder.settle(self.ops.nanoseconds)
        self.losses = {mb: next(numbers) for mb in losses}
        # All tp ranks know the same loss: one of them contributes it.
        loss = masked_contribution(sum(self.losses.values()), self.comms["tp"].group_rank == 0)
        return loss, sum(masked_contribution(next(numbers), counts) for _, counts in parts)

    def __init__(
        self,
        config: Config,
        grid: Grid,
        ops: Ops,
        recorder: Recorder,
        mpi_world: World | None = None,
    ):
        """Build what the steps of one rank work on.

        config: resolved. grid: this rank's place. mpi_world: an mpi4py communicator, or None
        without MPI.
        Comm: one split over the world for each group; every rank must build its Worker.
        """
        self.config, self.ops, self.recorder, self.mpi_world = config, ops, recorder, mpi_world
        self.grid = build.with_shared_heads(grid, config.model)
        self.schedule = build.configured_schedule(config.grid)
        self.program = build.lowered(config, self.schedule, grid.group_rank("pp"))
        self.comms = build.groups_of(config, self.grid, self.schedule, ops, recorder, mpi_world)
        self.stage_layers = models.layer_split(config, self.schedule)
        self.stages = build.stages_of(config, self.schedule, self.stage_layers, ops, self.comms)
        self.flats = [flat for stage in self.stages.values() for flat in stage.flats]
        self.gradsync = build.gradient_sums(config.memory)(
            ops, self.stages, self.comms, recorder, config.train.bucket_bytes
        )
        self.engine = Engine(
            ops,
            self.stages,
            self.schedule,
            self.comms["pp"],
            recorder,
            self.gradsync,
            build.gathered_weights(config.memory, ops, self.stages),
        )
        self.optimizer = Optimizer(ops, self.flats, config.train, self.comms, build.UPDATES)
        alone = config.grid.islands is None
        self.island = None if alone else grid.group_rank(ISLAND)
        self.outer: OneIsland | Outer = (
            OneIsland() if alone else Outer(ops, self.flats, self.comms, config.train)
        )
        self.loss_scale = LossScale(config.run)
        assert config.train.batch_size, "the Config is not resolved"
        self.num_tokens = config.train.batch_size * config.model.seq_len
        self.own_tokens = self.num_tokens // self.grid.size(ISLAND)  # of this rank's island
        self.losses = {}  # of the latest step here, by microbatch

    def meets(self, step: int) -> bool:
        """Return whether all ranks have the same weights after a step."""
        return step % self.outer.interval == 0 or step == self.config.train.steps

    @functools.cached_property
    def all_params(self) -> list[tuple[int, Param]]:
        """(stage, Param) of every whole tensor of the model, whatever this rank holds of it."""
        return all_params(self.config.model, self.stage_layers, self.ops.table_multiple)

    def initialize(self, spread: float = 0.0) -> None:
        """Give every parameter its initial values: the same model on every layout.

        spread: see `FlatParams.initialize`.
        """
        for flat in self.flats:
            flat.initialize(self.config.run.seed, spread)

    def settle(self) -> None:
        """Wait for the device, and record what it has done since the last step's loss was read."""
        self.ops.synchronize()
        self.recorder.settle(self.ops.nanoseconds)

    def close(self) -> None:
        """Free the groups when nothing more will be sent. Comm: every rank must call it."""
        self.comms.close()

    def forward(
        self, mbs: Collection[int], get_batch: GetBatch, caches: dict[Key, KVCache] | None = None
    ) -> dict[int, Array]:
        """Run forward passes of some microbatches; return the last stage's outputs by microbatch.

        Ranks without the last stage return an empty dict. caches: see `Engine.run`.

        Outputs are sums of token losses, or logits (N, V/tp) for batches without targets.
        Comm: the sends and receives of the forward passes, and the layers' forward barriers.
        """
        passes = forward_only(self.schedule, mbs)
        program = build.lowered(self.config, passes, self.grid.group_rank("pp"))
        with self.recorder.at("eval"):
            return self.engine.run(program, get_batch, training=False, caches=caches)


class OneIsland:
    """All ranks take every step together: they have the same weights after it.

    begun: whether islands have taken steps since they last met. interval: steps from one meeting to
    the next.
    """

    begun = False
    interval = 1

    def begin(self) -> None:
        """Prepare for a step."""

    def meet(self, votes: list[float]) -> list[float]:
        """Give all ranks the same weights, and return the sum of the islands' votes."""
        return votes

    def exchange(self) -> None:
        """Let layers read the weights that all ranks share, until it is called again."""
