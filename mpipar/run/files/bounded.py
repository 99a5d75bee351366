"""Reads user-supplied files: regular files only, values within bounds, entries of annotated types.

A broken file must cost no more than one sentence, so anything too large or too deep is refused
before it is processed. Each function raises the error class that the caller names:
DataError for data, UsageError for a configuration.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import tomllib
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mpipar.config.text import brief, shown
from mpipar.errors import DataError, UserError
from mpipar.run.files import no_links
from mpipar.run.files.recognize import HEAD, recognized

MOST_BYTES = 1 << 20  # of a file whose reader sets no other limit
MOST_DEPTH = 32  # nested lists and objects
MOST_BITS = 128  # of an integer; tokenizers write 10**30 for "no limit"
ODD = re.compile("[\0\ud800-\udfff]")  # no file's name has a zero, no UTF-8 half a character


def open_regular(path: str | os.PathLike, root: str | os.PathLike | None = None) -> BinaryIO:
    """Open a regular file for reading; raise OSError also for a pipe, a device or a folder.

    A pipe without a writer would block, and a device has no end. root: a run folder to which the
    path is relative, and below which no link is followed; without it, links are followed.
    """
    if root is None:
        return open(path, "rb", opener=_open_regular)
    return open(no_links.opened(root, os.fspath(path), os.O_RDONLY), "rb")


def _open_regular(path: str, flags: int) -> int:
    # O_NONBLOCK has no effect on a regular file; it opens a pipe without waiting for a writer.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is a folder, a pipe or a device; give a regular file")


def read_bytes(path, *, most_bytes: int = MOST_BYTES, root=None) -> bytes:
    """Return the content of a small regular file; raise OSError, and ValueError if it is larger.

    root: see `open_regular`, here and below.
    """
    with open_regular(path, root) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"has more than {most_bytes:,} bytes, which is the limit")
    return content


def read_text(path, *, most_bytes: int = MOST_BYTES, root=None) -> str:
    """Return the text of a small regular file in UTF-8; raise OSError and ValueError.

    A byte order mark is left out.
    """
    return _text_of(read_bytes(path, most_bytes=most_bytes, root=root))


def _text_of(content: bytes) -> str:
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text: byte {error.start:,} cannot be decoded") from None


@contextmanager
def problems_as(error: type[UserError], where: str, cure: str = "") -> Iterator[None]:
    """Turn OSError and ValueError inside into the user's error: "where: what; cure"."""
    try:
        yield
    except (OSError, ValueError) as problem:
        text = getattr(problem, "strerror", None) or problem
        raise error(f"{where}: {text}{cure and '; ' + cure}") from None


def read_json(path, *, where: str = "", cure: str = "", most_bytes: int = MOST_BYTES, root=None):
    """Return the value of a JSON file; raise DataError with one sentence. See `parse_json`.

    where: begins the sentence in place of the path. cure: ends it.
    """
    with problems_as(DataError, where or str(Path(root or "", path)), cure):
        content = read_bytes(path, most_bytes=most_bytes, root=root)
        if kind := recognized(content[:HEAD], len(content)):
            raise ValueError(f"is not JSON: it is {kind}")
        return parse_json(_text_of(content))


def read_toml(path, error: type[UserError], *, where: str = "") -> dict:
    """Return the table of a TOML file; raise `error` with one sentence. See `parse_toml`."""
    with problems_as(error, where or str(path)):
        return parse_toml(read_text(path))


def parse_json(text: str):
    """Return the value of a JSON text; ValueError says what is wrong and where.

    Besides invalid JSON, it refuses what `_check` lists, and duplicate keys in an object.
    """
    return _checked("JSON", DECODER.decode, text)


def parse_toml(text: str) -> dict:
    """Return the table of a TOML text, as `parse_json` does; numbers may be infinite or NaN."""
    return _checked("TOML", tomllib.loads, text)


def _checked(kind: str, decode: Callable[[str], Any], text: str):
    """Return decode(text) if nothing is wrong with it; ValueError says why in one line."""
    try:
        value = decode(text)
        _check(value, finite=kind == "JSON")
    except RecursionError:
        raise ValueError(f"has lists or objects nested more than {MOST_DEPTH} deep") from None
    except ValueError as error:
        raise ValueError(f"is not {kind}: {brief(str(error), 200)}") from None
    return value


def _object(pairs: list[tuple]) -> dict:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object)  # shared: a trace has many short lines


def _check(value, depth: int = 0, *, finite: bool):
    """Raise ValueError for a number without end and text that no file or terminal takes."""
    if depth > MOST_DEPTH:
        raise RecursionError
    if isinstance(value, dict | list):
        for one in [*value, *value.values()] if isinstance(value, dict) else value:
            _check(one, depth + 1, finite=finite)
    elif (
        (isinstance(value, str) and ODD.search(value))
        or (isinstance(value, int) and value.bit_length() > MOST_BITS)
        or (finite and isinstance(value, float) and not math.isfinite(value))
    ):
        raise ValueError(f"it may not have the value {shown(value)}")


def built(kind, value, where: str):
    """Return a JSON value as a value of an annotated type; ValueError says where it does not fit.

    Types: dataclasses, named tuples, tuple[X, ...], tuple[X, X], dict[str, X], dict[int, X],
    X | None, int of 64 bits, float, bool, dict, and str of one line.
    """
    if isinstance(kind, types.UnionType):  # X | None
        return None if value is None else built(typing.get_args(kind)[0], value, where)
    if typing.get_origin(kind) is tuple:
        value, (inner, *more) = built(list, value, where), typing.get_args(kind)
        if more != [...] and len(value) != 1 + len(more):
            raise ValueError(f"{where} must have {1 + len(more)} values")
        return tuple(built(inner, one, f"{where}[{place}]") for place, one in enumerate(value))
    if typing.get_origin(kind) is dict:
        key, inner = typing.get_args(kind)
        return {
            key(built(str, name, f"a name in {where}")): built(inner, one, f"{where}.{name}")
            for name, one in built(dict, value, where).items()
        }
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return _record(kind, built(dict, value, where), where)
    if kind is float and type(value) is int:
        value = float(value)
    if (
        type(value) is not kind
        or (kind is int and not -(2**63) <= value < 2**63)
        or (kind is float and not math.isfinite(value))
        or (kind is str and not value.isprintable())
    ):
        raise ValueError(f"{where} is {shown(value)}, not a legal {kind.__name__}")
    return value


def _record(kind, value: dict, where: str):
    """Return a dataclass or a named tuple of the entries of an object."""
    hints = typing.get_type_hints(kind)
    if unknown := sorted(value.keys() - hints.keys()):
        raise ValueError(f"{where} has an unknown key {shown(unknown[0])}")
    try:
        return kind(
            **{name: built(hints[name], one, f"{where}.{name}") for name, one in value.items()}
        )
    except TypeError as error:  # it names the keys that are missing
        raise ValueError(f"{where} has not all of its keys: {error}") from None
