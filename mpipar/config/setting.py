"""A single setting: its help, legal values and flag, and what is wrong with a value."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING

from mpipar.errors import suggestion
from mpipar.files import text


def setting(
    default,
    what,
    *,
    low=None,
    above=None,
    below=None,
    high=None,
    choices=None,
    in_bytes=False,
    only=None,
    metavar=None,
    rare=False,
    is_positional=False,
    is_switch=False,
    of_weights=False,
):
    """Return a field with its help and limits: low <= value <= high, above < value < below.

    default: MISSING if it must be given. in_bytes: 64K is accepted as a value. only: (field,
    value, ...) of the choice that the field belongs to; with any other value of that choice it has
    no meaning, is not written, and is refused if given. metavar: placeholder for the value in the
    help. rare: shown by --help-all only. is_positional, is_switch: see below. of_weights: it has no
    flag; it comes from the config.json of weights, a preset or a key of a TOML file.
    """
    legal = {
        "low": low,
        "above": above,
        "below": below,
        "high": high,
        "choices": choices,
        "in_bytes": in_bytes,
        "only": only,
        "metavar": metavar,
        "rare": rare,
        "is_positional": is_positional,
        "is_switch": is_switch,
        "of_weights": of_weights,
    }
    return dataclasses.field(default=default, metadata={"help": what, **legal})


def positional(metavar, what, *, default=MISSING, choices=None):
    """Return a field that is an argument without a flag; default (): any number of them."""
    return setting(default, what, choices=choices, metavar=metavar, is_positional=True)


def switch(what, *, rare=False):
    """Return a field that is off unless its flag is given."""
    return setting(False, what, rare=rare, is_switch=True)


def flag(field_name: str) -> str:
    """Return the flag of a field: seq_len -> --seq-len."""
    return "--" + field_name.replace("_", "-")


def argument(name: str, legal: Mapping[str, typing.Any]) -> str:
    """Return what messages call a field: its flag, its key, or what the help shows."""
    if legal["is_positional"]:
        return legal["metavar"]
    return flag(name)[2:] if legal["of_weights"] else flag(name)


def kind(field: dataclasses.Field) -> tuple[type, bool]:
    """Return (type of one value, whether the field is a tuple of them), ignoring `| None`."""
    annotation = field.type
    if isinstance(annotation, types.UnionType):
        annotation = next(one for one in typing.get_args(annotation) if one is not type(None))
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], True
    return annotation, False


def field_problem(field: dataclasses.Field, value: object) -> str | None:
    """Return what is wrong with a field's value, or None; of several problems, the last one."""
    found = None
    if value is not None and not isinstance(value, bool):
        for one in value if isinstance(value, tuple) else (value,):
            found = value_problem(field.name, field.metadata, one) or found
    return found


def value_problem(name: str, legal: Mapping[str, typing.Any], value: object) -> str | None:
    """Return what is wrong with one number or string, or None."""
    if problem := _limit_problem(legal, value):
        return f"{argument(name, legal)} {text.brief(str(value))}: {problem}"
    if legal["choices"] and value not in legal["choices"]:
        options = [str(option) for option in legal["choices"]]
        hint = suggestion(value, options) if isinstance(value, str) else ""
        return (
            f"{argument(name, legal)} {text.shown(value)}: must be one of"
            f" {', '.join(options)}{hint}"
        )
    if isinstance(value, str) and any(0xD800 <= ord(letter) < 0xE000 for letter in value):
        return (
            f"{argument(name, legal)} {text.shown(value)}: is not valid UTF-8, so it cannot be"
            " written to config.toml"
        )
    return None


def _limit_problem(legal: Mapping[str, typing.Any], value: typing.Any) -> str | None:
    """Return which limit a number breaks, or None."""
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if legal["low"] is not None and value < legal["low"]:
        return f"must be at least {legal['low']}"
    if legal["above"] is not None and value <= legal["above"]:
        return f"must be greater than {legal['above']:g}"
    if legal["high"] is not None and value > legal["high"]:
        return f"must be at most {legal['high']:,}"
    below = legal["below"] or (2**31 if isinstance(value, int) else math.inf)
    if isinstance(value, int | float) and value >= below:
        return f"must be less than {below}"
    return None
