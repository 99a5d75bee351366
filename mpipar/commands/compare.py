"""`mpipar compare RUN_A RUN_B`: what got slower from A to B, ranked by cause; no MPI.

Each side may be several launches of one run, separated by commas.
"""

import os
import textwrap
from dataclasses import dataclass

from mpipar.comm.grid import Grid
from mpipar.commands.command import Command, Context
from mpipar.config.reading import values_of
from mpipar.config.resolve import resolve
from mpipar.config.sections import build
from mpipar.config.setting import positional, setting, switch
from mpipar.console.tables import table
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK, DataError, UsageError
from mpipar.files.bounded import problems_as, read_text
from mpipar.files.text import brief, counted, harmless
from mpipar.plan import machine_file
from mpipar.plan.predict import predict
from mpipar.plan.step import step_parts
from mpipar.trace import comparison, trace_file
from mpipar.trace.analysis import analyse
from mpipar.trace.comparison import Side

MOST = 12  # rows per table
WIDTH = 100  # characters per line of text


@dataclass(frozen=True)
class Arguments:
    """The two run folders, and whether the exit code depends on the result."""

    run_a: str = positional(
        "RUN_A",
        "run folder of mpipar train --trace, or several with the same"
        " settings, separated by commas",
    )
    run_b: str = positional("RUN_B", "the run to compare with it, or several launches of it")
    machine: str | None = setting(
        None,
        "cost model of bench.calibrate: report how much of the difference it explains, part"
        " by part",
        metavar="FILE",
    )
    check: bool = switch("exit with 1 if steps of B are slower than those of A beyond the spread")


def run(context: Context) -> int:
    """Print the comparison; with --check return 1 if B's steps are slower beyond the spread.

    Raises DataError if a run has no trace, and what `explanation` raises, before printing anything.
    """
    args = context.args
    names = [launches(text) for text in (args.run_a, args.run_b)]
    machine = machine_file.load(args.machine) if args.machine is not None else None
    sides = [[trace_file.read(folder) for folder in side] for side in names]
    folders = [folder for side in names for folder in side]
    with trace_file.contradictions_are_data_errors(*folders):
        before, after = (list(map(analyse, side)) for side in sides)
    explained = explanation(machine, before, after) if machine is not None else ""
    with trace_file.contradictions_are_data_errors(*folders):
        print_runs(before, after)
        slower = print_step(before, after) == "slower"
        print_causes(before, after)
    print(explained, end="")
    return EXIT_CHECK_FAILED if args.check and slower else EXIT_OK


def launches(text: str) -> list[str]:
    """Return the run folders that one argument names; a folder's own name may contain a comma.

    Raises UsageError if one is named twice: it is not a second launch.
    """
    several = [] if os.path.isdir(text) else [folder for folder in text.split(",") if folder]
    places = [os.path.realpath(folder) for folder in several]
    if twice := [
        folder for folder, place in zip(several, places, strict=True) if places.count(place) > 1
    ]:
        raise UsageError(
            f"{', '.join(map(harmless, twice))}: one launch, named {len(twice)} times;"
            " name each launch once"
        )
    return several or [text]


def print_runs(before: Side, after: Side) -> None:
    """Print what is compared, and which settings differ."""
    sides = (("A", before), ("B", after))
    for name, side in sides:
        for one in side:
            trace = one.trace
            print(
                f"{name}: {harmless(str(trace.folder))}: {trace.size()},"
                f" {trace.meta['schedule']['name']}, {counted(trace.num_steps, 'traced step')}"
            )
    first, *others = [one.trace for one in (*before, *after)]
    lines = [
        f"   {brief(key)}: {brief(str(old))} -> {brief(str(new))}"
        for other in others
        for key, old, new in comparison.settings_that_differ(first.folder, other.folder)
    ]
    for line in dict.fromkeys(lines):
        print(line)
    if any(other.meta["layout"] != first.meta["layout"] for other in others):
        print("   the layouts differ: rank 1 of A and rank 1 of B do different work")
    remarks: dict[str, list[str]] = {}
    for name, side in sides:
        for remark in dict.fromkeys(text for one in side for text in one.trace.remarks()):
            remarks.setdefault(remark, []).append(name)
    for remark, names in remarks.items():
        print(
            textwrap.fill(
                f"{' and '.join(names)}: {remark}",
                WIDTH,
                initial_indent="   ",
                subsequent_indent="   ",
            )
        )
    timed = [
        name for name, side in sides if any(one.trace.meta.get("per_operation") for one in side)
    ]
    if len(timed) == 1:
        print(
            f"   only {timed[0]} was traced with --trace-ops: its causes of waiting are more"
            " specific, so they do not match the other's"
        )
    if min(one.trace.num_steps for one in (*before, *after)) < comparison.LEAST_STEPS:
        print(
            f"   fewer than {comparison.LEAST_STEPS} traced steps: how much steps vary by"
            " themselves is unknown; trace more, as in --trace 10:14"
        )


def print_step(before: Side, after: Side) -> str:
    """Print how long a step takes on both sides; return the verdict."""
    step, known_from, has_spread = comparison.step_time(before, after)
    undecided = (
        "within the spread: neither slower nor faster"
        if has_spread
        else "which may be chance: so few steps show no spread"
    )
    print(
        f"\na step takes {step.before_ms:.2f} ms in A and {step.after_ms:.2f} ms in B (medians of"
        f" {known_from}):\nB takes {step.after_ms / max(step.before_ms, 1e-9):.2f}x as long,"
        f" {step.verdict or undecided}"
    )
    if not comparison.by_launch(before, after):
        print(
            f"how far launches differ by themselves is not shown: A has {len(before)} and B has"
            f" {len(after)}; start each\n{comparison.LEAST_LAUNCHES} times, and give the folders"
            " as RUN1,RUN2,RUN3"
        )
    return step.verdict


def print_causes(before: Side, after: Side) -> None:
    """Print how time was spent on both sides, and what other ranks waited for."""
    print("\nby cause, ms per step and rank (medians of the traced steps), most lost first:")
    print(change_table("cause", comparison.items(before, after)))
    print("\nwhat others waited for, ms per step, summed over ranks, most lost first:")
    print(change_table("cause of waiting", comparison.waited_for(before, after)))


def explanation(machine, before: Side, after: Side) -> str:
    """Return what the cost model predicts for both runs, and what it leaves unexplained.

    Raises UsageError if the cost model lacks a run's model or layout.
    """
    configs = [config_of(side[0].trace.folder) for side in (before, after)]
    parts = [step_parts(machine, config) for config in configs]
    step, _, _ = comparison.step_time(before, after)
    passes, *others = [
        comparison.Change(part, 1e3 * parts[0][part], 1e3 * parts[1][part]) for part in parts[0]
    ]
    total = comparison.Change("all parts", *(1e3 * sum(side.values()) for side in parts))
    rest = comparison.Change(
        "measured, and not in the model",
        step.before_ms - total.before_ms,
        step.after_ms - total.after_ms,
    )
    rows = [("part", "A ms", "B ms", "change ms")]
    rows += [
        (one.what, f"{one.before_ms:.2f}", f"{one.after_ms:.2f}", f"{one.change_ms:+z.2f}")
        for one in (*work_and_shapes(passes, *map(most_flops, configs)), *others, total, rest)
    ]
    return (
        f"\nwhat the cost model says of a step, ms:\n{table(rows)}\nof the difference of"
        f" {step.change_ms:+.2f} ms the cost model explains {total.change_ms:+.2f} ms\n"
    )


def work_and_shapes(passes: comparison.Change, before: int, after: int) -> list[comparison.Change]:
    """Split the passes into two changes: the amount of work at A's rate, and other product shapes.

    before, after: FLOPs of the busiest rank.
    """
    at_rate_of_a = passes.before_ms * after / before
    return [
        comparison.Change(f"{passes.what}, at A's FLOP/s", passes.before_ms, at_rate_of_a),
        comparison.Change("products of other shapes", 0.0, passes.after_ms - at_rate_of_a),
    ]


def most_flops(config) -> int:
    """Return the FLOPs of a step on the busiest rank of the pipeline."""
    first = Grid.of(config.grid, 0)
    return max(
        sum(predict(config, first.at(pp=pp_rank)).flops.values())
        for pp_rank in range(first.size("pp"))
    )


def config_of(folder):
    """Return a run folder's complete Config. Raises DataError, and UsageError for its values."""
    path = folder / "config.toml"
    with problems_as(DataError, str(path)):
        config = build(values_of(read_text(path.name, root=folder)))
    return resolve(config, config.grid.num_ranks)[0]


def change_table(title: str, changes: list[comparison.Change]) -> str:
    """Return a table of the largest changes, with the rest in one line."""
    largest = sorted(changes, key=lambda one: -abs(one.change_ms))[:MOST]
    rest = [one for one in changes if one not in largest]
    shown = [one for one in changes if one in largest]
    if rest:
        shown.append(
            comparison.Change(
                f"{len(rest)} smaller changes",
                sum(one.before_ms for one in rest),
                sum(one.after_ms for one in rest),
            )
        )
    verdicts = any(one.verdict for one in shown)
    rows = [(title, "A ms", "B ms", "change ms", *(["beyond the spread"] * verdicts))]
    rows += [
        (
            one.what,
            f"{one.before_ms:.2f}",
            f"{one.after_ms:.2f}",
            f"{one.change_ms:+z.2f}",
            *([one.verdict] * verdicts),
        )
        for one in shown
    ]
    return table(rows) if changes else "no rank waited"


COMMAND = Command(run, "RUN_A RUN_B [--machine FILE] [--check]", Arguments)
