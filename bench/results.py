"""Writes result files of benchmarks, and turns them into tables for the pages."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import importlib.util
import json
import os
import platform
from pathlib import Path

import numpy as np

from mpipar.errors import DataError
from mpipar.interconnect.files import write_text
from mpipar.run.process.environment import processor

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 1


def machine() -> dict:
    """Return facts that a figure depends on: processor, cores, system, versions, date."""
    return {
        "date": dt.date.today().isoformat(),
        "cpu": processor()[0] or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def write(path: str | None, bench: str, rows: list[dict], **facts) -> None:
    """Write a result file, if there is a path. Raises OutputError.

    rows: each column's name has its unit. facts: everything else.
    """
    if path is None:
        return
    result = {"schema": SCHEMA, "bench": bench, "machine": machine() | facts, "rows": rows}
    write_text(path, one_row_a_line(result) + "\n")


def one_row_a_line(value) -> str:
    """Return JSON in which each row of a list, and each key above it, has a line of its own."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
    if isinstance(value, dict) and any(isinstance(one, dict | list) for one in value.values()):
        parts = (f"{json.dumps(name)}: {one_row_a_line(one)}" for name, one in value.items())
        return "{\n" + ",\n".join(parts) + "\n}"
    return json.dumps(value)


def read(path: Path, bench: str) -> dict:
    """Return a result file of a program. Raises DataError if it is another program's."""
    found = json.loads(path.read_text())
    if not f"{found['bench']} ".startswith(f"{bench} "):
        raise DataError(f"{path}: is a file of {found['bench']}, not of {bench}")
    return found


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    return {
        name: importlib.metadata.version(name)
        for name in packages
        if importlib.util.find_spec(name)
    }


def text(value) -> str:
    """Return a value as the text of a table's cell."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def markdown_table(rows: list[dict]) -> str:
    """Return the rows as a Markdown table."""
    columns = list(rows[0])
    return cells_table(columns, ([text(row[column]) for column in columns] for row in rows))


def cells_table(head: list[str], cells) -> str:
    """Return a Markdown table of these texts."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells)])


def markdown(result: dict) -> str:
    """Return the rows as a Markdown table, and a line that names where they were measured."""
    assert result["schema"] == SCHEMA, f"schema {result['schema']}, this reads {SCHEMA}"
    facts = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    return f"{markdown_table(result['rows'])}\n\n`{result['bench']}`: {facts}"
