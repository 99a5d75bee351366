"""The result file: JSON lines, one schema version, every sample's time; and what is made of it.

A launch has a head (machine, library, environment, flags), a line for each row, and a last line
that says how it ended. A line is written whole, so the file of a killed run is valid up to its end.
"""

import io
import json
import os
from pathlib import Path
from typing import Any

from mpipar.config.text import shown
from mpipar.errors import DataError, OutputError
from mpipar.run.console.tables import csv_text
from mpipar.run.files.bounded import open_regular, parse_json
from mpipar.study.plan.machine import NETWORK

SCHEMA = 3
NOT_ONE = "is this a file of mpipar net --json?"
MEASURED = "# the links are measured by mpipar net; all above is copied"
LINKS = "\n[[links]]\njoins = {}\ngbytes_s = {:.4g}\nlatency_us = {:.4g}\n"
Row = dict[str, Any]


class Run:
    """One launch: head, rows, and refused cases."""

    def __init__(self, head: Row):
        self.head, self.rows, self.refused = head, list[Row](), list[str]()


def write_text(path: str, text: str, append: bool = False) -> None:
    """Write a file, and make the folders that it lacks. Raises OutputError."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}") from error


def check_writable(*paths: str | None) -> None:
    """Before measuring, raise OutputError if one of these files could not be written."""
    for path in filter(None, paths):
        existed = os.path.lexists(path)
        write_text(path, "", append=True)
        if not existed:
            Path(path).unlink()


def line(kind: str, value: Row) -> str:
    """Return one line of a result file."""
    return json.dumps({"kind": kind, **value}, separators=(",", ":")) + "\n"


def parse(lines: list[str], name: str) -> list[Run]:
    """Return the launches in the lines of a file. Raises DataError if it is not such a file."""
    runs: list[Run] = []
    for number, text in enumerate(lines, 1):
        if not text.endswith("\n"):
            break  # killed while writing: what came before is valid
        try:
            value = parse_json(text)
            kind = value.pop("kind")
            if kind == "head":
                if (found := value["schema"]) != SCHEMA:
                    raise DataError(f"{name}:{number}: schema {shown(found)}, this reads {SCHEMA}")
                runs.append(Run(value))
            elif kind == "row":
                runs[-1].rows.append(value)
            else:
                runs[-1].refused = value["refused"]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(f"{name}:{number}: {NOT_ONE}") from error
    if not runs:
        raise DataError(f"{name}: empty; {NOT_ONE}")
    return runs


def read(path: str) -> list[Run]:
    """Return the launches in a file. Raises DataError when it cannot be read or understood."""
    try:
        with open_regular(path) as file:
            return parse(list(io.TextIOWrapper(file, encoding="utf-8")), path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not text; {NOT_ONE}") from error


def as_csv(rows: list[Row]) -> str:
    """Return one line for each row, with every column but the samples."""
    return csv_text(
        [
            {
                name: "+".join(map(str, value)) if isinstance(value, list) else value
                for name, value in row.items()
                if name != "times_us"
            }
            for row in rows
        ]
    )


def sheet(base: str, rows: list[Row]) -> str:
    """Return a machine sheet: that of `base` with the links that these sums show.

    The rows of one axis, on which ranks of one host (or of all) add up, make a level: its rate is
    the bus bandwidth of the largest size, its latency the time of the smallest. Between hosts it
    is the share of a rank, of which sums reach NETWORK.
    """
    text = base.split("[[links]]", maxsplit=1)[0].rstrip() + f"\n\n{MEASURED}\n"
    levels = []
    for axis in ("host", "hosts"):
        own = sorted(
            (row for row in rows if row["axis"] == axis), key=lambda row: row["size_bytes"]
        )
        if own:
            least, most = own[0]["size_bytes"], own[-1]["size_bytes"]
            levels.append(
                (
                    max(len(row["ranks"]) for row in own) if axis == "host" else 1,
                    min(row["busbw_GBps"] for row in own if row["size_bytes"] == most),
                    max(row["median_us"] for row in own if row["size_bytes"] == least),
                )
            )
    if len(levels) == 1:  # the other level is unknown: as this one
        levels *= 2
    (joins, *inside), (_, rate, latency) = levels
    return (
        text
        + LINKS.format(joins, *inside)
        + LINKS.format(0, rate / (joins * NETWORK), latency)  # of a rank
    )
