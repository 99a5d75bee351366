"""`mpipar schedule --html FILE`: the schedule explorer, with given costs or those of a run.

The page holds the orders of every schedule for small counts; schedules with other counts, from a
file or from a run are added to them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mpipar.console import explorer, output
from mpipar.console.bubble import measured_costs
from mpipar.errors import UsageError
from mpipar.files.text import harmless
from mpipar.pipeline import csv_format
from mpipar.pipeline.costs import Costs
from mpipar.pipeline.draw import svg
from mpipar.pipeline.instructions import Schedule
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.pipeline.simulate import simulate
from mpipar.trace import pop, trace_file

FIRST, SECOND = "1f1b", "zb-h1"  # what the page shows if no schedule is named
MOST_DRAWN = 1 << 12  # forward passes of a schedule: a browser draws three boxes for each


def write_page(args, costs: Costs) -> None:
    """Write the page that `schedule.Arguments` describe, and print where it is.

    Raises UsageError, DataError if a run has no trace, OutputError.
    """
    title, unit, measured = "Pipeline schedules", "", None
    if args.from_run is not None:
        schedule, costs, measured = of_run(args.from_run)
        own = {"title": f"{schedule.name} of {run_name(args.from_run)}"}
        title, unit = f"{title}: {run_name(args.from_run)}", " ms"
    elif args.from_csv is not None:
        schedule = csv_format.read_csv(Path(args.from_csv))
        own = {"title": harmless(schedule.name)}
        if schedule.wired:
            raise UsageError(
                f"{args.from_csv} has sends and receives, but the page shows passes:"
                " write the file with --csv-format compute_only"
            )
    else:
        schedule = make_schedule(args.name or FIRST, args.pp, args.num_microbatches, args.chunks)
        own = (
            None
            if is_known(schedule)
            else {"title": f"{schedule.name}, {schedule.pp_size} workers"}
        )
    check_size(schedule)
    chunks = schedule.num_stages // schedule.pp_size
    worker = costs_of_a_worker(costs, schedule)
    second = SECOND if schedule.name != SECOND else FIRST
    if schedule.pp_size not in explorer.RANKS or (
        schedule.num_microbatches not in explorer.MICROBATCHES
    ):
        second = ""  # the page has none with these counts
    start = {
        "first": "own" if own else schedule.name,
        "second": "measured" if measured else second,
        "p": schedule.pp_size,
        "m": schedule.num_microbatches,
        "chunks": chunks,
        "share": "worker",
        "overlap": float(costs.overlap),
        "hop": rounded(costs.latency),
        **{name: rounded(getattr(worker, name)) for name in "fiw"},
    }
    data = {
        "title": title,
        "unit": unit,
        "start": start,
        "measured": measured,
        "own": own and own | {"schedule": explorer.schedule_facts(schedule)},
    }
    drawing = svg(simulate(schedule, worker.divided(chunks)), f"{schedule.name}, one step")
    page = explorer.build(data, explorer.known_orders(), drawing)
    output.write_text(Path(args.html), page)
    print(f"{harmless(args.html)}: open it in a browser")


def is_known(schedule: Schedule) -> bool:
    """Return whether the page contains this order anyway."""
    chunks = schedule.num_stages // schedule.pp_size
    return (
        schedule.pp_size in explorer.RANKS
        and schedule.num_microbatches in explorer.MICROBATCHES
        and chunks in explorer.chunk_counts(schedule.name)
    )


def check_size(schedule: Schedule) -> None:
    """Raise UsageError if a browser would be slow to draw the schedule."""
    count = schedule.num_stages * schedule.num_microbatches
    if count > MOST_DRAWN:
        raise UsageError(
            f"--html draws at most {MOST_DRAWN:,} forward passes, and this schedule"
            f" has {count:,}: use fewer workers, chunks or microbatches"
        )


def costs_of_a_worker(costs: Costs, schedule: Schedule) -> Costs:
    """Return the costs with single values of f, i and w: those given, or the mean over workers."""
    sums = {name: getattr(costs, name) for name in "fiw"}
    return replace(
        costs,
        **{
            name: sum(value) / schedule.pp_size
            for name, value in sums.items()
            if isinstance(value, tuple)
        },
    )


def rounded(value) -> float:
    """Return a number for a field of the page."""
    return float(f"{float(value):.4g}")


def run_name(folder: str) -> str:
    """Return the name of a run folder."""
    return harmless(Path(folder).resolve().name)


def of_run(folder: str) -> tuple[Schedule, Costs, dict]:
    """Return a traced run's schedule, its costs in milliseconds, and its passes for the page."""
    trace = trace_file.read(folder)
    if trace.meta["layout"]["pp"] == 1:
        raise UsageError(
            f"--from-run {harmless(folder)}: the run has one pipeline rank, and so no"
            " schedule to show; train with --layout pp=2 or more"
        )
    with trace_file.contradictions_are_data_errors(folder):
        schedule = trace.schedule()
        seconds = measured_costs(pop.pass_facts(trace), schedule.num_stages)
        by_stage = {name: tuple(1e3 * value for value in getattr(seconds, name)) for name in "fiw"}
        step, passes = pop.median_passes(trace)
        start = min(span.start_ns for own in passes for span in own)
        rows = [
            [
                [
                    (span.start_ns - start) * 1e-6,
                    (span.end_ns - start) * 1e-6,
                    f"{span.stage}{span.kind}{span.mb}",
                ]
                for span in own
            ]
            for own in passes
        ]
        costs = Costs(**by_stage, latency=pop.hop_ns(trace) * 1e-6)
    name = run_name(folder)
    words = (
        f"measured in step {step} of {name}; who waited for a message is in its trace:"
        f" mpipar trace {harmless(folder)}"
    )
    return (
        schedule,
        costs,
        {
            "title": f"{name}, measured",
            "costs": by_stage,
            "passes": rows,
            "words": "\n".join([words, *trace.remarks()]),
        },
    )
