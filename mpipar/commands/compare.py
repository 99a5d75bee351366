"""`mpipar compare RUN_A RUN_B`: what got slower from A to B, ranked by cause; without MPI."""

from __future__ import annotations

import textwrap

from mpipar.console.tables import table
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK
from mpipar.files.text import brief, harmless
from mpipar.trace import comparison, trace_file
from mpipar.trace.analysis import Analysis, analyse

MOST = 12  # rows of a table
WIDTH = 100  # characters of a line of text


def add_arguments(parser) -> None:
    """Add the two run folders, and the flag that lets the exit code judge them."""
    parser.add_argument("run_a", metavar="RUN_A", help="run folder of mpipar train --trace")
    parser.add_argument("run_b", metavar="RUN_B", help="the run that is judged against it")
    parser.add_argument("--check", action="store_true",
                        help="exit with 1 if a step of B is slower than one of A beyond the spread")


def run(args) -> int:
    """Print the comparison; with --check return 1 if B's steps are slower beyond the spread.

    Raises DataError if a run has no trace.
    """
    folders = args.run_a, args.run_b
    before, after = map(trace_file.read, folders)
    with trace_file.contradictions_are_data_errors(*folders):
        before, after = analyse(before), analyse(after)
        print_runs(before, after)
        slower = print_step(before, after) == "slower"
        print_causes(before, after)
    return EXIT_CHECK_FAILED if args.check and slower else EXIT_OK


def print_runs(before: Analysis, after: Analysis) -> None:
    """Print what is compared, and which settings differ."""
    for name, side in (("A", before), ("B", after)):
        trace = side.trace
        print(f"{name}: {harmless(str(trace.folder))}: {trace.size()},"
              f" {trace.meta['schedule']['name']}, {trace.num_steps} traced steps")
    for key, old, new in comparison.settings_that_differ(before.trace.folder, after.trace.folder):
        print(f"   {brief(key)}: {brief(str(old))} -> {brief(str(new))}")
    if before.trace.meta["layout"] != after.trace.meta["layout"]:
        print("   the layouts differ: rank 1 of A and rank 1 of B do different work")
    remarks: dict[str, list[str]] = {}
    for name, side in (("A", before), ("B", after)):
        for remark in side.trace.remarks():
            remarks.setdefault(remark, []).append(name)
    for remark, names in remarks.items():
        print(textwrap.fill(f"{' and '.join(names)}: {remark}", WIDTH, initial_indent="   ",
                            subsequent_indent="   "))
    timed = [name for name, side in (("A", before), ("B", after))
             if side.trace.meta.get("per_operation")]
    if len(timed) == 1:
        print(f"   only {timed[0]} was traced with --trace-ops: it names causes of waiting more"
              " exactly, so they do not match the other's")
    if min(before.trace.num_steps, after.trace.num_steps) < comparison.LEAST_STEPS:
        print(f"   fewer than {comparison.LEAST_STEPS} traced steps: how far steps differ by"
              " themselves is unknown; trace more, as in --trace 10:14")


def print_step(before: Analysis, after: Analysis) -> str:
    """Print how long a step takes on both sides; return the verdict."""
    step, known_from, has_spread = comparison.step_time(before, after)
    undecided = ("within the spread: neither slower nor faster" if has_spread
                 else "which may be chance: so few steps show no spread")
    print(f"\na step takes {step.before_ms:.2f} ms in A and {step.after_ms:.2f} ms in B (medians of"
          f" {known_from}):\nB takes {step.after_ms / max(step.before_ms, 1e-9):.2f}x as long,"
          f" {step.verdict or undecided}")
    return step.verdict


def print_causes(before: Analysis, after: Analysis) -> None:
    """Print where the time went on both sides, and what others waited for."""
    print("\nby cause, ms per step and rank (medians of the traced steps), most lost first:")
    print(change_table("cause", comparison.items(before, after)))
    print("\nwhat others waited for, ms per step, summed over ranks, most lost first:")
    print(change_table("cause of waiting", comparison.waited_for(before, after)))


def change_table(title: str, changes: list[comparison.Change]) -> str:
    """A table of the largest changes, with the rest in one line."""
    largest = sorted(changes, key=lambda one: -abs(one.change_ms))[:MOST]
    rest = [one for one in changes if one not in largest]
    shown = [one for one in changes if one in largest]
    if rest:
        shown.append(comparison.Change(f"{len(rest)} smaller changes", sum(
            one.before_ms for one in rest), sum(one.after_ms for one in rest)))
    verdicts = any(one.verdict for one in shown)
    rows = [(title, "A ms", "B ms", "change ms", *(["beyond the spread"] * verdicts))]
    rows += [(one.what, f"{one.before_ms:.2f}", f"{one.after_ms:.2f}", f"{one.change_ms:+z.2f}",
              *([one.verdict] * verdicts)) for one in shown]
    return table(rows) if changes else "nobody waited"
