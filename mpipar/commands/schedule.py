"""`mpipar schedule`: makes, proves, times, draws and explores pipeline schedules; no MPI."""

import json
import sys
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from pathlib import Path

from mpipar.commands.command import Command, Context
from mpipar.config.setting import flag, positional, setting, switch
from mpipar.config.text import counted, harmless, printable
from mpipar.errors import EXIT_OK, UsageError, broken
from mpipar.pipeline import csv_format
from mpipar.pipeline.instructions import Schedule
from mpipar.pipeline.schedules.catalog import (
    FAMILIES,
    SCHEDULES,
    make_schedule,
    num_stages,
    schedule_problems,
)
from mpipar.run.console import output
from mpipar.run.console.tables import table
from mpipar.run.trace import trace_file
from mpipar.study.schedules import draw, explorer
from mpipar.study.schedules.bubble import measured_costs
from mpipar.study.schedules.draw import short_number, svg
from mpipar.study.schedules.forms import ClosedForm, closed_form
from mpipar.study.schedules.simulate import Costs, Timeline, simulate
from mpipar.study.trace import pop

MOST_COMPARED = 1 << 13  # microbatches times workers: each schedule is made and simulated
VIEWS = ("--symbols", "--book", "--svg", "--json", "--csv")  # of one schedule
FIRST, SECOND = "1f1b", "zb-h1"  # what the explorer shows if no schedule is named
MOST_DRAWN = 1 << 12  # forward passes of a schedule: a browser draws three boxes for each
PROVED = "proved: every pass once and in order, no deadlock even if every send is synchronous"
STDOUT = "-"  # a file of this name is standard output
EXAMPLES = """\
In the grid a row is a worker and F3 is the forward of microbatch 3 (2F3: of stage 2). B is a whole
backward; I and W are its halves, input gradient and weight gradient. Costs are those of one stage;
with --compare they are those of one worker's layers, divided equally among its v stages.

examples:
  mpipar schedule 1f1b --pp 4 --num-microbatches 8
  mpipar schedule zb-v --costs 2,2,1 --latency 0.25 --symbols
  mpipar schedule --compare --pp 4 --num-microbatches 16
  mpipar schedule zb-h1 --pp 4 --num-microbatches 8 --html schedules.html
"""


@dataclass(frozen=True)
class Arguments:
    """A schedule or its source; costs; what is printed and written."""

    name: str | None = positional("NAME", ", ".join(SCHEDULES), default=None)
    pp: int = setting(4, "pipeline ranks", metavar="P", low=1, high=2**12)
    num_microbatches: int = setting(8, "per step", metavar="M", low=1, high=2**16)
    chunks: int | None = setting(
        None,
        "stages per worker, for looped schedules (default 2)",
        metavar="V",
        low=1,
        high=2**10,
    )
    costs: tuple[Fraction, ...] | None = setting(
        None,
        "time of forward, input gradient, weight gradient and, if less than their sum, of an"
        " overlapped forward and backward (default 1,1,1; with --book 1,1/2,1/2)",
        above=0,
    )
    latency: Fraction | None = setting(
        None, "time of a message between workers (default 0)", metavar="C"
    )
    symbols: bool = switch("print F_k and B_k in time order instead of the grid")
    book: bool = switch(
        "draw the grid as textbooks do: the last worker on top, an arrow up for a forward pass of"
        " block l and an arrow down for its backward pass, both equally wide"
    )
    compare: bool = switch("print a table of all schedules for these counts")
    svg: str | None = setting(None, "draw into an SVG file", metavar="FILE")
    json: bool = switch("print everything as JSON and nothing else")
    csv: str | None = setting(
        None,
        "write in the format of torch.distributed.pipelining; with - print that and nothing else",
        metavar="FILE",
    )
    from_csv: str | None = setting(
        None, "read, prove and draw a schedule from such a file", metavar="FILE"
    )
    html: str | None = setting(
        None,
        "write the schedule explorer, a page for the browser: choose and compare schedules,"
        " drag passes, and see what breaks; print nothing else",
        metavar="FILE",
    )
    from_run: str | None = setting(
        None,
        "with --html: schedule, costs and measured times of a run of mpipar train --trace",
        metavar="RUN",
    )


MODES = (  # (an argument, what it does when it is given, the arguments that it would not read)
    ("--html", "writes one page and nothing else", ("--compare", *VIEWS)),
    (
        "--from-run",
        "brings its own schedule and costs",
        ("NAME", "--chunks", "--costs", "--latency", "--from-csv"),
    ),
    ("--from-csv", "brings its own schedule", ("NAME", "--compare", "--chunks")),
    ("--compare", "prints one table of all schedules", ("NAME", *VIEWS)),
)


def problems(args: Arguments) -> list[UsageError]:
    """Return everything that is wrong between the arguments."""
    values = {flag(name): value for name, value in vars(args).items()} | {"NAME": args.name}
    given = {word for word, value in values.items() if value not in (None, False)}
    found = [
        f"{mode} {what}: leave {' and '.join(ignored)} out"
        for mode, what, words in MODES
        if mode in given and (ignored := [word for word in words if word in given])
    ]
    if not given & {"NAME", *(mode for mode, _, _ in MODES)}:
        found.append(
            f"which schedule? use mpipar schedule NAME with one of {', '.join(SCHEDULES)},"
            " or --compare"
        )
    elif not given & {"--compare", "--from-csv", "--from-run"}:
        counts = args.name or FIRST, args.pp, args.num_microbatches, args.chunks
        wrong = schedule_problems(*counts)
        passes = 0 if wrong else num_stages(*counts[:2], args.chunks) * args.num_microbatches
        found += wrong or broken(
            (
                args.html and passes > MOST_DRAWN,
                f"--html draws at most {MOST_DRAWN:,} forward passes: use fewer workers or chunks",
            )
        )
    found += broken(
        (
            args.costs and len(args.costs) not in (3, 4),
            "--costs: use three numbers F,I,W or four F,I,W,FB",
        ),
        (args.from_run and not args.html, "--from-run fills the explorer: add --html FILE"),
        (args.book and args.symbols, "--book and --symbols: give one of them"),
        (
            args.json and args.csv == STDOUT,
            "--json and --csv - both print; name a file for --csv, or leave --json out",
        ),
        (
            args.compare and args.pp * (args.chunks or 1) * args.num_microbatches > MOST_COMPARED,
            (
                "--compare: --pp times --chunks times --num-microbatches may be at most"
                f" {MOST_COMPARED:,}"
            ),
        ),
    )
    return [UsageError(found)] if found else []


def run(context: Context) -> int:
    """Run the sub-command; return the exit code."""
    args = context.args
    costs = costs_of(args)
    if args.html is not None:
        write_explorer(args, costs)
    elif args.compare:
        print(compare_schedules(args.pp, args.num_microbatches, args.chunks, costs))
    else:
        show(args, schedule_of(args), costs)
    return EXIT_OK


def schedule_of(args: Arguments) -> Schedule:
    """Return the schedule that is named, or in the file that is. Raises UsageError."""
    if args.from_csv is not None:
        return csv_format.read_csv(Path(args.from_csv))
    return make_schedule(args.name or FIRST, args.pp, args.num_microbatches, args.chunks)


def costs_of(args: Arguments) -> Costs:
    """Return the exact costs of --costs and --latency."""
    half = Fraction(1, 2)
    f, i, w, *overlapped = args.costs or ((1, half, half) if args.book else (1, 1, 1))
    share = overlapped[0] / (f + i + w) if overlapped else 1
    return Costs(f, i, w, share, args.latency or 0)


def show(args: Arguments, schedule: Schedule, costs: Costs) -> None:
    """Print the schedule, and write the requested files."""
    timeline = simulate(schedule, costs)
    form = None if args.from_csv else closed_form(schedule, costs)
    if args.svg:
        output.write_text(Path(args.svg), svg(timeline, title(schedule)))
    if args.csv == STDOUT:
        csv_format.print_csv(schedule, sys.stdout)
        return
    if args.csv:
        csv_format.write_csv(schedule, Path(args.csv))
    if args.json:
        print(json.dumps(as_dict(timeline, form), indent=1, default=float))  # of fractions
        return
    if args.symbols:
        picture = f"{draw.symbols(timeline)}\n\n{draw.NOTATION}"
    else:
        picture = book_picture(timeline) if args.book else draw.grid(timeline)
    print(f"{title(schedule)}; {cost_words(costs)}\n{PROVED}\n\n{picture}")
    print(f"\n{summary(timeline, form)}")
    if not args.book:
        print(f"\n{workers(timeline)}")
    for path in (args.svg, args.csv):
        if path:
            print(f"wrote {harmless(path)}")


def book_picture(timeline: Timeline) -> str:
    """Return the grid in textbook notation, and its explanation.

    Raises UsageError for passes that textbooks do not have.
    """
    schedule = timeline.schedule
    others = sorted(
        {cell.instr.kind for row in draw.layout(timeline) for cell in row} - draw.ARROWS.keys()
    )
    if others:
        raise UsageError(
            f"--book: {schedule.name} has the passes {', '.join(others)}, which no"
            " textbook draws: leave --book out, or use naive, gpipe or 1f1b"
        )
    return printable(f"{draw.grid(timeline, book=True)}\n\n{draw.book_notation(schedule)}")


def title(schedule: Schedule) -> str:
    """Return the schedule's name and counts."""
    return (
        f"{schedule.name}: {counted(schedule.pp_size, 'worker')},"
        f" {counted(schedule.num_stages, 'stage')},"
        f" {counted(schedule.num_microbatches, 'microbatch')}"
    )


def cost_words(costs: Costs) -> str:
    """Return the costs as the user gave them."""
    values = (costs.f, costs.i, costs.w, costs.i + costs.w, costs.latency)
    return "F {}, I {}, W {}, B {}, latency {}".format(*map(short_number, values))


def summary(timeline: Timeline, form: ClosedForm | None) -> str:
    """Return the simulated numbers of the whole step beside the closed forms."""
    bubble, peak = spread(timeline.global_bubble), spread(timeline.peak_stash)
    messages = short_number(sum(timeline.messages))
    return table(
        [
            ("", "simulated", "closed form"),
            ("step", short_number(timeline.makespan), ""),
            ("bubble, idle time of a worker", bubble, formula(form and form.bubble)),
            ("bubble, share of the step", f"{100 * timeline.bubble_share:.1f} %", ""),
            ("peak stash, stage activations", peak, formula(form and form.peak_stash)),
            ("messages of all workers", messages, formula(form and form.messages)),
        ]
    )


def formula(term: tuple[str, Real | None] | None) -> str:
    """Return a closed form and its value, or a dash if none is known."""
    if term is None or term[1] is None:
        return "-"
    text, value = term
    return text if text == str(value) else f"{text} = {short_number(value)}"


def spread(values: tuple[Real, ...]) -> str:
    """Return one number, or the range over the workers."""
    low, high = short_number(min(values)), short_number(max(values))
    return low if low == high else f"{low} to {high}"


def workers(timeline: Timeline) -> str:
    """Return a table with a line for each worker."""
    columns = (
        map(short_number, timeline.busy),
        (f"{100 * share:.1f} %" for share in timeline.busy_share),
        map(short_number, timeline.global_bubble),
        map(short_number, timeline.span_bubble),
        map(short_number, timeline.peak_stash),
        map(short_number, timeline.messages),
    )
    return table(
        [
            ("worker", "busy", "share", "idle", "idle between its passes", "peak stash", "sends"),
            *((worker, *row) for worker, row in enumerate(zip(*columns, strict=True))),
        ]
    )


def compare_schedules(p: int, m: int, chunks: int | None, costs: Costs) -> str:
    """Return all schedules for one p and m: what each costs and saves, or why it is unusable."""
    rows = [("schedule", "stages", "step", "bubble", "against naive", "peak stash", "messages")]
    notes, slowest = [], None
    for name in SCHEDULES:
        own = chunks if FAMILIES[name].looped else None
        if found := schedule_problems(name, p, m, own):
            notes += found
            continue
        schedule = make_schedule(name, p, m, own)
        v = schedule.num_stages // p
        timeline = simulate(schedule, costs.divided(v))
        slowest = slowest or timeline.makespan
        rows.append(
            (
                name,
                schedule.num_stages,
                short_number(timeline.makespan),
                f"{100 * timeline.bubble_share:.1f} %",
                f"{float(slowest / timeline.makespan):.2f} x",
                short_number(Fraction(max(timeline.peak_stash), v)),
                short_number(sum(timeline.messages)),
            )
        )
    if len(rows) == 1:
        raise UsageError(list(dict.fromkeys(notes)))  # each problem only once
    head = (
        f"{counted(p, 'worker')}, {counted(m, 'microbatch')}; a worker's layers take"
        f" {cost_words(costs)}\n{PROVED}"
    )
    foot = "\n".join(["peak stash: microbatches of a worker's layers", *notes])
    return f"{head}\n\n{table(rows)}\n\n{foot}"


def as_dict(timeline: Timeline, form: ClosedForm | None) -> dict:
    """Return everything as plain values; times are numbers in the unit of --costs."""

    def values(source, names: str) -> dict:
        return {name: getattr(source, name) for name in names.split()}

    return {
        **values(timeline.schedule, "name pp_size num_stages num_microbatches placement"),
        **values(timeline, "makespan bubble_share busy busy_share global_bubble span_bubble"),
        **values(timeline, "peak_stash messages"),
        "closed_form": form
        and {name: {"formula": text, "value": value} for name, (text, value) in vars(form).items()},
        "workers": [
            [[str(span.instr), span.start, span.end] for span in spans] for spans in timeline.spans
        ],
    }


def write_explorer(args: Arguments, costs: Costs) -> None:
    """Write the explorer with given costs or those of a run, and print where it is.

    It holds the orders of every schedule for small counts; one with other counts, from a file or
    from a run is added to them.

    Raises UsageError, DataError if a run has no trace, OutputError.
    """
    title, unit, measured = "Pipeline schedules", "", None
    if args.from_run is not None:
        name = harmless(Path(args.from_run).resolve().name)
        schedule, costs, measured = of_run(args.from_run, name)
        own, title, unit = f"{schedule.name} of {name}", f"{title}: {name}", " ms"
    else:
        schedule = schedule_of(args)
        own = f"{harmless(schedule.name)}, {schedule.pp_size} workers"
    p, m = schedule.pp_size, schedule.num_microbatches
    chunks, orders = schedule.num_stages // p, explorer.known_orders()
    has_own = args.from_run or args.from_csv or f"{schedule.name} {p} {m} {chunks}" not in orders
    second = SECOND if schedule.name != SECOND else FIRST
    numbers = {"f": costs.f, "i": costs.i, "w": costs.w, "hop": costs.latency}
    data = {
        "title": title,
        "unit": unit,
        "start": {
            "first": "own" if has_own else schedule.name,
            "second": "measured" if measured else second if f"{second} {p} {m} 1" in orders else "",
            "p": p,
            "m": m,
            "chunks": chunks,
            "share": "worker",
            "overlap": float(costs.overlap),
            **{name: float(f"{float(value):.4g}") for name, value in numbers.items()},
        },
        "measured": measured,
        "own": {"title": own, "schedule": explorer.schedule_facts(schedule)} if has_own else None,
    }
    output.write_text(Path(args.html), explorer.build(data, orders))
    print(f"{harmless(args.html)}: open it in a browser")


def of_run(folder: str, name: str) -> tuple[Schedule, Costs, dict]:
    """Return a traced run's schedule, a worker's mean costs in ms, and its passes for the page."""
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
        means = {name: sum(values) / schedule.pp_size for name, values in by_stage.items()}
        costs = Costs(**means, latency=pop.hop_ns(trace) * 1e-6)
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
    words = (
        f"measured in step {step} of {name}; who waited for a message is in its trace:"
        f" mpipar trace {harmless(folder)}"
    )
    measured = {"title": f"{name}, measured", "costs": by_stage, "passes": rows}
    return schedule, costs, measured | {"words": "\n".join([words, *trace.remarks()])}


COMMAND = Command(
    run,
    "NAME [flags] | mpipar schedule --compare [flags]",
    Arguments,
    examples=EXAMPLES,
    problems=problems,
)
