"""The cost model of a machine as a file: JSON with a schema version, read strictly."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from mpipar.errors import DataError, OutputError
from mpipar.files.bounded import read_json
from mpipar.files.replace import replace_file
from mpipar.files.text import shown
from mpipar.files.typed import built
from mpipar.plan.machine import Machine

SCHEMA = 2
MOST_BYTES = 64 << 20
LARGEST = 1e15  # of any number here: bytes, microseconds, factors
# Ends of 95 % intervals, and the difference of two measured times, may be below 0.
MAY_BE_NEGATIVE = ("_low", "_low_us", "call_overhead_us")
CURE = "write it with python -m bench.calibrate"


def save(machine: Machine, path: str) -> None:
    """Write the file, whole or not at all. Raises OutputError if it cannot be written."""
    text = json.dumps({"schema": SCHEMA, **asdict(machine)}, indent=1) + "\n"
    try:
        replace_file(path, [text.encode()])
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}") from error


def check_writable(path: str) -> None:
    """Raise OutputError if `save` could not write the file; called before long measurements."""
    if Path(path).exists() and not Path(path).is_file():  # saving would replace a device by a file
        raise OutputError(f"{path}: is a folder or a device; name a file")
    if not os.access(Path(path).resolve().parent, os.W_OK):
        raise OutputError(f"{path}: its folder is missing or cannot be written")


def load(path: str) -> Machine:
    """Read a file.

    Raises DataError if it cannot be read, is incomplete, or has another schema version.
    """
    value = read_json(path, cure=CURE, most_bytes=MOST_BYTES)
    if not isinstance(value, dict) or "schema" not in value:
        raise DataError(f"{path}: not a cost model of a machine; {CURE}")
    schema = value.pop("schema")
    if schema != SCHEMA:
        raise DataError(f"{path}: schema {shown(schema)}, this program reads {SCHEMA}; {CURE}")
    try:
        machine = built(Machine, value, "the file")
    except ValueError as error:
        raise DataError(f"{path}: {error}; {CURE}") from error
    if problems := _problems(machine):
        raise DataError([f"{path}: {text}" for text in problems])
    return machine


def _problems(machine: Machine) -> list[str]:
    """List what is wrong: numbers that no machine has, and curves without a range."""
    found = []
    for place, number in numbers(asdict(replace(machine, provenance={})), "the file"):
        if number < 0 and not place.endswith(MAY_BE_NEGATIVE):
            found.append(f"{place} is {number:g}: must not be below 0")
        if number > LARGEST:
            found.append(f"{place} is {number:g}: larger or slower than any machine")
    for curve in machine.curves:
        name = f"{curve.operation} of {curve.ranks} ranks"
        ends = [end for piece in curve.pieces for end in (piece.from_bytes, piece.to_bytes)]
        if not curve.pieces or not curve.fitted_bytes:
            found.append(f"{name}: no pieces or no fitted_bytes")
        elif ends != sorted(ends) or list(curve.fitted_bytes) != sorted(curve.fitted_bytes):
            found.append(f"{name}: pieces and fitted_bytes must ascend")
    shapes = {(one.m, one.k, one.n) for one in machine.products}
    grid = math.prod(len({shape[axis] for shape in shapes}) for axis in range(3))
    if len(shapes) != (grid if shapes else 0) or any(
        min(one.m, one.k, one.n, one.seconds) <= 0 for one in machine.products
    ):
        found.append("products: every combination of some M, K and N once, all above 0")
    if any(min(units.rows, units.tp, units.ep) < 1 for units in machine.units):
        found.append("units: rows, tp and ep must be at least 1")
    if any(units.sharing < 1 for units in machine.units):
        found.append("units: sharing must be at least 1")
    if min(machine.ranks, machine.cores) < 1:
        found.append("ranks and cores must be at least 1")
    return found


def numbers(value, place: str = "") -> Iterator[tuple[str, float]]:
    """Yield (place, number) of every number inside dicts and lists."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from numbers(one, f"{place}.{key}" if place else key)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from numbers(one, f"{place}[{number}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place, value
