"""Where a step's time goes, by kind of function: layouts beside ranks that do not talk.

    mpiexec -n 2 python -m bench.step.parts --batch-size 16 --repeats 7
    mpiexec -n 2 python -m bench.step.parts --all-reduce mpi --layers 2 --json FILE

All layouts take turns in the same processes, as in bench.step, with each array function timed. On
`apart` every rank makes a whole step of its own at the same time, and times are divided by the
number of ranks: the least that these cores need. dp_more and tp_more are what a layout needs beyond
that. Their sum over the table is what the layout loses, so each row says which part of the loss is
its own: functions that are not divided, products that are narrower, sums that travel.

Milliseconds of a step: medians over the repetitions, then means over the ranks. Products include
what is fused into them. `communication` is inside barriers, waiting included. `update` is clipping
and the optimizer, with their functions. `between functions` is Python, and all that no other row
has.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np

from bench.program import Outcome, Program
from bench.step.sides import OurSide, add_sizes, configure, rows_of
from mpipar.comm.facts import gather_facts
from mpipar.comm.hosts import quiet_barrier
from mpipar.comm.record import Recorder
from mpipar.config.run import SUMS
from mpipar.ops import make
from mpipar.ops.timed_ops import TimedOps

APART, LAYOUTS = "apart", ("dp", "tp")
WARM_UP_STEPS = 2
KINDS = {
    "matmul": "products",
    "attention": "attention",
    "norm": "norms and residual sums",
    "residual": "norms and residual sums",
    "gelu": "activation function",
    "swiglu": "activation function",
    "relu": "activation function",
}
OTHERS, BETWEEN = "other functions", "between functions"
COMMUNICATION, UPDATE = "communication", "update"


def kind_of(function: str) -> str:
    """Return what a function of `ops` belongs to: the first of KINDS that is in its name."""
    return next((kind for part, kind in KINDS.items() if part in function), OTHERS)


def timed_side(args, layout: dict, rows, world) -> OurSide:
    """Return a side whose functions are timed. Comm: makes the layout's groups."""
    config, recorder = configure(args, layout, world.size), Recorder()
    ops = TimedOps(make(args.device, args.dtype), recorder)
    ops.active = True
    return OurSide(config, rows, ops, world, recorder)


def one_step(side: OurSide, step: int) -> dict[str, float]:
    """Return the seconds of a step by part. Comm: the side's."""
    recorder = side.recorder
    recorder.operations.clear()
    before, start = recorder.comm_ns(), time.perf_counter()
    side.forward_backward(step)
    found = {COMMUNICATION: (recorder.comm_ns() - before) * 1e-9}
    for _, function, begin, end, *_ in recorder.operations:
        kind = kind_of(function)
        found[kind] = found.get(kind, 0.0) + (end - begin) * 1e-9
    middle = time.perf_counter()
    side.update(step)
    return found | {
        BETWEEN: middle - start - sum(found.values()),
        UPDATE: time.perf_counter() - middle,
    }


def measure(args, session) -> Outcome | int:
    """Return milliseconds by part and layout, on world rank 0.

    Comm: quiet barriers, the layouts' own, and a gather.
    """
    world, alone = session.world, SimpleNamespace(rank=0, size=1)
    rows = rows_of(args)
    sides = {APART: timed_side(args, {}, rows, alone)} | {
        axis: timed_side(args, {axis: world.size, "all_reduce": args.all_reduce}, rows, world)
        for axis in LAYOUTS
    }
    taken: dict[str, list] = {name: [] for name in sides}
    for step in range(1, WARM_UP_STEPS + args.repeats + 1):
        for name, side in sides.items():
            quiet_barrier(world)
            found = one_step(side, step)
            if step > WARM_UP_STEPS:
                taken[name].append(found)
    quiet_barrier(world)
    mine = {
        name: {
            part: float(np.median([step.get(part, 0.0) for step in steps]))
            for part in dict.fromkeys(part for step in steps for part in step)
        }
        for name, steps in taken.items()
    }
    facts = gather_facts(world, mine)
    return (
        0
        if facts is None
        else Outcome(
            table(facts),
            {
                "ranks": world.size,
                **{name: value for name, value in vars(args).items() if name != "json"},
            },
        )
    )


def table(ranks: list[dict]) -> list[dict]:
    """Return a row for each part, those that a layout pays most for first, and their sum."""
    mean = {
        name: {
            part: sum(rank[name].get(part, 0.0) for rank in ranks)
            / len(ranks)
            * 1e3
            / (len(ranks) if name == APART else 1)
            for rank in ranks
            for part in rank[name]
        }
        for name in ranks[0]
    }
    rows = []
    for part in dict.fromkeys(part for parts in mean.values() for part in parts):
        ms = {name: parts.get(part, 0.0) for name, parts in mean.items()}
        rows.append(
            {"part": part}
            | {f"{name}_ms": each for name, each in ms.items()}
            | {f"{axis}_more": ms[axis] - ms[APART] for axis in LAYOUTS}
        )
    rows.sort(key=lambda row: -max(row[f"{axis}_more"] for axis in LAYOUTS))
    return [
        *rows,
        {"part": "all"}
        | {column: sum(row[column] for row in rows) for column in rows[0] if column != "part"},
    ]


def check(args, parser) -> None:
    """Refuse an algorithm that does not exist; set what `configure` takes beside the flags."""
    args.device, args.dtype = "cpu", "float32"
    if args.all_reduce not in SUMS:
        parser.error(f"--all-reduce: no {args.all_reduce!r}; choose from {', '.join(SUMS)}")


def add(parser) -> None:
    """Add the flags of the model, and that of the algorithm."""
    add_sizes(parser)
    parser.add_argument(
        "--all-reduce",
        default="window",
        metavar="NAME",
        help="train's --all-reduce of the layouts (window)",
    )


main = Program("step.parts", __doc__, measure, together=True, add=add, check=check).started(
    __name__
)
