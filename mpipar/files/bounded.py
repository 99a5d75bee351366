"""Reads files that users hand in: regular files only, and values within bounds.

A hostile or broken file must cost no more than a sentence. So a size, a depth, a number of digits
and a name that is longer are refused before anything is done with them. Each function raises the
error class that the caller names: DataError for data, UsageError for a configuration.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mpipar.errors import DataError, UserError
from mpipar.files import no_links
from mpipar.files.text import brief, shown

MOST_BYTES = 1 << 20  # of a file whose reader names no other bound
MOST_DEPTH = 32  # lists and objects inside each other
TOO_DEEP = f"holds lists or objects more than {MOST_DEPTH} deep inside each other"
MOST_NAME = 500  # characters of a key
MOST_PARTS = 32  # of a dotted key in TOML: tomllib needs their square in time and memory
# In TOML, what lies between the dots of a dotted name, and more: texts, names, white space. Each
# pattern goes over a line once, whatever is on it.
BETWEEN_DOTS = re.compile(
    r"""  "(?:\\.?|[^"\\])*(?:"|$)  |  '[^']*(?:'|$)  |  [\w\s-]+  """, re.VERBOSE)


def open_regular(path: str | os.PathLike, root: str | os.PathLike | None = None) -> BinaryIO:
    """Open a regular file for reading; raises OSError, also for a pipe, a device or a folder.

    A pipe that nobody writes to would block, and a device has no end. root: the path is relative
    to this folder of a run, and no link is followed below it; else links count.
    """
    if "\0" in os.fspath(path):
        raise OSError(errno.EINVAL, "a file's name cannot hold a zero byte")
    if root is None:
        return open(path, "rb", opener=_open_regular)
    return open(Path(root, path), "rb",
                opener=lambda _, flags: no_links.opened(root, os.fspath(path), flags))


def _open_regular(path: str, flags: int) -> int:
    # On a regular file O_NONBLOCK does nothing. A pipe is opened without waiting for its writer.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = no_links.kind_of(os.fstat(descriptor).st_mode)
    if not kind:
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"is {kind}; give a regular file")


def read_bytes(path, *, most_bytes: int = MOST_BYTES, root=None) -> bytes:
    """Return the whole of a small regular file; raises OSError, and ValueError if it is larger.

    root: see `open_regular`, here and below.
    """
    with open_regular(path, root) as file:
        content = file.read(min(most_bytes, os.fstat(file.fileno()).st_size) + 1)
        size = max(len(content), os.fstat(file.fileno()).st_size)
    if size > most_bytes:
        raise ValueError(f"has {size:,} bytes; at most {most_bytes:,} are read")
    return content


def read_text(path, *, most_bytes: int = MOST_BYTES, root=None) -> str:
    """Return the text of a small regular file in UTF-8; raises OSError and ValueError."""
    try:
        return read_bytes(path, most_bytes=most_bytes, root=root).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text: byte {error.start:,} cannot be read") from None


@contextmanager
def problems_as(error: type[UserError], where: str, cure: str = "") -> Iterator[None]:
    """Turn OSError and ValueError of its block into the user's error: "where: what; cure"."""
    try:
        yield
    except (OSError, ValueError) as problem:
        text = getattr(problem, "strerror", None) or problem
        raise error(f"{where}: {text}{cure and '; ' + cure}") from None


def read_json(path, error: type[UserError] = DataError, *, where: str = "", cure: str = "",
              most_bytes: int = MOST_BYTES, root=None):
    """Return the value of a JSON file; raises `error` with one sentence. See `parse_json`.

    where: begins the sentence in place of the path. cure: ends it.
    """
    with problems_as(error, where or str(Path(root or "", path)), cure):
        return parse_json(read_text(path, most_bytes=most_bytes, root=root))


def read_toml(path, error: type[UserError], *, where: str = "",
              most_bytes: int = MOST_BYTES) -> dict:
    """Return the table of a TOML file; raises `error` with one sentence. See `parse_toml`."""
    with problems_as(error, where or str(path)):
        return parse_toml(read_text(path, most_bytes=most_bytes))


def parse_json(text: str, *, huge: bool = False):
    """Return the value of a JSON text; ValueError says what is wrong and where.

    Besides what is no JSON, it refuses what `_check_values` names, and a key twice in an object.
    huge: whole numbers may need more than 64 bits, as in a tokenizer_config.json of transformers.
    """
    value = _decoded(DECODER.decode, text)
    _check_values(value, huge=huge)
    return value


def _decoded(decode: Callable[[str], Any], text: str):
    """What decode(text) returns; ValueError says in one line why it is none."""
    try:
        return decode(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: line {error.lineno}, column {error.colno}:"
                         f" {error.msg}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"is not TOML: {brief(str(error), 200)}") from None
    except TwiceError:
        raise
    except ValueError:  # Python reads no more than some 4,300 digits
        raise ValueError("holds a whole number with too many digits") from None


class TwiceError(ValueError):
    """A key stands more than once in one object: it is not known which value is meant."""


def _object(pairs: list[tuple]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, times = Counter(name for name, _ in pairs).most_common(1)[0]
        raise TwiceError(f"holds the key {shown(twice)} {times} times in one object")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object)  # made once: a trace has many short lines


def parse_toml(text: str) -> dict:
    """Return the table of a TOML text; ValueError says what is wrong and where.

    Besides what is no TOML, it refuses what `_check_values` names but not numbers that are not
    finite.
    """
    if any("." * MOST_PARTS in BETWEEN_DOTS.sub("", line) for line in text.splitlines()):
        raise ValueError(f"holds a name of more than {MOST_PARTS} parts with dots between them")
    value = _decoded(tomllib.loads, text)
    _check_values(value, finite=False)
    return value


def _check_values(value, finite: bool = True, huge: bool = False) -> None:
    """ValueError for depth, a long name, a huge number, NaN, a zero byte, or half a character."""
    level = [("", value)]  # each with the key that it lies under
    for _ in range(MOST_DEPTH + 1):
        below = []
        for key, one in level:
            if isinstance(one, dict):
                for name in one:
                    if len(name) > MOST_NAME:
                        raise ValueError(f"holds a name of {len(name):,} characters; at most"
                                         f" {MOST_NAME} are read")
                    _check_text(name, name)
                below.extend(one.items())
            elif isinstance(one, list):
                below.extend([(key, item) for item in one])
            elif isinstance(one, str):
                _check_text(one, key)
            elif isinstance(one, int) and not huge and not -(2**63) <= one < 2**64:
                raise ValueError(f"holds a whole number that 64 bits cannot hold{_at(key)}")
            elif finite and isinstance(one, float) and not math.isfinite(one):
                raise ValueError(f"holds {one}, which is no finite number{_at(key)}")
        if not below:
            return
        level = below
    raise ValueError(TOO_DEEP)


def _check_text(text: str, key: str) -> None:
    if "\0" in text:
        raise ValueError(f"holds a zero byte in a text{_at(key)}")
    if not text.isascii() and any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        raise ValueError(f"holds half a character in a text{_at(key)}")


def _at(key: str) -> str:
    return f", at {shown(key)}" if key else ""
