"""The idle time of layer-wise parallelism that each schedule recovers: measured and simulated.

    mpiexec -n 4 python -m bench.schedules [--num-microbatches 8] [--cell-ms 25] [--json FILE]

The real engine runs the real programs and sends real messages, but a pass sleeps for its cost
instead of computing, so four workers on two cores measure the order of the work, not the cores.

Every schedule gets the same model. `--cell-ms` is the time of a forward pass through all layers of
a worker. A schedule that cuts these layers into chunks has more and shorter passes.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from bench.program import Outcome, Program
from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.groups import Comms
from mpipar.comm.objects import gather_numbers
from mpipar.comm.recorder import Recorder
from mpipar.pipeline.engine import Engine, WholeWeights
from mpipar.pipeline.lowering import lower
from mpipar.pipeline.schedules.catalog import SCHEDULES, make_schedule, schedule_problems
from mpipar.study.schedules.simulate import Costs, simulate

SHAPE = (4, 8)  # of an activation: small, because messages are not measured here
TOLERANCE = 0.05  # of the simulated makespan


class Sleeper:
    """Replaces a Stage: F, I and W take `seconds` each, a full backward takes I and W."""

    def __init__(self, ops, seconds: float, is_last: bool):
        self.ops, self.seconds, self.is_last = ops, seconds, is_last

    def in_shape(self, batch):
        return SHAPE

    def _pass(self, seconds: float):
        time.sleep(seconds)
        return self.ops.zeros(SHAPE)

    def forward(self, x, stash, engine):
        y = self._pass(self.seconds)
        return 0.0 if self.is_last else y

    def backward(self, dy, stash, engine):
        return self._pass(2 * self.seconds)

    def backward_input(self, dy, stash, engine):
        return self._pass(self.seconds)

    def backward_weight(self, stash, engine):
        self._pass(self.seconds)


class NoSync:
    """Replaces gradient sums, which this benchmark does not need."""

    def nothing(self, *stage):
        pass

    start = test = nothing


def one_schedule(world, ops, name, num_microbatches: int, cell: float, repeats: int):
    """Return measured and simulated makespan and busy share of a schedule: a row on world rank 0.

    Comm: the schedule's messages, a barrier before each repetition, one gather.
    """
    recorder, grid = Recorder(1 << 16), Grid(world.rank, {"pp": world.size})
    schedule = make_schedule(name, world.size, num_microbatches)
    comms = Comms(grid, ops, recorder, world)
    last = schedule.num_stages - 1
    pass_seconds = cell * world.size / schedule.num_stages  # a chunk is that part of the layers
    stages = {
        stage: Sleeper(ops, pass_seconds, stage == last)
        for stage in schedule.stages_by_rank[grid.group_rank("pp")]
    }
    engine = Engine(ops, stages, schedule, comms["pp"], recorder, NoSync(), WholeWeights())
    program = lower(schedule, grid.group_rank("pp"))
    seconds, busy = [], []
    for _ in range(repeats):
        recorder.reset_counters()
        comms.world.barrier("start")
        start = time.perf_counter()
        engine.run(program, lambda mb: None)
        seconds.append(time.perf_counter() - start)
        busy.append(sum(recorder.busy_ns.values()) * 1e-9)
    comms.close()
    by_rank = gather_numbers(world, np.array([seconds, busy]))  # (ranks, 2, repeats)
    if by_rank is None:
        return None
    makespans = by_rank[:, 0].max(0)
    median = statistics.median(makespans)
    timeline = simulate(schedule, Costs(f=pass_seconds, i=pass_seconds, w=pass_seconds))
    return {
        "schedule": name,
        "step_ms": median * 1e3,
        "simulated_ms": timeline.makespan * 1e3,
        "measured_over_simulated": median / timeline.makespan,
        "busy_simulated": statistics.mean(timeline.busy_share),
        "busy_measured": float((by_rank[:, 1] / makespans).mean()),
    }


def measure(args, session) -> Outcome | int:
    """Run all schedules that take these counts; code 1 if one is over 5 % off its simulation."""
    world, ops = session.world, ops_module.make("cpu", "float32")
    rows = [
        one_schedule(world, ops, name, args.num_microbatches, args.cell_ms * 1e-3, args.repeats)
        for name in SCHEDULES
        if not schedule_problems(name, world.size, args.num_microbatches)
    ]
    if world.rank > 0:
        return 0
    naive = next(row for row in rows if row["schedule"] == "naive")
    idle = 1 - naive["busy_measured"]
    rows.sort(key=lambda row: row["step_ms"])
    for row in rows:
        row["idle_recovered"] = 1 - (1 - row["busy_measured"]) / idle
    facts = {
        "ranks": world.size,
        "num_microbatches": args.num_microbatches,
        "cell_ms": args.cell_ms,
    }
    off = any(abs(row["measured_over_simulated"] - 1) > TOLERANCE for row in rows)
    return Outcome(rows, facts, code=int(off))


main = Program(
    "schedules",
    __doc__,
    measure,
    together=True,
    counts={
        "--num-microbatches": (8, "of a step"),
        "--repeats": (3, "repetitions; the median is taken"),
    },
    add=lambda parser: parser.add_argument(
        "--cell-ms", type=float, default=25.0, help="forward pass of a worker (25)"
    ),
).started(__name__)
