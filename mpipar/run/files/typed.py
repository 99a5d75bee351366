"""Converts a JSON file's values to annotated types; a mismatch is reported with its place."""

from __future__ import annotations

import math
import types
import typing
from dataclasses import MISSING, fields, is_dataclass

from mpipar.config.text import shown


def built(kind, value, where: str):
    """Return a JSON value as a value of an annotated type; ValueError says where it does not fit.

    Types: dataclasses, named tuples, tuple[X, ...], tuple[X, X], dict[str, X], dict[int, X],
    X | None, int, float, bool, dict, and str of one line.
    """
    if isinstance(kind, types.UnionType):  # X | None
        return None if value is None else built(typing.get_args(kind)[0], value, where)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list")
        inner, *more = typing.get_args(kind)
        if more != [...] and len(value) != 1 + len(more):
            raise ValueError(f"{where} must have {1 + len(more)} values")
        return tuple(built(inner, one, f"{where}[{place}]") for place, one in enumerate(value))
    if typing.get_origin(kind) is dict:
        key, inner = typing.get_args(kind)
        return {
            key(built(str, name, f"a name in {where}")): built(inner, one, f"{where}.{name}")
            for name, one in _object(value, where).items()
        }
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return _record(kind, _object(value, where), where)
    if kind is float and type(value) is int:
        value = float(value)
    if (
        type(value) is not kind
        or (kind is float and not math.isfinite(value))
        or (kind is str and not value.isprintable())
    ):
        raise ValueError(f"{where} is {shown(value)}, not a legal {kind.__name__}")
    return value


def _object(value, where: str) -> dict:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object")
    return value


def _record(kind, value: dict, where: str):
    hints = typing.get_type_hints(kind)
    given = (
        kind._field_defaults
        if hasattr(kind, "_fields")
        else [one.name for one in fields(kind) if {one.default, one.default_factory} != {MISSING}]
    )
    needed = [name for name in hints if name not in given]
    if unknown := sorted(value.keys() - hints.keys()):
        raise ValueError(f"{where} has an unknown key {shown(unknown[0])}")
    if missing := [name for name in needed if name not in value]:
        raise ValueError(f"{where} has no {', '.join(map(repr, missing))}")
    return kind(**{name: built(hints[name], value[name], f"{where}.{name}") for name in value})
