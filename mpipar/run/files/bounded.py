"""Reads user-supplied files: regular files only, and values within bounds.

A broken file must cost no more than one sentence, so anything too large or too deep is refused
before it is processed. Each function raises the error class that the caller names:
DataError for data, UsageError for a configuration.
"""

from __future__ import annotations

import codecs
import errno
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mpipar.config.text import brief, shown
from mpipar.errors import DataError, UserError
from mpipar.run.files import no_links
from mpipar.run.files.recognize import HEAD, recognized

MOST_BYTES = 1 << 20  # of a file whose reader sets no other limit
MOST_DEPTH = 32  # nested lists and objects
TOO_DEEP = f"has lists or objects nested more than {MOST_DEPTH} deep"
ODD = re.compile("[\0\ud800-\udfff]")  # no file's name has a zero, no UTF-8 half a character


def open_regular(path: str | os.PathLike, root: str | os.PathLike | None = None) -> BinaryIO:
    """Open a regular file for reading; raise OSError also for a pipe, a device or a folder.

    A pipe without a writer would block, and a device has no end. root: a run folder to which the
    path is relative, and below which no link is followed; without it, links are followed.
    """
    if "\0" in os.fspath(path):
        raise OSError(errno.EINVAL, "a file name cannot contain a zero byte")
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
        content = file.read(min(most_bytes, os.fstat(file.fileno()).st_size) + 1)
        size = max(len(content), os.fstat(file.fileno()).st_size)
    if size > most_bytes:
        raise ValueError(f"has {size:,} bytes; the limit is {most_bytes:,}")
    return content


def read_text(path, *, most_bytes: int = MOST_BYTES, root=None) -> str:
    """Return the text of a small regular file in UTF-8; raise OSError and ValueError.

    A byte order mark is left out.
    """
    return _text_of(read_bytes(path, most_bytes=most_bytes, root=root))


def _text_of(content: bytes) -> str:
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("is text in UTF-16; save it in UTF-8")
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


def parse_json(text: str, *, huge: bool = False):
    """Return the value of a JSON text; ValueError says what is wrong and where.

    Besides invalid JSON, it refuses what `_check` lists, and duplicate keys in an object.
    huge: allow integers of more than 64 bits, as in transformers' tokenizer_config.json.
    """
    value = decode_json(text)
    _check(value, huge=huge)
    return value


def decode_json(text: str):
    """Return the value of a JSON text whose values the caller checks; raises ValueError."""
    return _decoded("JSON", DECODER.decode, text)


def parse_toml(text: str) -> dict:
    """Return the table of a TOML text; ValueError says what is wrong and where.

    Besides invalid TOML, it refuses what `_check` lists, except numbers that are not finite.
    """
    value = _decoded("TOML", tomllib.loads, text)
    _check(value, finite=False)
    return value


def _decoded(kind: str, decode: Callable[[str], Any], text: str):
    """Return decode(text); if it fails, ValueError says why in one line."""
    try:
        return decode(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(f"is not {kind}: {brief(str(error), 200)}") from None


def _object(pairs: list[tuple]) -> dict:
    found: dict = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"an object has the key {shown(name)} twice")
        found[name] = value
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object)  # shared: a trace has many short lines


def _check(value, depth: int = 0, *, finite: bool = True, huge: bool = False):
    """Raise ValueError for depth, a huge number, NaN, and text that no file or terminal takes."""
    if depth > MOST_DEPTH:
        raise ValueError(TOO_DEEP)
    if isinstance(value, dict | list):
        for one in [*value, *value.values()] if isinstance(value, dict) else value:
            _check(one, depth + 1, finite=finite, huge=huge)
    elif isinstance(value, str) and ODD.search(value):
        raise ValueError(f"has a zero byte or half a character in the text {shown(value)}")
    elif isinstance(value, int) and not huge and not -(2**63) <= value < 2**64:
        raise ValueError("has an integer that 64 bits cannot hold")
    elif finite and isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"has {value}, which is not a finite number")
