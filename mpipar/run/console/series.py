"""A run's numbers by step, from metrics.jsonl and evaluations.jsonl: as a table and as curves."""

import csv
import io
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mpipar.run.files.bounded import open_regular

MOST_LINE = 1 << 20  # bytes
MOST_POINTS = 1000  # of a drawn curve; longer ones are drawn as means
COLUMNS = {
    "step": "step",
    "loss": "loss_nats",
    "held_out_loss": "held_out_loss_nats",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "loss_scale": "loss_scale",
    "skipped": "skipped",
    "step_seconds": "step_seconds",
    "tokens_per_second": "tokens_per_second",
    "comm_share_mean": "comm_share_mean",
    "comm_share_max": "comm_share_max",
}
PARTS = ("calls", "bytes", "seconds_mean", "seconds_max")  # what lines report for each axis


def lines_of(folder: Path, name: str) -> Iterator[tuple[bytes, dict | None]]:
    """Yield each whole line of a run's file and its object, or None if the line is damaged.

    A last line without its newline is treated as not written. Nothing is read after a line of more
    than MOST_LINE bytes. Yields nothing if there is no such file. Raises OSError.
    """
    with suppress(FileNotFoundError), open_regular(name, folder) as file:
        while line := file.readline(MOST_LINE):
            if line.endswith(b"\n"):
                yield line, _object_of(line)
            elif len(line) == MOST_LINE:
                yield line, None
                return


def _object_of(line: bytes) -> dict | None:
    """Return the object in a line if it is that of a step, else None."""
    with suppress(ValueError, RecursionError):
        value = json.loads(line.decode())
        if isinstance(value, dict) and type(value.get("step")) is int:
            return value
    return None


def read_lines(folder: Path, name: str) -> tuple[list[dict], int]:
    """Return (objects, number of damaged lines) of a file that a run writes; see `lines_of`."""
    found = [value for _, value in lines_of(folder, name)]
    whole = [value for value in found if value is not None]
    return whole, len(found) - len(whole)


def csv_text(lines: list[dict], evaluations: list[dict]) -> str:
    """Return one line per step, with units in the column names; unknown values are empty.

    Bytes and calls are per step, summed over ranks; seconds_mean and seconds_max are the mean and
    maximum over ranks.
    """
    held_out = {one["step"]: one["held_out_loss"] for one in evaluations}
    axes = sorted({axis for line in lines for axis in line.get("comm", ())})
    known = {name for line in lines for name in line} | {"held_out_loss"}
    columns = [name for name in COLUMNS if name in known]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        [
            *(COLUMNS[name] for name in columns),
            *(f"comm_{axis}_{part}" for axis in axes for part in PARTS),
        ]
    )
    for line in lines:
        values = {"held_out_loss": held_out.get(line["step"])} | line
        comm = [line.get("comm", {}).get(axis, {}) for axis in axes]
        writer.writerow(
            [
                *(values.get(name) for name in columns),
                *(own.get(part, 0) for own in comm for part in PARTS),
            ]
        )
    return file.getvalue()


def curves(lines: list[dict], evaluations: list[dict]) -> list[dict]:
    """Return what a page draws: [{title, unit, series: [{name, colour, points: [[step, value]]}]}].

    Curves without values are left out.
    """
    wanted = [
        (
            "Loss",
            "nats per token",
            [
                ("training", "F", _points(lines, "loss")),
                ("held out", "W", _points(evaluations, "held_out_loss")),
            ],
        ),
        ("Learning rate", "", [("learning rate", "data", _points(lines, "lr"))]),
        ("Gradient norm", "before clipping", [("norm", "opt", _points(lines, "grad_norm"))]),
        ("Speed", "tokens per second", [("speed", "B", _points(lines, "tokens_per_second"))]),
        (
            "Time in barriers",
            "share of a step",
            [("share", "axis-tp", _points(lines, "comm_share_mean"))],
        ),
    ]
    found = []
    for title, words, series in wanted:
        some = [
            {"name": name, "colour": colour, "points": thinned(points)}
            for name, colour, points in series
            if any(value for _, value in points)
        ]
        if some:
            found.append({"title": title, "unit": words, "series": some})
    return found


def _points(lines: list[dict], name: str) -> list[tuple[int, float]]:
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def thinned(points: list[tuple[int, float]]) -> list[list]:
    """Return at most MOST_POINTS points: means of equally many neighbours, at the last's step."""
    each = -(-len(points) // MOST_POINTS) or 1
    parts = [points[first : first + each] for first in range(0, len(points), each)]
    return [[part[-1][0], sum(value for _, value in part) / len(part)] for part in parts]
