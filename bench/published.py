"""The planner's errors on published training steps.

    python -m bench.published

For each source it prints the errors of step time, by the constants of the package and by constants
fitted without this source, compared with one constant utilization (MFU) for the source. It also
shows how good the choice among measured layouts is, and whether runs that took place are predicted
to fit. The tables are written to bench/results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations
from statistics import fmean, median

from bench import results
from bench.fit_planner import left_out
from bench.runs import Run, published_runs, read_runs
from mpipar.study.plan.memory import GIB, fullest

ONE_NODE = "vTrain, one node"
GROUPS = (  # title, a part of the column `source`, of `system`
    ("vTrain, many nodes", "ground_truth_multi", ""),
    ("Korthikanti et al.", "2205.05198", ""),
    ("PTD-P table 1", "2104.04473 table 1", ""),
    ("PTD-P table 2, 3-d", "2104.04473 table 2", "PTD-P"),
    ("PTD-P table 2, ZeRO-3", "2104.04473 table 2", "ZeRO-3"),
    ("NeMo, H100", "dgxc", "NeMo"),
    ("zero bubble", "2401.10241", ""),
    ("llm-foundry, FSDP", "llm-foundry", ""),
    ("torchtitan", "torchtitan", ""),
    ("MegaScale's Megatron-LM", "2402.15627", "Megatron-LM"),
    ("MegaScale", "2402.15627", "MegaScale"),
)


def group_of(run: Run) -> str:
    """Return the title of a run's source."""
    for title, source, system in GROUPS:
        if source in run.source and system in run.row["system"]:
            return title
    return "others"


def by_group(runs) -> dict[str, list[Run]]:
    """Return {title: runs}, in the order of GROUPS."""
    found = {title: [] for title, *_ in (*GROUPS, ("others",))}
    for run in runs:
        found[group_of(run)].append(run)
    return {title: runs for title, runs in found.items() if runs}


def mean_error(errors) -> float:
    """Return the mean absolute error, in percent."""
    return 100 * fmean(abs(error) for error in errors)


def constant_utilization(runs) -> float:
    """Return the mean error in percent of the best single utilization for all runs of a source."""
    ideal = [
        run.shape.step_flops(int(run.row["gbs"]))
        / (run.layout.ranks * float(run.row["peak_tflops"]) * 1e12)
        for run in runs
    ]
    return min(
        mean_error(floor / share / run.seconds - 1 for run, floor in zip(runs, ideal, strict=True))
        for share in (floor / run.seconds for run, floor in zip(runs, ideal, strict=True))
    )


def accuracy(runs) -> dict:
    """Return the errors of some runs, in percent."""
    errors = [run.error for run in runs]
    worst = max(runs, key=lambda run: abs(run.error))
    return {
        "runs": len(runs),
        "mean %": mean_error(errors),
        "median %": 100 * median(map(abs, errors)),
        "worst %": 100 * worst.error,
        "worst row": worst.row["id"],
        "bias %": 100 * fmean(errors),
        "one MFU for the source, mean %": constant_utilization(runs),
    }


def without_source(groups: dict[str, list[Run]]) -> dict[str, dict]:
    """Return each group's errors by constants that were fitted without its source, in percent."""
    errors = {key_of(run): error for run, error in left_out()}
    return {
        title: {
            "left out: mean %": mean_error(errors[key_of(run)] for run in runs),
            "left out: median %": 100 * median(abs(errors[key_of(run)]) for run in runs),
        }
        for title, runs in groups.items()
    }


def key_of(run: Run) -> tuple[str, str]:
    """Return the key of a row, since two files use the same numbers."""
    return run.source, run.row["id"]


def by_job(runs: Iterable[Run], *names: str) -> list[list[Run]]:
    """Return the runs of each job; a job is what these columns say."""
    jobs: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    for run in runs:
        jobs[tuple(run.row[name] for name in names)].append(run)
    return list(jobs.values())


def choice(runs, least: int) -> dict:
    """Return the regrets, in percent, of the jobs with at least `least` measured layouts.

    The regret is the measured step of the layout that the closed forms choose, over the shortest
    measured one, minus one.
    """
    found = []
    for own in by_job(runs, "model", "seq", "gbs", "n_gpu"):
        if len(own) >= least:
            chosen = min(own, key=lambda run: run.predicted)
            found.append(100 * (chosen.seconds / min(run.seconds for run in own) - 1))
    return {"jobs": len(found), "mean_percent": fmean(found), "worst_percent": max(found)}


def share(part: int, whole: int) -> str:
    """Return a count of a whole, and its percentage."""
    return f"{part} of {whole} ({100 * part / whole:.1f} %)"


def does_fit(run: Run, rows: int | None = None) -> bool:
    """Return whether a run is predicted to fit, with a microbatch of other rows if given."""
    layout = run.layout if rows is None else run.layout._replace(rows=rows)
    return fullest(run.shape, layout, run.stack).total <= run.machine.memory_gib * GIB


def memory(runs) -> dict:
    """Return what is predicted for the memory of runs that took place.

    too_large: of the runs that sum gradients over microbatches, how many would not fit with
    microbatches of twice the rows. No failed run is published, but those would have been faster.
    """
    many = [run for run in runs if "llm-foundry" in run.source and run.layout.num_microbatches > 1]
    measured = [run for run in runs if run.row["mem_gib"] and "2401.10241" in run.source]
    return {
        "runs": len(runs),
        "fit": sum(map(does_fit, runs)),
        "of_many_microbatches": len(many),
        "too_large": sum(not does_fit(run, 2 * run.layout.rows) for run in many),
        "worst_gib": max((run.gib - float(run.row["mem_gib"]) for run in measured), key=abs),
    }


def order_of_schedules(runs, least: float = 0.02) -> tuple[int, int]:
    """Return (right, all) pairs of one job's schedules whose measured steps differ notably.

    least: by this share. right: those that the closed forms order in the same way.
    """
    right = [
        (one.seconds < two.seconds) == (one.predicted < two.predicted)
        for own in by_job(runs, "model", "gbs")
        for one, two in combinations(own, 2)
        if abs(one.seconds / two.seconds - 1) > least
    ]
    return sum(right), len(right)


def answers(groups: dict[str, list[Run]]) -> list[dict]:
    """Return the predictions on choices, memory and the order of schedules, a row each."""
    right, pairs = order_of_schedules(groups["zero bubble"])
    found = memory(published_runs())
    rows = []
    for title, runs, least in (
        ("vTrain, many nodes", groups["vTrain, many nodes"], 2),
        ("vTrain, one node", read_runs("single_node.csv"), 3),
    ):
        one = choice(runs, least)
        rows += [
            {
                "question": f"{title}: {kind} regret of the choice among the layouts of a job",
                "answer": f"{one[kind + '_percent']:.1f} % of {one['jobs']} jobs",
            }
            for kind in ("mean", "worst")
        ]
    rows += [
        {
            "question": "runs that took place and are said to fit",
            "answer": share(found["fit"], found["runs"]),
        },
        {
            "question": "llm-foundry: microbatches of twice the rows that are said not to fit",
            "answer": share(found["too_large"], found["of_many_microbatches"]),
        },
        {
            "question": "zero bubble: largest difference from the measured memory",
            "answer": f"{found['worst_gib']:+.1f} GiB",
        },
        {
            "question": "zero bubble: pairs of schedules more than 2 % apart, in the right order",
            "answer": f"{right} of {pairs}",
        },
    ]
    return rows


def main() -> None:
    """Print the tables and write the files."""
    groups = by_group(published_runs())
    judged = groups | {"all": list(published_runs()), ONE_NODE: read_runs("single_node.csv")}
    blind = without_source(judged)
    accuracies = [
        {"source": title} | accuracy(runs) | blind[title] for title, runs in judged.items()
    ]
    for name, rows in (
        ("published", accuracies),
        ("published_answers", answers(groups)),
    ):
        print(f"{results.markdown_table(rows)}\n")
        results.write(results.ROOT / f"bench/results/{name}.json", "bench.published", rows)


if __name__ == "__main__":
    main()
