"""Outputs that name times, or that take long: kept in result files, with the machine they are of.

    python -m bench.docs measure bench/results/tour/naive.json 'COMMAND' 'COMMAND'
    python -m bench.docs measure bench/results/tour/naive.json      # its own commands once more

All commands of a file run one after the other in one empty folder. What the pictures `barrier` and
`predicted` need of a traced run there is kept beside.
"""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path

from bench import results
from bench.docs import traced
from bench.docs.blocks import Block
from bench.docs.commands import Workplace, console
from bench.places import by_function
from mpipar.errors import DataError

BENCH = "bench.docs measure"
QUICK = 10  # seconds: a file whose commands take less has them run in CI


def measure(path: Path, commands: list[str]) -> None:
    """Run the commands, and write their outputs. Raises DataError if one of them fails."""
    commands = commands or [row["command"] for row in rows_of(path)]
    workplace, rows = Workplace(), []
    try:
        for command in commands:
            start = time.perf_counter()
            code, output = workplace.run(command)
            if code:
                raise DataError(f"{command}: exit code {code}\n{output}")
            rows.append({"command": command, "seconds": round(time.perf_counter() - start, 1),
                         "output": by_function(without_host(output))})
        beside = traced.last_trace(workplace.folder())
    finally:
        workplace.close()
    results.write(str(path), BENCH, rows, beside=beside)


def without_host(output: str) -> str:
    """The output with the word `host` for the name of this one; columns keep their places."""
    def replace(found: re.Match) -> str:
        width = len(found[0]) if len(found[1]) > 1 else 0
        return "host".ljust(width) if width else f"host{found[1]}"

    return re.sub(rf"(?<![\w.-]){re.escape(socket.gethostname())}(?![\w.-])( *)", replace, output)


def is_quick(path: Path) -> bool:
    """Whether CI runs the commands of a file, and not only parses their flags."""
    return sum(row["seconds"] for row in rows_of(path)) < QUICK


def rows_of(path: Path) -> list[dict]:
    """The commands of a file with their seconds and outputs. Raises DataError."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; name the commands to measure") from error
    except ValueError as error:
        raise DataError(f"{path}: is no JSON; name a new file") from error
    bench = found.get("bench") if isinstance(found, dict) else "another program"
    if bench != BENCH:
        raise DataError(f"{path}: is a file of {bench}, not of {BENCH}")
    return found["rows"]


def shown(block: Block, root: Path) -> str:
    """The commands and outputs of a file, or `:: part N` of them, and the machine."""
    path = root / block.words
    try:
        rows = rows_of(path)
    except DataError as error:
        raise block.problem(str(error)) from error
    if "part" in block.options:
        number = int(block.options["part"])
        if not 1 <= number <= len(rows):
            raise block.problem(f"has {len(rows)} parts")
        rows = rows[number - 1:number]
    parts = [console(block, row["command"], row["output"], "bash not-run") for row in rows]
    machine = json.loads(path.read_text())["machine"]
    facts = f"{machine['date']}, {machine['cores']} cores, {machine['cpu']}"
    return "\n\n".join([*parts, f"Measured: {facts}."])
