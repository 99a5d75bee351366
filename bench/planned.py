"""The utilization that plans promise: every preset on every device by every stack.

    python -m bench.planned --json bench/results/planned.json

Each job has the fewest of 8, 64 and 512 devices on which it fits. Beside it stands the best
utilization that was published for the device. Where a plan promises MARGIN points more, the last
columns have its layout, and what 1f1b alone would give: most publishers run that.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from bench import results
from mpipar.config.presets import PRESETS
from mpipar.config.sections import build
from mpipar.plan.cluster import STACKS, load_cluster, machine_names
from mpipar.plan.published import published_runs, read_runs
from mpipar.plan.report import candidate_words, mfu
from mpipar.plan.search import Candidate, Kind, Question, search
from mpipar.plan.shape import Shape

RANKS = (8, 64, 512)
HEADROOM = 0.95  # of a device's memory
MARGIN = 3.0  # points above the best published utilization
SMALLEST = 1e8  # parameters: smaller presets are for tests


def best_published() -> dict[str, float]:
    """{machine: percent of its peak that the best published run reaches}."""
    found: dict[str, float] = defaultdict(float)
    for run in (*published_runs(), *read_runs("single_node.csv")):
        found[run.cluster.name] = max(found[run.cluster.name], 100 * run.mfu)
    return found


def planned(shape: Shape, machine: str, stack: str, batch_size: int,
            fixed: dict) -> tuple[Question, Candidate] | None:
    """The first answer on the fewest devices; None where it fits on none of RANKS."""
    cluster = load_cluster(machine)
    dtype = cluster.dtype_16
    for ranks in RANKS:
        question = Question(shape, (Kind(cluster, ranks, HEADROOM * cluster.memory_gib),),
                            STACKS[stack].with_dtype(dtype), batch_size, fixed, dtype=dtype)
        best = search(question, 1).best
        if best:
            return question, best[0]
    return None


def row_of(preset: str, machine: str, stack: str, published: dict[str, float]) -> dict | None:
    """What a plan promises; None where nothing fits."""
    config = build({"preset": preset})
    model, batch_size = config.model.completed(), PRESETS[preset]["batch_size"]
    found = planned(Shape.of(model), machine, stack, batch_size, {})
    if found is None:
        return None
    question, best = found
    percent, most = 100 * mfu(question, best), published.get(machine)
    row = {"preset": preset, "machine": machine, "stack": stack, "ranks": question.ranks,
           "MFU %": percent, "published %": most or "-", "points above": "-", "1f1b: MFU %": "-",
           "layout": ""}
    if most and percent > most:
        row["points above"] = percent - most
    if most and percent > most + MARGIN:
        plain = search(question._replace(fixed={"schedule": "1f1b"}), 1).best
        row |= {"layout": candidate_words(best),
                "1f1b: MFU %": 100 * mfu(question, plain[0]) if plain else "none fits"}
    return row


def main() -> None:
    """Print the table and write the file."""
    parser = argparse.ArgumentParser(prog="bench.planned", description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    published = best_published()
    presets = [name for name in PRESETS if (config := build({"preset": name})).model.model ==
               "decoder" and Shape.of(config.model.completed()).parameters > SMALLEST]
    rows = []
    for machine in machine_names():
        for preset in presets:
            for stack in STACKS:
                row = row_of(preset, machine, stack, published)
                if row:
                    rows.append(row)
    print(results.text_table(rows))
    if args.json:
        results.write(args.json, "bench.planned", rows)


if __name__ == "__main__":
    main()
