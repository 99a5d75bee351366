"""The result file of a benchmark: JSON lines, one schema version, every sample kept.

Line 1 is the head: machine, library, launch, options. It is followed by one line for each row, and
a last line that says how the run ended. A line is written whole, so the file of a killed run is
valid up to its end. Readers refuse versions that they do not know.
"""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

from mpipar.errors import DataError, OutputError
from mpipar.files.bounded import open_regular, parse_json
from mpipar.files.text import counted, shown

SCHEMA = 2
COMPLETE, INTERRUPTED, CUT_OFF = "complete", "interrupted", "cut off"
SAMPLES = ("entered_ns", "left_ns", "late_at")  # the wide columns: tables leave them out
COLUMNS = {  # every row has these
    "case",
    "via",
    "transport",
    "axis",
    "mode",
    "ranks",
    "link",
    "dtype",
    "buffers",
    "in_place",
    "window",
    "per_sample",
    "size_bytes",
    "count",
    "bytes_per_rank_in",
    "bytes_per_rank_out",
    "bytes_on_wire_per_rank",
    "iterations",
    "median_us",
    "p5_us",
    "p95_us",
    "p99_us",
    "max_us",
    "low_us",
    "high_us",
    "algbw_GBps",
    "busbw_GBps",
    "skew_us",
    "slowest_rank",
    "slowest_share",
    "checked",
    "sync",
    "late",
    *SAMPLES,
}

TEXTS = {"case", "via", "transport", "axis", "mode", "link", "dtype", "buffers", "checked", "sync"}
NUMBERS = {name for name in COLUMNS if name.endswith(("_us", "_GBps", "_bytes", "_share"))}


class Writer:
    """Appends whole lines to a file; without a path it does nothing.

    Raises OutputError when the file cannot be written.
    """

    def __init__(self, path: str | None, append: bool = False):
        self.path, self.file = path, None
        if path:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
                self.file = os.open(path, flags, 0o644)
            except OSError as error:
                raise OutputError(f"--json {path}: {error.strerror}") from error

    def _line(self, value: dict) -> None:
        if self.file is not None:
            try:
                os.write(self.file, (json.dumps(value, separators=(",", ":")) + "\n").encode())
            except OSError as error:
                raise OutputError(f"--json {self.path}: {error.strerror}") from error

    def head(self, facts: dict) -> None:
        """Write the first line of a launch: its facts."""
        self._line({"schema": SCHEMA, "kind": "head", **facts})

    def row(self, row: dict) -> None:
        """Write one measured row with its samples."""
        self._line({"kind": "row", **row})

    def end(self, status: str, **facts) -> None:
        """Write the last line of a launch: how it ended."""
        self._line({"kind": "end", "status": status, **facts})
        if self.file is not None:
            os.close(self.file)
            self.file = None


class Run:
    """One launch read from a file: head, rows, refused cases, and how it ended (`status`)."""

    def __init__(self, head: dict):
        self.head, self.rows, self.status, self.refused = head, [], CUT_OFF, []


def parse(lines, name: str) -> list[Run]:
    """Return the launches in the lines of a file. Raises DataError if it is not such a file."""
    runs: list[Run] = []
    lines = list(lines)
    for number, line in enumerate(lines, 1):
        try:
            value = parse_json(line)
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # killed while writing: what came before is valid
            raise DataError(f"{name}:{number}: not a line of JSON: {error}") from error
        if not isinstance(value, dict):
            raise DataError(f"{name}:{number}: no object")
        kind = value.pop("kind", None)
        if kind == "head":
            if (found := value.get("schema")) != SCHEMA:
                raise DataError(
                    f"{name}:{number}: schema {shown(found)}, this program reads {SCHEMA}"
                )
            runs.append(Run(value))
        elif not runs:
            raise DataError(
                f"{name}:{number}: no head before it; is this a file of bench.interconnect --json?"
            )
        elif kind == "row":
            if missing := sorted(COLUMNS - value.keys()):
                raise DataError(f"{name}:{number}: lacks {', '.join(missing)}")
            if wrong := sorted(one for one in NUMBERS if type(value[one]) not in (int, float)):
                raise DataError(f"{name}:{number}: {', '.join(wrong)} must be a number")
            if wrong := sorted(one for one in COLUMNS - NUMBERS if not _fits(one, value[one])):
                raise DataError(f"{name}:{number}: {', '.join(wrong)} must be of another type")
            runs[-1].rows.append(value)
        elif kind == "end":
            runs[-1].status, runs[-1].refused = value.get("status"), value.get("refused", [])
        else:
            raise DataError(f"{name}:{number}: unknown kind {shown(kind)}")
    if not runs:
        raise DataError(f"{name}: empty")
    return runs


def _fits(column: str, value) -> bool:
    """Return whether a value has the type of its column; None stands for a missing value."""
    if column in SAMPLES or column == "ranks":
        rows = value if isinstance(value, list) else [None]
        if rows and all(isinstance(one, list) for one in rows):
            return len(set(map(len, rows))) == 1 and all(
                type(part) is int for one in rows for part in one
            )
        return all(type(one) is int for one in rows)
    if column in TEXTS:
        return value is None or (isinstance(value, str) and value.isprintable())
    return value is None or type(value) in (int, float, bool)


def read(path: str) -> list[Run]:
    """Return the launches in a file. Raises DataError when it cannot be read or understood."""
    try:
        with open_regular(path) as file:
            return parse(io.TextIOWrapper(file, encoding="utf-8"), path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not text; is this a file of bench.interconnect --json?"
        ) from error


def facts_of(path: str) -> dict:
    """Return what the figures of a file depend on, from its first launch."""
    head = read(path)[0].head
    return {name: head[name] for name in ("library", "buffers", "dtype")}


def remark(path: str, runs) -> str:
    """Return one line on a file if one of its launches did not measure everything, else ""."""
    found = [
        f"{name} in {count} of {counted(len(runs), 'launch')}"
        for name in (INTERRUPTED, CUT_OFF)
        if (count := sum(run.status == name for run in runs))
    ]
    if refused := [text for run in runs for text in run.refused]:
        found.append(f"{counted(len(refused), 'case')} refused, the first is {refused[0]}")
    return f"{path}: rows may be missing: {'; '.join(found)}" if found else ""


def rows_of(paths, tell: bool = False) -> list[dict]:
    """Return the rows of all launches in some files, each with the number of its launch.

    tell: name incomplete files on standard error.
    """
    found, launch = [], 0
    for path in paths:
        runs = read(path)
        if tell and (line := remark(path, runs)):
            print(line, file=sys.stderr)
        for run in runs:
            found += [row | {"launch": launch} for row in run.rows]
            launch += 1
    return found
