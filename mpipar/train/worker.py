"""One rank's part of a training run: what it holds, and the order of a training step.

The same Worker runs on numbers under MPI, on numbers alone on one rank, and on shapes without MPI.
The last is the cost model. They differ only in the `ops` and the transport that they are given.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from pathlib import Path
from time import perf_counter_ns

from mpipar import models
from mpipar.comm.connect import Options
from mpipar.comm.group import Comms
from mpipar.errors import NonFiniteError
from mpipar.layers.context import Context, Copies, made_again
from mpipar.layers.shards import Sharding
from mpipar.layers.units import UNITS
from mpipar.pipeline.csv_format import read_csv
from mpipar.pipeline.engine import Engine, forward_only
from mpipar.pipeline.instructions import lower, with_weights_kept
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.train import non_finite
from mpipar.train.gradsync import GradSync, agree
from mpipar.train.learning_rate import learning_rate
from mpipar.train.loss_scale import LossScale
from mpipar.train.non_finite import is_finite, seen
from mpipar.train.optim import OPTIMIZERS
from mpipar.train.scatter import PieceSync, ScatterSync


@dataclass(frozen=True)
class Asks:
    """What a rank tells the others in a step and, once all have agreed, what every rank does.

    stop, save: whether this rank asks for it; agreed: whether any rank does. written: whether this
    rank has written its part of a checkpoint in the background; agreed: whether every rank has.
    """

    stop: bool = False
    save: bool = False
    written: bool = False


@dataclass(frozen=True)
class StepResult:
    """What all ranks know after a step.

    loss: mean in nats per token. grad_norm: of the whole gradient. asks: those of all ranks.

    loss_scale: of this step's backward pass, None where nothing is scaled. skipped: whether the
    gradients overflowed on some rank, so that no weight has changed.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    step_seconds: float
    asks: Asks
    loss_scale: float | None = None
    skipped: bool = False


def configured_schedule(grid_config):
    """The schedule of a resolved GridConfig: made by name, or read from --schedule-csv.

    Raises UsageError for counts that the schedule cannot take, and for a file that cannot be read
    or run.
    """
    if grid_config.schedule_csv is not None:
        return read_csv(Path(grid_config.schedule_csv))
    return make_schedule(grid_config.schedule, grid_config.pp, grid_config.num_microbatches,
                          grid_config.chunks, grid_config.group_size)


def holders(schedule, stages) -> tuple[int, ...]:
    """Pipeline ranks that hold a copy of any of the stages, ascending."""
    mbs = range(schedule.num_microbatches)
    return tuple(sorted({schedule.rank_of(stage, mb) for stage in stages for mb in mbs}))


def sharing_ranks(config) -> list[range]:
    """The ranks of tp that hold the same heads of keys and values; each alone if tp cuts them."""
    kv_heads, tp = config.model.whole_kv_heads, config.grid.tp
    count = max(1, tp // kv_heads) if kv_heads else 1
    return [range(first, first + count) for first in range(0, tp, count)]


class Worker:
    """Stages, groups, engine, gradient synchronization and optimizer of one rank.

    config: resolved. grid: this rank's place. mpi_world: an mpi4py communicator, or None without
    MPI.
    Comm: makes the groups with one split over the world each; every rank must build its Worker.
    """

    def __init__(self, config, grid, ops, recorder, mpi_world=None):
        self.config, self.grid, self.ops, self.recorder = config, grid, ops, recorder
        self.mpi_world = mpi_world
        self.losses: dict = {}  # of the newest step here, by microbatch
        self.schedule = configured_schedule(config.grid)
        self.program = self._lowered(self.schedule)
        model = models.model_of(config.model)
        self.stage_layers = models.layer_split(config, self.schedule)
        # Some tensors have copies on several pipeline ranks: tied tables at both ends ("tie"), and
        # stages that a bidirectional schedule holds twice ("mirror"). Neighbours in tp have copies
        # where there are fewer heads of keys and values ("kv"). Their gradients are summed over
        # these groups.
        last = self.schedule.num_stages - 1
        mirrors = {holders(self.schedule, (stage,)) for stage in range(last + 1)}
        partitions = {"tie": grid.partition("pp", [holders(self.schedule, (0, last))]),
                      "mirror": grid.partition("pp", sorted(mirrors)),
                      "kv": grid.partition("tp", sharing_ranks(config))}
        options = Options(config.run.sync_sends, config.run.check_comm)
        self.comms = Comms(grid, ops, recorder, mpi_world, options, partitions)
        memory = config.memory
        # Who shares out what is kept.
        self.shared = self.comms.data if memory.zero else self.comms.alone
        tables: dict = {}
        self.stages = {
            stage: model.Stage(
                self._context(stage), config.model, stage, self.stage_layers, tables)
            for stage in self.schedule.stages_of(grid.pp_rank)
        }
        sync = (PieceSync if memory.keeps_pieces_of_gradients
                else ScatterSync if memory.zero else GradSync)
        self.gradsync = sync(
            ops, self.stages, self.comms, recorder, config.train.bucket_bytes)
        weights = UNITS[memory.gathers](
            ops, self.stages, self.shared, recorder)
        self.engine = Engine(
            ops, self.stages, self.schedule, self.comms.pp, recorder, self.gradsync, weights)
        self.optimizer = OPTIMIZERS[config.train.optimizer](
            ops, self.stages, config.train, self.shared)
        self.loss_scale = LossScale(config.run)
        # Of the global batch.
        self.num_tokens = config.train.batch_size * config.model.targets_per_row

    def _lowered(self, schedule) -> list:
        """This rank's program of a schedule, as the engine runs it."""
        program = lower(schedule, self.grid.pp_rank)
        kept = self.config.memory.gathers == "stage"
        return with_weights_kept(program) if kept else program

    def _context(self, stage) -> Context:
        """The Context of a stage's layers.

        Each tensor has one owner: the rank that runs its first stage on microbatch 0.
        """
        schedule, pp_rank = self.schedule, self.grid.pp_rank
        mirrored = len(holders(schedule, (stage,))) > 1
        return Context(
            self.ops, self.comms, **made_again(self.config), sharding=self._sharding(),
            copies=Copies(("mirror",) if mirrored else (), schedule.rank_of(stage, 0) == pp_rank),
            tied=Copies(("tie",) if schedule.num_stages > 1 else (),
                        schedule.rank_of(0, 0) == pp_rank))

    def _sharding(self) -> Sharding:
        """What this rank keeps of each stage."""
        memory, itemsize = self.config.memory, self.ops.statistics.itemsize
        return Sharding(
            memory.zero, self.shared.index, self.shared.size,
            self.config.train.bucket_bytes // itemsize, not memory.keeps_pieces_of_gradients)

    def close(self) -> None:
        """Free the groups when nothing more will be sent. Comm: every rank must call it."""
        self.comms.close()

    def initialize(self, spread: float = 0.0) -> None:
        """Give every parameter its initial values: the same model on every layout.

        spread: see `FlatParams.initialize`.
        """
        for stage in self.stages.values():
            stage.flat.initialize(self.config.run.seed, spread)

    def gradients(self, step: int, get_batch, asks=Asks) -> tuple[float, float, Asks]:
        """Run forward and backward of one step; return (mean loss, gradient norm, agreed asks).

        get_batch(mb) gives this replica's microbatches. Afterwards every gradient is that of the
        mean loss over the global batch, on every rank that holds the parameter. If a gradient is
        not finite on any rank, the norm is not finite on all of them. asks() -> Asks of this rank;
        it is called as late as can be, because a step may take minutes.
        Comm: the schedule's sends and receives, the layers' barriers, data (and tie, mirror) sums,
        and one all_reduce of five numbers over world.
        """
        self.recorder.step = step
        self.gradsync.zero()
        for stage in self.stages.values():
            stage.set_loss_scale(self.loss_scale.value / self.num_tokens)
        start = perf_counter_ns()
        self.losses = self.engine.run(self.program, get_batch)
        self.recorder.phase, self.recorder.stage, self.recorder.mb = "sync", -1, -1
        self.recorder.span("pipeline", start)
        self.gradsync.finish()
        self.gradsync.unscale(self.loss_scale.value)
        # tp ranks know the same loss: one of them reports it.
        loss = seen(sum(self.losses.values()), self.comms.tp.index == 0)
        squares = self.gradsync.square_sum()
        loss, squares, stop, save, written = agree(
            self.ops, self.comms, [loss, squares, *map(float, astuple(asks()))], "step.norm")
        agreed = Asks(stop > 0, save > 0, written == self.grid.world_size)
        return loss / self.num_tokens, math.sqrt(squares), agreed

    def train_step(self, step: int, get_batch, asks=Asks) -> StepResult:
        """Run one training step; update the weights unless float16 gradients overflowed.

        `step` counts from 1.

        Raises NonFiniteError on every rank, before any weight changes, when the loss is not finite.
        A gradient that is not finite on any rank raises it too, unless a smaller loss scale is
        left. The error names tensors and ranks.
        """
        start = perf_counter_ns()
        loss, norm, agreed = self.gradients(step, get_batch, asks)
        scale, overflow = self.loss_scale.value, not is_finite(norm)
        if not is_finite(loss) or (overflow and not self.loss_scale.can_skip()):
            raise self._not_finite(
                f"step {step}: loss {loss}, gradient norm {norm}: stopped before the update",
                non_finite.report(self, "gradient", lambda flat: flat.summed, self.losses))
        self.loss_scale.update(overflow)
        lr = learning_rate(self.config.train, step)
        self.recorder.enter("opt")
        opt_start = perf_counter_ns()
        if not overflow:
            self.gradsync.clip(norm, self.config.train.clip)
            self.optimizer.step(lr, step - self.loss_scale.skipped)
        self.ops.synchronize()
        self.recorder.span("opt", opt_start)
        seconds = (perf_counter_ns() - start) * 1e-9
        shown = scale if self.loss_scale.dynamic else None
        return StepResult(step, loss, norm, lr, seconds, agreed, shown, overflow)

    def check_weights(self, step: int) -> None:
        """Look at the weights before they are saved after `step`.

        The next step's loss would show it, too late: the newest checkpoint would be of no use.

        Raises NonFiniteError on every rank if a weight is not finite on any.
        Comm: one all_reduce of a number over world.
        """
        self.recorder.enter("check")
        total = sum(self.ops.square_sum(stage.flat.master) for stage in self.stages.values())
        total, = agree(self.ops, self.comms, [seen(total, counts=False)], "check.weights")
        if not is_finite(total):
            raise self._not_finite(
                f"step {step}: its update made weights that are not finite: not saved",
                non_finite.report(self, "weights", lambda flat: flat.pieces(flat.master)))

    def _not_finite(self, what, where=()):
        """The error of a run whose numbers left the range of their type. where: more lines."""
        return NonFiniteError([
            f"{what}; try a smaller --lr (now {self.config.train.lr:g}) or a longer --warmup-steps"
            + (", or --dtype bfloat16: float16 ends at 65504" if self.loss_scale.dynamic else ""),
            *where])

    def forward(self, mbs, get_batch, caches=None) -> dict:
        """Run forward passes of some microbatches; return the last stage's outputs by microbatch.

        Ranks without the last stage return an empty dict. caches: see `Engine.run`.

        Outputs are sums of token losses, or logits (N, V/tp) for batches without targets.
        Comm: the sends and receives of the forward passes, and the layers' forward barriers.
        """
        self.recorder.enter("eval")
        program = self._lowered(forward_only(self.schedule, mbs))
        return self.engine.run(program, get_batch, training=False, caches=caches)

    def evaluate(self, rows) -> tuple[float, int]:
        """Mean loss in nats per token over one sweep of held-out rows, and the number of tokens.

        It changes nothing that a step reads. The sum is that of one rank on every layout, but for
        the order of its terms.

        Raises NonFiniteError on every rank when the loss is not finite. After the last update no
        later step would find it.
        Comm: one sweep of forward passes and one all_reduce over world.
        """
        total, count = 0.0, rows.rows_of_sweep() * self.config.model.targets_per_row
        for number in range(rows.num_sweeps()):
            batches, counted = rows.filled_sweep(number)
            losses = self.forward(range(len(batches)), batches.__getitem__)
            if self.comms.tp.index == 0:
                total += sum(loss for mb, loss in losses.items() if mb < counted)
        self.recorder.stage, self.recorder.mb = -1, -1
        total, = agree(self.ops, self.comms, [total], "eval.loss")
        if not is_finite(total):
            raise self._not_finite(f"held-out loss {total / count}: the weights are useless")
        return total / count, count
