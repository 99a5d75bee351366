"""Fits the planner's constants to measured products and steps, and tests them on other sources.

    python -m bench.fit_planner

prints the constants as they are written in mpipar/study/plan/machines/*.toml and in STACKS of
mpipar/study/plan/job.py. Those of products come from a device's own table only; those of stacks
from steps. Then the stacks are fitted again without each source in turn, and the errors printed are
those of the steps that were left out. No constant belongs to a source, a model or a row. SciPy is
needed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from bench.runs import Run, published_runs, read_rows, read_runs, stack_name
from mpipar.study.plan.job import Constants

PRODUCTS = {"a100-80": "A100-80-SXM", "h100": "H100-SXM", "b200": "B200-SXM"}
FIRST = {"products": 0.9, "elementwise": 1.0, "attention": 1.0, "starts_us": 300.0}
CLOSE = 0.05  # errors beyond this count linearly: some measurements are outliers
TRUST = 0.15  # how strongly a constant is tied to its first value
EVERY, ONE_NODE = 5, 0.15  # of the steps on one node, and their weight
PAPERS = (
    "vTrain",
    "2104.04473",
    "2205.05198",
    "2401.10241",
    "2402.15627",
    "llm-foundry",
    "torchtitan",
    "dgxc",
    "README images",
)  # parts of the column `source`


def paper_of(run: Run) -> str:
    """Return the source that is left out as a whole: all tables of a paper or of a repository."""
    return next((part for part in PAPERS if part in run.source), "others")


def fit_products(device: str) -> dict[str, float]:
    """Fit start, rate and bytes per second of a product, over the shapes of a training step."""
    from scipy.optimize import least_squares

    rows = [
        row
        for row in read_rows("measured_curves.csv")
        if row["device"] == device
        and row["op"].startswith("gemm_bfloat16")
        and int(row["m"]) >= 512
    ]
    sizes = [tuple(float(row[name]) for name in "mnk") for row in rows]
    seconds = [
        2 * m * n * k / float(row["tflops"]) / 1e12
        for row, (m, n, k) in zip(rows, sizes, strict=True)
    ]

    def misfit(x):
        start, rate, memory = map(math.exp, x)
        return [
            math.log(
                (start + 2 * m * n * k / rate + 2 * (m * k + k * n + m * n) / memory) / measured
            )
            for (m, n, k), measured in zip(sizes, seconds, strict=True)
        ]

    found = least_squares(misfit, [math.log(one) for one in (5e-6, 5e14, 3e12)], loss="soft_l1")
    start, rate, memory = map(math.exp, found.x)
    return {
        "product_us": start * 1e6,
        "product_tflops": rate / 1e12,
        "product_gbytes_s": memory / 1e9,
    }


def trust(run: Run) -> float:
    """Return the weight of a run: high if its source states everything, low without a layout."""
    missing = run.row["missing"]
    if not missing:
        return 2.0
    return 0.3 if "recompute" in missing and "mbs" in missing else 1.0


def training_runs() -> list[tuple[Run, float]]:
    """Return (run, weight) of the measured steps from which the constants are fitted."""
    return [(run, trust(run)) for run in published_runs()] + [
        (run, ONE_NODE) for run in read_runs("single_node.csv")[::EVERY]
    ]


Known = dict[tuple[str, str], dict[str, float]]  # {(stack, generation of machines): constants}


def kind_of(run: Run) -> tuple[str, str]:
    """Return the stack of a run, and the generation of its machine, which have constants."""
    return stack_name(run.row), run.machine.efficiency


def with_constants(run: Run, constants: dict[str, float]) -> float:
    """Return the step of a run with other constants of its stack."""
    stack = replace(run.stack, sets=((run.machine.efficiency, Constants(**constants)),))
    return run.predicted_with(stack)


def fit_stack(runs: list[tuple[Run, float]]) -> dict[str, float]:
    """Return the constants of a stack that bring its predicted steps closest to measured ones."""
    from scipy.optimize import least_squares

    start = [math.log(FIRST[name]) for name in Constants._fields]

    def misfit(x):
        constants = dict(zip(Constants._fields, map(math.exp, x), strict=True))
        steps = [
            weight * math.log(with_constants(run, constants) / run.seconds) for run, weight in runs
        ]
        return steps + [TRUST * (now - before) for now, before in zip(x, start, strict=True)]

    found = least_squares(misfit, start, loss="soft_l1", f_scale=CLOSE, max_nfev=12)
    return dict(zip(Constants._fields, map(math.exp, found.x), strict=True))


def fit_stacks(runs: Iterable[tuple[Run, float]]) -> Known:
    """Return the constants of each stack and generation among the runs."""
    mine = defaultdict(list)
    for run, weight in runs:
        mine[kind_of(run)].append((run, weight))
    return {kind: fit_stack(own) for kind, own in mine.items()}


def nearest(known: Known, run: Run) -> dict[str, float]:
    """Return a run's constants, if need be those of the same stack on another machine."""
    stack, _ = kind = kind_of(run)
    return known.get(kind) or next(one for (name, _), one in known.items() if name == stack)


def left_out() -> list[tuple[Run, float]]:
    """Return (run, its error by constants that were fitted without its source) of every run."""
    runs, found, known = training_runs(), [], fit_stacks(training_runs())
    judged = [*published_runs(), *read_runs("single_node.csv")]
    for paper in dict.fromkeys(map(paper_of, judged)):
        own = [run for run in judged if paper_of(run) == paper]
        kinds = set(map(kind_of, own))
        refit = [one for one in runs if paper_of(one[0]) != paper and kind_of(one[0]) in kinds]
        without = {kind: one for kind, one in known.items() if kind not in kinds}
        without |= fit_stacks(refit)
        found += [
            (run, with_constants(run, nearest(without, run)) / run.seconds - 1) for run in own
        ]
    return found


def main() -> None:
    """Print all constants."""
    for name, device in PRODUCTS.items():
        for constant, value in fit_products(device).items():
            print(f"{name}.{constant} = {value:.4g}")
    for kind, constants in fit_stacks(training_runs()).items():
        print(f"{' on '.join(kind)}: {', '.join(f'{one:.3g}' for one in constants.values())}")


if __name__ == "__main__":
    main()
