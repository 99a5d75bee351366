"""One setting: its help, the values that are legal, its flag, and what is wrong with a value."""

import dataclasses
import math
import types
import typing

from mpipar.errors import suggestion
from mpipar.files import text


def setting(default, what, *, low=None, above=None, below=None, high=None, choices=None,
            in_bytes=False, only=None):
    """A field: help, low <= value <= high, above < value < below; in_bytes: 64K is a value too.

    only: (field, value, ...) of the choice that the field belongs to. With another value of the
    choice than these, the field means nothing, is not written, and is refused if given.
    """
    legal = {"low": low, "above": above, "below": below, "high": high, "choices": choices,
             "in_bytes": in_bytes, "only": only}
    return dataclasses.field(default=default, metadata={"help": what, **legal})


def flag(field_name: str) -> str:
    """The flag of a field: seq_len -> --seq-len."""
    return "--" + field_name.replace("_", "-")


def kind(field: dataclasses.Field) -> tuple[type, bool]:
    """(type of one value, whether the field is a tuple of them); `| None` is dropped."""
    annotation = field.type
    if isinstance(annotation, types.UnionType):
        annotation = next(one for one in typing.get_args(annotation) if one is not type(None))
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], True
    return annotation, False


def value_problem(name: str, legal: dict, value) -> str | None:
    """What is wrong with one number or string, or None."""
    shown = f"{flag(name)} {text.brief(str(value))}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{shown}: must be a finite number"
    if legal["low"] is not None and value < legal["low"]:
        return f"{shown}: must be at least {legal['low']}"
    if legal["above"] is not None and value <= legal["above"]:
        return f"{shown}: must be greater than {legal['above']:g}"
    if legal["high"] is not None and value > legal["high"]:
        return f"{shown}: must be at most {legal['high']:,}"
    below = legal["below"] or (2**31 if isinstance(value, int) else math.inf)
    if isinstance(value, int | float) and value >= below:
        return f"{shown}: must be less than {below}"
    if legal["choices"] and value not in legal["choices"]:
        options = [str(option) for option in legal["choices"]]
        hint = suggestion(value, options) if isinstance(value, str) else ""
        return f"{flag(name)} {text.shown(value)}: must be one of {', '.join(options)}{hint}"
    if isinstance(value, str) and any(0xD800 <= ord(letter) < 0xE000 for letter in value):
        return (f"{flag(name)} {text.shown(value)}: is not valid UTF-8, so it cannot be written to"
                " config.toml")
    return None
