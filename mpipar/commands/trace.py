"""`mpipar trace RUN`: who waited for whom, where in the source, and how long; no MPI."""

import textwrap
from dataclasses import dataclass
from pathlib import Path

from mpipar.commands.command import Command, Context
from mpipar.config.setting import positional, setting
from mpipar.config.text import counted, harmless
from mpipar.errors import EXIT_OK, UsageError
from mpipar.run.console.tables import WIDTH, table, table_with_words
from mpipar.run.trace import trace_file
from mpipar.study.schedules.bubble import bubble_table
from mpipar.study.trace import html, perfetto, pop
from mpipar.study.trace.analysis import Analysis, barrier_cells, cause_cells, rank_cells
from mpipar.study.trace.segments import median_step, timeline

MOST = 12  # causes of waiting


@dataclass(frozen=True)
class Arguments:
    """The run folder, and the two files that can be written."""

    run_folder: str = positional("RUN", "run folder of mpipar train, with a trace")
    perfetto: str | None = setting(
        None,
        "write Chrome JSON for ui.perfetto.dev to this file, and print no tables",
        metavar="FILE",
    )
    html: str | None = setting(
        None, "write one self-contained page to this file, and print no tables", metavar="FILE"
    )


def run(context: Context) -> int:
    """Print the tables of a traced run, or write the requested files and print a line for each.

    Raises DataError if there is no trace, OutputError if a file cannot be written.
    """
    args = context.args
    if args.html is not None and args.html == args.perfetto:
        raise UsageError(f"--html and --perfetto both name {args.html}: give two files")
    trace = trace_file.read(args.run_folder)
    with trace_file.contradictions_are_data_errors(args.run_folder):
        analysis = Analysis(trace)
        if args.perfetto is not None:
            perfetto.write(analysis.trace, analysis.waits, Path(args.perfetto))
            print(f"{harmless(args.perfetto)}: open it in https://ui.perfetto.dev")
        if args.html is not None:
            html.write(analysis, Path(args.html))
            print(f"{harmless(args.html)}: open it in a browser")
        if args.html is None and args.perfetto is None:
            show(analysis)
    return EXIT_OK


def show(analysis: Analysis) -> None:
    """Print the tables of a traced run."""
    trace = analysis.trace
    print(
        f"{trace.size()}, {counted(trace.num_steps, 'step')} of"
        f" {trace.meta['schedule']['name']} in {(trace.end - trace.start) * 1e-6:.1f} ms;"
        f" clocks: {trace.clock.describe()}"
    )
    for remark in trace.remarks():
        print(textwrap.fill(remark, WIDTH))
    step, window = median_step(trace)
    print(f"\nstep {step}:")
    print(timeline(trace, analysis.segments, WIDTH, window))
    rows = [(name, f"{value:6.1%}", what) for name, value, what in analysis.efficiencies]
    print("\n" + table([("efficiency", "value", "what it says"), *rows], left=3))
    if analysis.findings:
        print("\nfindings:")
    for finding in analysis.findings:
        print(
            textwrap.fill(
                f"- {finding.kind} (about {finding.lost_ms:.1f} ms per step): {finding.text}",
                WIDTH,
                subsequent_indent="  ",
            )
        )
    print("\nwhere the time went, ms per step:")
    print(table(rank_cells(analysis), left=2))
    if analysis.waits.events:
        print("\nwhat others waited for, ms per step (waiting summed over ranks):")
        print(table(cause_cells(analysis, MOST)) if analysis.costs else "no rank waited")
        print("\nby barrier, ms per step (summed over ranks), and how often a rank was last:")
        print(table_with_words(barrier_cells(analysis), left=2))  # without what took no time
    if len(trace.schedule().programs) > 1 and pop.whole_steps(trace):
        print("\nbusy share and bubble of each pipeline rank:")
        print(bubble_table(pop.pipeline_bubble(trace)))
    if analysis.waits.unmatched:
        print(
            f"\n{len(analysis.waits.unmatched)} operations have no counterpart in the trace: all"
            " their time counts as transfer"
        )


COMMAND = Command(run, "RUN [--perfetto FILE] [--html FILE]", Arguments)
