"""`mpipar compare RUN_A RUN_B`: what got slower from A to B, ranked by cause; no MPI."""

import textwrap
from dataclasses import dataclass

from mpipar.commands.command import Command, Context
from mpipar.config.setting import positional, switch
from mpipar.config.text import brief, counted, harmless
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK
from mpipar.run.console.tables import WIDTH, table
from mpipar.run.trace import trace_file
from mpipar.study.trace import comparison
from mpipar.study.trace.analysis import Analysis

MOST = 12  # rows per table
LEAST_MS = 0.005  # of a change that is shown


@dataclass(frozen=True)
class Arguments:
    """The two run folders, and whether the exit code depends on the result."""

    run_a: str = positional("RUN_A", "run folder of mpipar train, with a trace")
    run_b: str = positional("RUN_B", "the run to compare with it")
    check: bool = switch("exit with 1 if steps of B are slower than those of A beyond the spread")


def run(context: Context) -> int:
    """Print the comparison; with --check return 1 if B's steps are slower beyond the spread.

    Raises DataError if a run has no trace, before printing anything.
    """
    folders = context.args.run_a, context.args.run_b
    traces = [trace_file.read(folder) for folder in folders]
    with trace_file.contradictions_are_data_errors(*folders):
        before, after = map(Analysis, traces)
        print_runs(before, after)
        slower = print_step(before, after) == "slower"
        print("\nby cause, ms per step and rank, most lost first:")
        print(change_table(comparison.items(before, after)))
    return EXIT_CHECK_FAILED if context.args.check and slower else EXIT_OK


def print_runs(before: Analysis, after: Analysis) -> None:
    """Print what is compared, which settings differ, and what to know before believing it."""
    old, new = sides = before.trace, after.trace
    lines = []
    for name, trace in zip("AB", sides, strict=True):
        print(
            f"{name}: {harmless(str(trace.folder))}: {trace.size()},"
            f" {trace.meta['schedule']['name']}, {counted(trace.num_steps, 'traced step')}"
        )
        lines += [f"{name}: {remark}" for remark in trace.remarks()]
    for key, was, now in comparison.settings_that_differ(old.folder, new.folder):
        print(f"   {brief(key)}: {brief(str(was))} -> {brief(str(now))}")
    if old.meta["layout"] != new.meta["layout"]:
        lines.append("the layouts differ: rank 1 of A and rank 1 of B do different work")
    for line in lines:
        print(textwrap.fill(line, WIDTH, initial_indent="   ", subsequent_indent="   "))


def print_step(before: Analysis, after: Analysis) -> str:
    """Print how long a step takes on both sides; return the verdict."""
    step, counts = comparison.step_time(before, after)
    undecided = (
        "which may be chance: take more steps"
        if min(counts) < comparison.LEAST_STEPS
        else "within the spread: neither slower nor faster"
    )
    print(
        f"\na step takes {step.before[1]:.2f} ms in A and {step.after[1]:.2f} ms in B (medians of"
        f" {counts[0]} and {counts[1]} steps):\nB takes"
        f" {step.after[1] / max(step.before[1], 1e-9):.2f}x as long, {step.verdict or undecided}"
    )
    return step.verdict


def change_table(changes: list[comparison.Change]) -> str:
    """Return a table of the largest changes: medians and quartiles."""
    largest = sorted(changes, key=lambda one: -abs(one.ms))[:MOST]
    shown = [one for one in changes if one in largest and abs(one.ms) >= LEAST_MS]
    if not shown:
        return f"{counted(len(changes), 'change')}, none of them of {LEAST_MS} ms"
    rows = [
        (
            one.what,
            digits(one.before[1]),
            f"{digits(one.before[0])}-{digits(one.before[2])}",
            digits(one.after[1]),
            f"{digits(one.after[0])}-{digits(one.after[2])}",
            digits(one.ms, "+z"),
            one.verdict,
        )
        for one in shown
    ]
    text = table([("cause", "A ms", "quartiles", "B ms", "quartiles", "change", "beyond"), *rows])
    rest = len(changes) - len(shown)
    return f"{text}\nand {counted(rest, 'smaller change')}" if rest else text


def digits(ms: float, sign: str = "") -> str:
    """Return milliseconds with at least three digits, at most two of them after the point."""
    return f"{ms:{sign}.{2 if abs(ms) < 10 else 1 if abs(ms) < 100 else 0}f}"


COMMAND = Command(run, "RUN_A RUN_B [--check]", Arguments)
