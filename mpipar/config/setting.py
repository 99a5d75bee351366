"""A single setting: its help, legal values and flag, and what is wrong with a value."""

import dataclasses
import math
import operator
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING
from fractions import Fraction

from mpipar.config import text
from mpipar.errors import suggestion

BOUNDS = {  # of a number: what breaks it, and how a refusal names it
    "low": (operator.lt, "at least"),
    "above": (operator.le, "greater than"),
    "high": (operator.gt, "at most"),
    "below": (operator.ge, "less than"),
}
HALF = re.compile("[\ud800-\udfff]")  # half a character, which no UTF-8 holds
SIZE = re.compile(  # in bytes, as people type it
    r"(\d{1,19}|\d{1,19}\.\d{1,19}(?=[KMGT]))(?:([KMGT])i?)?B?", re.IGNORECASE | re.ASCII
)
POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


LEGAL = {  # what is said of a field, and what holds where it is not said: see `setting`
    **dict.fromkeys((*BOUNDS, "choices", "only", "metavar", "short")),
    **dict.fromkeys(("in_bytes", "rare", "is_positional", "is_switch", "of_weights"), False),
}


def setting(default: typing.Any, what: str, **said: typing.Any) -> typing.Any:
    """Return a field with its help and limits: low <= value <= high, above < value < below.

    default: MISSING if it must be given. in_bytes: 64K is accepted as a value. only: (field,
    value, ...) of the choice that the field belongs to; with any other value of that choice it has
    no meaning, is not written, and is refused if given. metavar: placeholder for the value in the
    help. rare: shown by --help-all only. is_positional, is_switch: see below. of_weights: it has no
    flag; it comes from the config.json of weights, a preset or a key of a TOML file. short: a
    second flag, of one letter.
    """
    assert said.keys() <= LEGAL.keys(), said
    return dataclasses.field(default=default, metadata={"help": what, **LEGAL, **said})


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
    """Return what is wrong with a field's value, or None."""
    values = value if isinstance(value, tuple) else (value,)
    found = (value_problem(field.name, field.metadata, one) for one in values)
    return next(filter(None, found), None)


def value_problem(name: str, legal: Mapping[str, typing.Any], value: typing.Any) -> str | None:
    """Return what is wrong with one number or string, or None."""
    if value is None or isinstance(value, bool):
        return None
    limits = {bound: legal[bound] for bound in BOUNDS if legal[bound] is not None}
    if isinstance(value, int):
        limits.setdefault("below", 2**31)
    wrong = [
        f"must be {words} {limits[bound]:,}"
        for bound, (breaks, words) in BOUNDS.items()
        if bound in limits and breaks(value, limits[bound])
    ]
    if isinstance(value, float) and not math.isfinite(value):
        wrong.insert(0, "must be a finite number")
    if legal["choices"] and value not in legal["choices"]:
        options = [str(option) for option in legal["choices"]]
        hint = suggestion(value, options) if isinstance(value, str) else ""
        wrong.append(f"must be one of {', '.join(options)}{hint}")
    if isinstance(value, str) and HALF.search(value):
        wrong.append("is not valid UTF-8, so it cannot be written to config.toml")
    shown = text.shown(value) if isinstance(value, str) else text.brief(str(value))
    return f"{argument(name, legal)} {shown}: {wrong[0]}" if wrong else None


def read_bytes(text: str) -> int:
    """Return 4096, 64K, 1.5M, 20MiB or 1G (powers of 1024) in bytes; else raise ValueError."""
    found = SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError("must be bytes: write 4096, 64K, 1.5M or 1G")
    return round(Fraction(found[1]) * (1 << POWERS[(found[2] or "").upper()]))
