"""A trace as one self-contained HTML page: timeline that can be zoomed, findings and barriers.

The other tables are in the text of `mpipar trace`. The page needs no network and no other files.

The page's parts are in the folder page/, and those that all pages share in console/page/. `build`
combines them with the trace's numbers. timeline.js draws the trace, page.js everything else.
"""

from importlib.resources import files
from pathlib import Path

from mpipar.comm.record import BUSY
from mpipar.config.model import model_config
from mpipar.config.text import counted
from mpipar.run.console import html, output
from mpipar.run.console.tables import describe_model
from mpipar.study.trace.analysis import Analysis, barrier_cells

MOST_SLICES = 60_000  # more make the page slow to load; a step of 8 ranks has a few thousand
SCRIPTS = ("timeline.js", "pointer.js", "page.js", "figures.js")


def write(analysis: Analysis, path: Path) -> None:
    """Write the page. Raises OutputError."""
    output.write_text(path, build(page_data(analysis)))


def build(data: dict) -> str:
    """Return the page that shows these data."""
    return html.build(files("mpipar.study.trace") / "page", SCRIPTS, data)


def page_data(analysis: Analysis) -> dict:
    """Return everything that the page shows, as values for JSON. Times are in microseconds."""
    trace, meta = analysis.trace, analysis.trace.meta
    steps, remarks = shown_steps(analysis)
    return {
        "title": f"{trace.folder.resolve().name}: {trace.size()}, {meta['schedule']['name']}",
        "model": f"{describe_model(model_config(meta['model']))};"
        f" {counted(meta['batch_size'], 'row')} per step,"
        f" {counted(meta['schedule']['num_microbatches'], 'microbatch')}, {meta['dtype']}",
        "clock": trace.clock.describe(),
        "remarks": remarks + trace.remarks(),
        "step_ms": (trace.end - trace.start) * 1e-6 / trace.num_steps,
        "efficiency": analysis.efficiencies,
        "findings": [
            {"kind": one.kind, "lost_ms": one.lost_ms, "text": one.text}
            for one in analysis.findings
        ],
        "barriers": barrier_cells(analysis),
        "ranks": [trace.place(rank) for rank in trace.ranks],
        "timeline": timeline_data(analysis, steps),
        "curves": [],  # of the whole run: its report has them
    }


def timeline_data(analysis: Analysis, kept_steps: set[int]) -> dict:
    """Return spans, layers' operations and calls of some steps by rank, and tables of names."""
    trace = analysis.trace
    tables: dict[str, dict] = {
        name: {}
        for name in (
            "names",
            "sources",
            "axes",
            "collectives",
            "layers",
            "functions",
            "phases",
            "causes",
        )
    }

    def index(table, value):
        return tables[table].setdefault(value, len(tables[table]))

    numbers = {id(event): i for i, event in enumerate(analysis.waits.events)}
    ranks = []
    for rank, own in zip(trace.ranks, analysis.waits.calls, strict=True):
        spans = [
            [
                _us(one.start_ns),
                _us(one.end_ns - one.start_ns),
                BUSY.index(one.kind),
                one.stage,
                one.mb,
                one.step,
            ]
            for one in rank.spans
            if one.kind in BUSY and one.step in kept_steps
        ]
        calls = []
        for call in own:
            record = call.record
            if record.step not in kept_steps or not call.blocked_ns:
                continue
            calls.append(
                [
                    _us(record.waited_ns),
                    _us(call.wait_ns),
                    _us(call.transfer_ns),
                    index("names", record.name),
                    index("axes", record.axis),
                    index("collectives", record.operation),
                    record.payload_bytes,
                    record.wire_bytes,
                    index("sources", record.source),
                    call.late,
                    record.stage,
                    record.mb,
                    record.step,
                    numbers.get(id(call.event), -1),
                    record.phase,
                    index("causes", analysis.causes.reason(call)) if call.wait_ns else -1,
                ]
            )
        operations = [
            [
                _us(one.start_ns),
                _us(one.end_ns - one.start_ns),
                index("phases", one.phase),
                one.stage,
                one.mb,
                one.step,
                index("layers", one.layer),
                index("functions", one.function),
            ]
            for one in rank.timed_operations()
            if one.step in kept_steps
        ]
        ranks.append(
            {
                "spans": sorted(spans),
                "operations": sorted(operations),
                "calls": sorted(calls, key=lambda row: row[0]),
            }
        )
    return {
        "kinds": BUSY,
        "ranks": ranks,
        "steps": [
            [step, _us(start), _us(end)]
            for (step, *_), (start, end) in zip(trace.ranks[0].steps, trace.windows(), strict=True)
            if step in kept_steps
        ],
    } | {name: list(table) for name, table in tables.items()}


def shown_steps(analysis: Analysis) -> tuple[set[int], list[str]]:
    """Return the steps that the page shows, the first alone of a large trace, and remarks on it."""
    trace = analysis.trace
    steps = [step for step, *_ in trace.ranks[0].steps]
    counts = (len(one.spans + one.records) + len(one.operations[0]) for one in trace.ranks)
    if sum(counts) <= MOST_SLICES:
        return set(steps), []
    return {steps[0]}, [f"a large trace: step {steps[0]} of {counted(len(steps), 'step')} is shown"]


def _us(nanoseconds: int) -> float:
    return round(nanoseconds / 1000, 1)
