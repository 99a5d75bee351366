"""Outputs that contain times or take long: kept in result files, with the machine that made them.

    python -m docs.build measure bench/results/tour/naive_trace.json 'COMMAND' 'COMMAND'
    python -m docs.build measure bench/results/tour/naive_trace.json   # its own commands once more

All commands of a file run one after the other in one empty folder. If one of them traces a run, the
file also keeps what the picture `barrier` shows of it.
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
from mpipar.errors import DataError
from mpipar.run.trace.trace_file import Trace, read
from mpipar.study.trace import waits
from mpipar.study.trace.timeline import median_step

BENCH = "docs.build measure"
PARTS = ("computes", "waits for the last rank", "transfer")  # of a rank's time at a barrier
QUICK = 10  # seconds: a file whose commands take less has them run in CI
LINE = re.compile(r"(mpipar/[\w/]+\.py):\d+")  # wrong after the next change above it


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
            seconds = round(time.perf_counter() - start, 1)
            rows.append({"command": command, "seconds": seconds, "output": lasting(output)})
        beside = last_trace(workplace.folder())
    results.write(str(path), BENCH, rows, beside=beside)


def lasting(output: str) -> str:
    """Return the output without line numbers, and with `host` for this machine's name.

    Columns keep their places.
    """

    def host(found: re.Match) -> str:
        return "host".ljust(len(found[0])) if len(found[1]) > 1 else f"host{found[1]}"

    output = LINE.sub(lambda found: found[1].ljust(len(found[0])), output)
    return re.sub(rf"(?<![\w.-]){re.escape(socket.gethostname())}(?![\w.-])( *)", host, output)


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


# --- what the picture `barrier` shows


def last_trace(folder: Path) -> dict:
    """Return the `barrier` of the newest traced run below a folder, or {}."""
    found = sorted(folder.glob("**/trace/meta.json"), key=lambda path: path.stat().st_mtime)
    return {"barrier": barrier(read(found[-1].parent.parent))} if found else {}


def barrier(trace: Trace) -> dict:
    """Return the step's collective with the most waiting: its name, and the parts of each rank.

    parts: (rank, what, milliseconds of its start and end since the first rank arrived).
    """
    step, _ = median_step(trace)
    found = [
        event
        for event in waits.find(trace).events
        if len(event.calls) > 1
        and event.operation != "message"
        and event.calls[0].record.step == step
    ]
    if not found:
        return {}
    event = max(found, key=lambda one: sum(call.wait_ns for call in one.calls))
    first, parts = min(call.record.waited_ns for call in event.calls), []
    for call in event.calls:
        came, done = call.record.waited_ns - first, call.record.done_ns - first
        ends = [round(one * 1e-6, 4) for one in (0, came, came + call.wait_ns, done)]
        for what, start, end in zip(PARTS, ends, ends[1:], strict=False):
            parts.append([call.rank, what, start, end])
    return {"name": f"{event.operation} {event.name}", "parts": parts}
