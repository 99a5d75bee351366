"""Reads user-supplied files: regular files only, values within bounds, entries of annotated types.

A file is named by its first bytes before it is parsed: a pointer of Git LFS, a saved web page or a
pickle would otherwise be reported as a damaged file of the format that was expected.

A broken file must cost no more than one sentence, so anything too large or too deep is refused
before it is processed. Each function raises the error class that the caller names:
DataError for data, UsageError for a configuration.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from mpipar.config.text import brief, shown
from mpipar.errors import DataError, UserError
from mpipar.run.files import no_links

MOST_BYTES = 1 << 20  # of a file whose reader sets no other limit
MOST_DEPTH = 32  # nested lists and objects
MOST_BITS = 128  # of an integer; tokenizers write 10**30 for "no limit"
ODD = re.compile("[\0\ud800-\udfff]")  # no file's name has a zero, no UTF-8 half a character
HEAD = 4096  # bytes that are looked at
SAFETENSORS = "a safetensors file"
BYTE_ORDER_MARK = "text that begins with a byte order mark (UTF-8); save it without one"
JSON_LINES = "JSON lines"
# What a file begins with, and what it is then. A pattern is matched at the first byte.
KINDS: tuple[tuple[bytes, str], ...] = (
    (
        rb"version https://git-lfs\.github\.com/",
        "a pointer of Git LFS, not the file itself; fetch that with `git lfs pull`",
    ),
    (rb"GGUF|ggml|ggjt|lmgg|tjgg", "a GGUF or GGML file of llama.cpp; convert it to safetensors"),
    (
        rb"PK\x03\x04.{26}[^\0]{1,200}?(data\.pkl|/version|\.format_version)",
        "a PyTorch checkpoint; save it as safetensors",
    ),
    (rb"PK\x03\x04|PK\x05\x06", "a zip archive; unpack it"),
    (rb"\x80[\x02-\x05]", "a Python pickle, such as a PyTorch checkpoint, which is never read"),
    (rb"\x1f\x8b", "compressed by gzip; unpack it"),
    (rb"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it"),
    (rb"\xfd7zXZ\0", "compressed by xz; unpack it"),
    (rb"BZh[1-9]1AY&SY", "compressed by bzip2; unpack it"),
    (rb".{257}ustar", "a tar archive; unpack it"),
    (rb"PAR1", "a Parquet file; write its texts to a plain file"),
    (rb"ARROW1", "an Arrow file; write its texts to a plain file"),
    (rb"\x93NUMPY", "a NumPy array (.npy)"),
    (rb"\x89HDF\r\n", "an HDF5 file"),
    (rb"%PDF-", "a PDF"),
    (rb"\xff\xfe|\xfe\xff", "text in UTF-16; save it in UTF-8"),
    (rb"\xef\xbb\xbf", BYTE_ORDER_MARK),
    (rb"(?i)\s*(<!doctype html|<html[\s>])", "a web page (HTML), not the file itself"),
    (rb'\s*\{[^\r\n]*\}[ \t\r]*\n\s*\{\s*"', JSON_LINES),
)


def open_regular(path: str | os.PathLike, root: str | os.PathLike | None = None) -> BinaryIO:
    """Open a regular file for reading; raise OSError also for a pipe, a device or a folder.

    A pipe without a writer would block, and a device has no end. root: a run folder to which the
    path is relative, and below which no link is followed; without it, links are followed.
    """
    return open(path, "rb", opener=partial(no_links.opened, root))


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
    return read_bytes(path, most_bytes=most_bytes, root=root).decode("utf-8-sig")


def recognize(path: str | os.PathLike) -> str | None:
    """Return what a file is, as "a pointer of Git LFS, ...", or None if nothing is known.

    It fits after "PATH: is ", and may end with what to do instead. Whoever reads the file reports
    one that is not regular or cannot be opened.
    """
    with suppress(OSError, ValueError), open_regular(path) as file:  # a name may hold a zero byte
        return recognized(file.read(HEAD), os.fstat(file.fileno()).st_size)
    return None


def recognized(head: bytes, size: int) -> str | None:
    """Return what a file of so many bytes is that begins with `head`. See `recognize`."""
    if not size:
        return "empty"
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= size - 8:
        return SAFETENSORS
    return next((kind for start, kind in KINDS if re.match(start, head, re.DOTALL)), None)


@contextmanager
def problems_as(error: type[UserError], where: str, cure: str = "") -> Iterator[None]:
    """Turn OSError and ValueError inside into the user's error: "where: what; cure"."""
    try:
        yield
    except (OSError, ValueError) as problem:
        text = getattr(problem, "strerror", None) or problem
        if isinstance(problem, UnicodeDecodeError):
            text = f"is not UTF-8 text: byte {problem.start:,} cannot be decoded"
        raise error(f"{where}: {text}{cure and '; ' + cure}") from None


def read_json(path, *, where: str = "", cure: str = "", most_bytes: int = MOST_BYTES, root=None):
    """Return the value of a JSON file; raise DataError with one sentence. See `parse_json`.

    where: begins the sentence in place of the path. cure: ends it.
    """
    with problems_as(DataError, where or str(Path(root or "", path)), cure):
        content = read_bytes(path, most_bytes=most_bytes, root=root)
        if kind := recognized(content[:HEAD], len(content)):
            raise ValueError(f"is not JSON: it is {kind}")
        return parse_json(content.decode("utf-8-sig"))


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
    known = inspect.signature(kind).parameters.values()
    if lacks := [one.name for one in known if one.default is one.empty and one.name not in value]:
        raise ValueError(f"{where} has not all of its keys: it lacks {', '.join(lacks)}")
    return kind(**{name: built(hints[name], one, f"{where}.{name}") for name, one in value.items()})
