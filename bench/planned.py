"""The utilization that plans promise: every preset on every device with every stack.

    python -m bench.planned --write

Each job has the fewest of 8, 64 and 512 devices on which it fits. The best utilization published
for the device is shown beside it. Where a plan promises at least MARGIN points more, the last
columns have its layout, and the result of 1f1b, which most publishers run. Attention is counted
over the half of the square that tokens see, because rows have different lengths.
"""

from __future__ import annotations

from collections import defaultdict

from bench.program import Outcome, Program
from mpipar.config.presets import PRESETS
from mpipar.config.sections import build
from mpipar.plan.cluster import STACKS, load_cluster, machine_names
from mpipar.plan.published import published_runs, read_runs
from mpipar.plan.report import candidate_words, mfu
from mpipar.plan.search import Candidate, Kind, Question, search
from mpipar.plan.shape import Shape, utilization

RANKS = (8, 64, 512)
HEADROOM = 0.95  # of a device's memory
RULE = "causal"  # of the FLOPs that count
MARGIN = 3.0  # points above the best published utilization
SMALLEST = 1e8  # parameters: smaller presets are for tests


def best_published() -> dict[str, float]:
    """Return {machine: percent of its peak that the best published run reaches}."""
    found: dict[str, float] = defaultdict(float)
    for run in (*published_runs(), *read_runs("single_node.csv")):
        flops = run.shape.step_flops(int(run.row["gbs"]), RULE)
        percent = 100 * utilization(
            flops, run.seconds, run.layout.ranks, float(run.row["peak_tflops"])
        )
        found[run.cluster.name] = max(found[run.cluster.name], percent)
    return found


def planned(
    shape: Shape, machine: str, stack: str, batch_size: int, fixed: dict
) -> tuple[Question, Candidate] | None:
    """Return the first answer on the fewest devices; None if the job fits on none of RANKS."""
    cluster = load_cluster(machine)
    dtype = cluster.dtype_16
    for ranks in RANKS:
        question = Question(
            shape,
            (Kind(cluster, ranks, HEADROOM * cluster.memory_gib),),
            STACKS[stack].with_dtype(dtype),
            batch_size,
            fixed,
            RULE,
            dtype,
        )
        best = search(question, 1).best
        if best:
            return question, best[0]
    return None


def row_of(preset: str, machine: str, published: dict[str, float]) -> dict:
    """Return what plans promise with each stack; "-" where nothing fits.

    layout: of the first stack.
    """
    shape = Shape.of(build({"preset": preset}).model.completed())
    row = {"preset": preset, "machine": machine, "published %": published.get(machine, "-")}
    found = {
        stack: planned(shape, machine, stack, PRESETS[preset]["batch_size"], {}) for stack in STACKS
    }
    row |= {f"{stack} %": 100 * mfu(*one) if one else "-" for stack, one in found.items()}
    first, most = found[next(iter(STACKS))], published.get(machine)
    if first is None or most is None or 100 * mfu(*first) <= most + MARGIN:
        return row | {"layout": "", "1f1b %": "-"}
    question, best = first
    plain = search(question._replace(fixed={"schedule": "1f1b"}), 1).best
    return row | {
        "layout": f"{question.ranks} devices: {candidate_words(best)}",
        "1f1b %": 100 * mfu(question, plain[0]) if plain else "none fits",
    }


def measure(args, session) -> Outcome:
    """Return the rows of all machines."""
    published = best_published()
    models = {name: build({"preset": name}).model for name in PRESETS}
    presets = [
        name for name, model in models.items() if Shape.of(model.completed()).parameters > SMALLEST
    ]
    gpus = [name for name in machine_names() if name != "cpu"]
    return Outcome([row_of(preset, machine, published) for machine in gpus for preset in presets])


main = Program("planned", __doc__, measure, kept="bench/results/planned.json").started(__name__)
