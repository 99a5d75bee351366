"""A trace as one self-contained HTML page: timeline that can be zoomed, findings and barriers.

The other tables are in the text of `mpipar trace`. The page needs no network and no other files.

The page's parts are in the folder page/, and those that all pages share in console/page/. `build`
combines them with the trace's numbers. timeline.js draws the trace, page.js everything else.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from importlib.resources import files
from pathlib import Path

from mpipar.comm.record import BUSY
from mpipar.config.model import model_config
from mpipar.config.text import counted
from mpipar.run.console import html, output, series
from mpipar.run.console.tables import describe_model
from mpipar.study.trace.analysis import Analysis, barrier_cells

MOST_SLICES = 60_000  # more make the page slow to load; a step of 8 ranks has a few thousand
LONGEST_CHAIN = 6  # steps of a chain of waits that a tooltip shows
SCRIPTS = ("timeline.js", "pointer.js", "page.js", "figures.js")


def write(analysis: Analysis, path: Path, most_slices: int = MOST_SLICES) -> str | None:
    """Write the page; return what a large trace's page leaves out, or None. Raises OutputError."""
    data = page_data(analysis, most_slices)
    output.write_text(path, build(data))
    return data["thinned"]


def build(data: dict) -> str:
    """Return the page that shows these data."""
    return html.build(files("mpipar.study.trace") / "page", SCRIPTS, data)


def page_data(analysis: Analysis, most_slices: int = MOST_SLICES) -> dict:
    """Return everything that the page shows, as values for JSON. Times are in microseconds."""
    trace = analysis.trace
    meta = trace.meta
    slices, thinned = timeline_data(analysis, most_slices)
    model = model_config(meta["model"])
    return {
        "title": f"{trace.folder.resolve().name}: {trace.layout()}, {meta['schedule']['name']}",
        "model": f"{describe_model(model)};"
        f" {counted(meta['batch_size'], 'row')} per step,"
        f" {counted(meta['schedule']['num_microbatches'], 'microbatch')}, {meta['dtype']}",
        "clock": trace.clock.describe(),
        "thinned": thinned,
        "remarks": trace.remarks(),
        "step_ms": (trace.end - trace.start) * 1e-6 / trace.num_steps,
        "efficiency": analysis.efficiency.rows(),
        "findings": [
            {"kind": one.kind, "lost_ms": one.lost_ms, "text": one.text}
            for one in analysis.findings
        ],
        "barriers": barrier_cells(analysis),
        "ranks": [trace.place(rank) for rank in trace.ranks],
        "timeline": slices,
        "curves": series.curves(trace.metrics, []),
    }


def timeline_data(analysis: Analysis, most_slices: int) -> tuple[dict, str | None]:
    """Return spans, layers' operations and calls by rank, tables of names, and what is left out."""
    trace = analysis.trace
    kept_steps, thinned = thin(analysis, most_slices)
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
            "chains",
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
                    index("chains", chain_text(analysis, call)) if call.wait_ns else -1,
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
            for one in rank.operations
            if one.step in kept_steps
        ]
        ranks.append(
            {
                "spans": sorted(spans),
                "operations": sorted(operations),
                "calls": sorted(calls, key=lambda row: row[0]),
            }
        )
    steps = zip(trace.ranks[0].steps, trace.windows(), strict=True)
    return {
        "kinds": BUSY,
        "ranks": ranks,
        "steps": [
            [step, _us(start), _us(end)] for (step, *_), (start, end) in steps if step in kept_steps
        ],
    } | {name: list(table) for name, table in tables.items()}, thinned


def chain_text(analysis: Analysis, call) -> str:
    """Return why a rank waited, from the late rank to the root, at most LONGEST_CHAIN steps."""
    chain = analysis.causes.chain(call)
    left = len(chain) - LONGEST_CHAIN
    if left > 0:
        chain[LONGEST_CHAIN // 2 : -LONGEST_CHAIN // 2] = [f"{left} more"]
    return "; ".join(chain)


def thin(analysis: Analysis, most: int) -> tuple[set[int], str | None]:
    """Return the first steps that have at most so many slices, at least one; a note for the reader.

    The note is None if all are shown.
    """
    counts: Counter = Counter()
    for rank, own in zip(analysis.trace.ranks, analysis.waits.calls, strict=True):
        counts.update(one.step for one in rank.spans if one.kind in BUSY)
        counts.update(one.step for one in rank.operations)
        counts.update(call.record.step for call in own)
    steps = sorted(counts)
    sums = list(itertools.accumulate(counts[step] for step in steps))
    kept = max(1, bisect_right(sums, most))
    if kept >= len(steps):
        return set(steps), None
    shown = f"step {steps[0]}" if kept == 1 else f"steps {steps[0]} to {steps[kept - 1]}"
    return set(steps[:kept]), (
        f"thinned: {sums[kept - 1]:,} of {sums[-1]:,} slices are shown;"
        f" {shown} of {counted(len(steps), 'step')}"
    )


def _us(nanoseconds: int) -> float:
    return round(nanoseconds / 1000, 1)
