"""Find the planner's constants from measured products, collectives and steps.

    python -m bench.fit_planner

prints them as they stand in mpipar/plan/machines/*.toml, in STACKS of mpipar/plan/cluster.py and in
mpipar/plan/step_time.py. Products and collectives of a device come from its own tables alone. The
constants of stacks, and what has no table, come from steps. No constant belongs to a source, a
model or a row. SciPy is needed, which scikit-learn brings along.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace

from mpipar.plan import block_time, collectives, step_time
from mpipar.plan import cluster as clusters
from mpipar.plan.published import read_rows, read_runs

PRODUCTS = {"a100-80": "A100-80-SXM", "h100": "H100-SXM", "b200": "B200-SXM"}
CONSTANTS = ("products", "elementwise", "attention")
OF_STACKS = [(stack, name) for stack in (
    "megatron", "megatron-unfused", "zero-bubble", "deepspeed", "fsdp", "torchtitan")
    for name in CONSTANTS]
OF_MACHINES = [("a100-80", "layer_us"), ("h100", "layer_us")]
OF_STEPS = [(collectives, "NETWORK"), (collectives, "SHARED"), (block_time, "SLOWED"),
            (step_time, "UPDATE")]
LEFT_OUT = ("r0011", "r0012", "r0013", "r0014", "r0015", "r0016")  # DeepSpeed ZeRO-3 of 2021
CLOSE = 0.05  # errors beyond this count linearly: some measurements are outliers
TRUST = 0.15  # how hard a constant is held to its first value
SINGLE_NODE = 0.05  # weight of a small model's step on one node


def table_rows(device: str, operation: str) -> list[dict[str, str]]:
    """The measured rows of an operation on a device."""
    return [row for row in read_rows("measured_curves.csv")
            if row["device"] == device and row["op"].startswith(operation)]


def fit_products(device: str) -> dict[str, float]:
    """Start, rate and bytes per second of a product, over the shapes of a training step."""
    from scipy.optimize import least_squares
    rows = [row for row in table_rows(device, "gemm_bfloat16") if int(row["m"]) >= 512]
    sizes = [tuple(float(row[name]) for name in "mnk") for row in rows]
    seconds = [2 * m * n * k / float(row["tflops"]) / 1e12
               for row, (m, n, k) in zip(rows, sizes, strict=True)]

    def misfit(x):
        start, rate, memory = map(math.exp, x)
        return [math.log((start + 2 * m * n * k / rate + 2 * (m * k + k * n + m * n) / memory)
                         / measured)
                for (m, n, k), measured in zip(sizes, seconds, strict=True)]

    found = least_squares(misfit, [math.log(one) for one in (5e-6, 5e14, 3e12)], loss="soft_l1")
    start, rate, memory = map(math.exp, found.x)
    return {"product_us": start * 1e6, "product_tflops": rate / 1e12,
            "product_gbytes_s": memory / 1e9}


def trust(run) -> float:
    """The weight of a run: more if its source states everything, less if not even the layout."""
    missing = run.row["missing"]
    if not missing:
        return 2.0
    return 0.3 if "recompute" in missing and "mbs" in missing else 1.0


def training_runs():
    """(run, weight) of the measured steps that the constants are found from."""
    found = [(run, trust(run)) for run in read_runs("published.csv")
             if run.row["id"] not in LEFT_OUT]
    return found + [(run, SINGLE_NODE) for run in read_runs("single_node.csv")]


@contextmanager
def constants(values: dict):
    """The planner with other constants, for the length of a block."""
    stacks, machines = dict(clusters.STACKS), {}
    before = {(module, name): getattr(module, name) for module, name in OF_STEPS}
    for (owner, name), value in values.items():
        if owner in stacks:
            stacks[owner] = replace(stacks[owner], **{name: value})
        elif isinstance(owner, str):
            machines.setdefault(owner, {})[name] = value
        else:
            setattr(owner, name, value)
    try:
        yield stacks, machines
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


def predicted(run, stacks, machines) -> float:
    """A run's step with other constants; devices of one generation share theirs."""
    known = {id(one): name for name, one in clusters.STACKS.items()}
    name = known.get(id(run.stack), "fsdp")  # a stack of 16-bit states is a copy of fsdp
    base = stacks[name]
    stack = replace(run.stack, **{part: getattr(base, part) for part in CONSTANTS})
    generation = "h100" if run.cluster.name.startswith("h100") else "a100-80"
    cluster = replace(run.cluster, **machines[generation])
    return step_time.step_time(run.shape, run.layout, cluster, stack).total


def first_values() -> dict:
    """Where the search begins: a stack that makes of a machine what its tables promise."""
    values = dict.fromkeys((*OF_STACKS, *OF_STEPS), 1.0)
    return values | dict.fromkeys(OF_MACHINES, 500.0)


def fit_steps(runs) -> dict:
    """The constants that make the runs' predicted steps closest to the measured ones."""
    from scipy.optimize import least_squares
    first = first_values()
    start = [math.log(value) for value in first.values()]

    def misfit(x):
        values = dict(zip(first, map(math.exp, x), strict=True))
        with constants(values) as (stacks, machines):
            steps = [weight * math.log(predicted(run, stacks, machines) / run.seconds)
                     for run, weight in runs]
        return steps + [TRUST * (now - before) for now, before in zip(x, start, strict=True)]

    found = least_squares(misfit, start, loss="soft_l1", f_scale=CLOSE, max_nfev=40)
    return dict(zip(first, map(math.exp, found.x), strict=True))


def main() -> None:
    """Print all constants."""
    for name, device in PRODUCTS.items():
        for constant, value in fit_products(device).items():
            print(f"{name}.{constant} = {value:.4g}")
    for (owner, name), value in fit_steps(training_runs()).items():
        print(f"{owner if isinstance(owner, str) else owner.__name__}.{name} = {value:.3g}")


if __name__ == "__main__":
    main()
