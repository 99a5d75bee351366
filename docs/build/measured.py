"""Outputs that contain times or take long: kept in result files, with the machine that made them.

    python -m docs.build measure bench/results/tour/naive.json 'COMMAND' 'COMMAND'
    python -m docs.build measure bench/results/tour/naive.json      # its own commands once more

All commands of a file run one after the other in one empty folder. If one of them traces a run, the
file also keeps what two pictures need of it: its median step, that step simulated, and one barrier.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from pathlib import Path

from bench import results
from docs.build.blocks import Block
from docs.build.commands import Workplace, console
from docs.build.places import by_function
from mpipar.comm.record import PASSES
from mpipar.errors import DataError
from mpipar.pipeline.instructions import parts
from mpipar.run.trace.trace_file import Trace, read
from mpipar.study.trace import pop, waits
from mpipar.study.trace.timeline import median_step

BENCH = "docs.build measure"
QUICK = 10  # seconds: a file whose commands take less has them run in CI


def measure(path: Path, commands: list[str]) -> None:
    """Run the commands, and write their outputs. Raises DataError if one of them fails."""
    rows = []
    if not (commands or path.exists()):
        raise DataError(f"{path}: does not exist; name the commands to measure")
    with contextlib.closing(Workplace(settings={})) as workplace:
        for command in commands or [row["command"] for row in rows_of(path)]:
            start = time.perf_counter()
            code, output = workplace.run(command)
            if code:
                raise DataError(f"{command}: exit code {code}\n{output}")
            rows.append(
                {
                    "command": command,
                    "seconds": round(time.perf_counter() - start, 1),
                    "output": by_function(without_host(output)),
                }
            )
        beside = last_trace(workplace.folder())
    results.write(str(path), BENCH, rows, beside=beside)


def without_host(output: str) -> str:
    """Return the output with `host` for this machine's name; columns keep their places."""

    def replace(found: re.Match) -> str:
        return "host".ljust(len(found[0])) if len(found[1]) > 1 else f"host{found[1]}"

    return re.sub(rf"(?<![\w.-]){re.escape(socket.gethostname())}(?![\w.-])( *)", replace, output)


def is_quick(path: Path) -> bool:
    """Return whether CI runs the commands of a file, instead of only parsing their flags."""
    return sum(row["seconds"] for row in rows_of(path)) < QUICK


def rows_of(path: Path) -> list[dict]:
    """Return the commands of a file with their seconds and outputs. Raises DataError."""
    return results.read(path, BENCH)["rows"]


def shown(block: Block, root: Path) -> str:
    """Return the machine, and the commands and outputs of a file, or `:: part N` of them."""
    try:
        result = results.read(root / block.words, BENCH)
    except DataError as error:
        raise block.problem(str(error)) from error
    rows, machine = result["rows"], result["machine"]
    if "part" in block.options:
        number = int(block.options["part"])
        if not 1 <= number <= len(rows):
            raise block.problem(f"has {len(rows)} parts")
        rows = [rows[number - 1]]
    shown = [console(block, row["command"], row["output"], "bash not-run") for row in rows]
    facts = f"{machine['date']}, {machine['cores']} cores, {machine['cpu']}"
    return "\n\n".join([*shown, f"Measured: {facts}."])


# --- what is kept of a traced run


def last_trace(folder: Path) -> dict:
    """Return {"trace": ...} of the newest traced run below a folder, or {}."""
    found = sorted(folder.glob("**/trace/meta.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        return {}
    trace = read(found[-1].parent.parent)
    step, _ = median_step(trace)
    return {
        "trace": {
            "layout": trace.layout(),
            "schedule": trace.meta["schedule"]["name"],
            "rows": [*passes(trace, step), *barrier(trace, step)],
        }
    }


def row(what: str, rank: int, kind: str, place: tuple[int, int], times: tuple) -> dict:
    """Return a pass, or a part of the barrier. place: stage, microbatch; times: in milliseconds."""
    start, end = (round(float(one), 4) for one in times)
    return {
        "what": what,
        "rank": rank,
        "kind": kind,
        "stage": place[0],
        "mb": place[1],
        "start_ms": start,
        "end_ms": end,
    }


def passes(trace: Trace, step: int) -> list[dict]:
    """Return the passes of the step on one rank of each pipeline rank; the first one starts at 0.

    They are followed by the same passes as the simulator places them, with the trace's mean times.
    """
    chosen = {rank.place["pp"]: rank for rank in reversed(trace.ranks)}
    spans = [
        (place, span)
        for place, rank in sorted(chosen.items())
        for span in rank.spans
        if span.step == step and span.kind in PASSES
    ]
    start = min(span.start_ns for _, span in spans)
    return [
        *(
            row(
                "measured",
                place,
                span.kind,
                (span.stage, span.mb),
                ((span.start_ns - start) * 1e-6, (span.end_ns - start) * 1e-6),
            )
            for place, span in spans
        ),
        *(
            row(
                "simulated",
                place,
                span.instr.kind,
                parts(span.instr)[0][1:],
                (span.start * 1e3, span.end * 1e3),
            )
            for place, spans in enumerate(pop.simulated(trace).spans)
            for span in spans
            if span.end > span.start
        ),
    ]


def barrier(trace: Trace, step: int) -> list[dict]:
    """Return wait and transfer of each rank in the step's collective with the most waiting."""
    found = [
        event
        for event in waits.find(trace).events
        if len(event.calls) > 1
        and event.operation != "message"
        and event.calls[0].record.step == step
    ]
    if not found:
        return []
    event = max(found, key=lambda one: sum(call.wait_ns for call in one.calls))
    first, rows = min(call.record.waited_ns for call in event.calls), []
    for call in event.calls:
        came, done = call.record.waited_ns - first, call.record.done_ns - first
        met = came + call.wait_ns
        place = (call.record.stage, call.record.mb)
        rows += [
            row(
                f"{what}: {event.operation} {event.name}",
                call.rank,
                call.record.phase,
                place,
                (start * 1e-6, end * 1e-6),
            )
            for what, start, end in (("wait", came, met), ("transfer", met, done))
        ]
    return rows
