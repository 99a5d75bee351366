"""Numbers that show whether an operation brought what it should, to whom it should.

A number tells who sent it, to whom, and in which call of the group. All are small and whole, so
that their sums are exact in every type.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from mpipar.plan.script import Call

SENDERS, RECEIVERS, RANGE = 7, 3, 61  # without common divisors
POISON = 99  # what nobody sends


class Place(NamedTuple):
    """Where a call stands: this rank's place in its group, the group's size, the call's number."""

    index: int
    size: int
    number: int

    def value(self, sender: int, receiver: int = 0) -> int:
        """What `sender` sends to `receiver`."""
        return 1 + (SENDERS * sender + RECEIVERS * receiver + self.number) % RANGE

    def summed(self, receiver: int = 0) -> int:
        """The sum of what all send to `receiver`."""
        return sum(self.value(sender, receiver) for sender in range(self.size))


def place_of(call: Call, index: int, size: int) -> Place:
    """The place of a call. All members make the same collectives; a message has a tag."""
    record = call.record
    return Place(index, size, record.tag if record.tag >= 0 else record.seq)


def fill(x: Any, call: Call, place: Place) -> None:
    """Write what this rank gives to a call."""
    x[...] = POISON
    FILLS[call.record.operation](x, call, place)


def _fill_whole(x: Any, call: Call, place: Place) -> None:
    x[...] = place.value(place.index)


def _fill_root(x: Any, call: Call, place: Place) -> None:
    if call.record.peer == place.index:
        _fill_whole(x, call, place)


def _fill_message(x: Any, call: Call, place: Place) -> None:
    x[...] = place.value(place.index, call.record.peer)


def _fill_nothing(x: Any, call: Call, place: Place) -> None:
    """A receive gives nothing."""


def _fill_own(x: Any, call: Call, place: Place) -> None:
    whole = x[place.index] if call.posted else x
    whole[...] = place.value(place.index)


def _fill_parts(x: Any, call: Call, place: Place) -> None:
    for receiver, part in enumerate(x):
        part[...] = place.value(place.index, receiver)


def _fill_rows(x: Any, call: Call, place: Place) -> None:
    for receiver, rows in enumerate(rows_of(x, call.argument[0])):
        rows[...] = place.value(place.index, receiver)


FILLS: dict[str, Callable[[Any, Call, Place], None]] = {
    "all_reduce": _fill_whole, "reduce": _fill_whole, "broadcast": _fill_root,
    "all_gather": _fill_own, "reduce_scatter": _fill_parts, "all_to_all": _fill_parts,
    "all_to_allv": _fill_rows, "send": _fill_message, "recv": _fill_nothing}


def rows_of(x: Any, counts: Any) -> list[Any]:
    """The rows of each rank, one behind the other."""
    return [x[first:last] for first, last in pairwise(accumulate(counts, initial=0))]


def problem(x: Any, result: Any, call: Call, place: Place) -> str:
    """What is wrong behind a call, or "". x: what was given. result: what was returned."""
    for part, value in WANTED[call.record.operation](x, result, call, place):
        if not bool((part == np.asarray(value).astype(part.dtype)).all()):
            found = part.reshape(-1)[:1].tolist()
            return f"{call.record.name}: {call.record.operation} brought {found} for {value}"
    return ""


def _want_sum(x: Any, result: Any, call: Call, place: Place) -> list[tuple[Any, int]]:
    if call.argument == "max":
        return [(x, max(map(place.value, range(place.size))))]
    return [(x, place.summed())]


def _want_at_root(x: Any, result: Any, call: Call, place: Place) -> list[tuple[Any, int]]:
    return [(x, place.summed())] if call.record.peer == place.index else []


def _want_from_root(x: Any, result: Any, call: Call, place: Place) -> list[tuple[Any, int]]:
    return [(x, place.value(call.record.peer))]


def _want_whole(x: Any, result: Any, call: Call, place: Place) -> list[tuple[Any, int]]:
    return [(part, place.value(sender)) for sender, part in enumerate(x if call.posted else result)]


def _want_part(x: Any, result: Any, call: Call, place: Place) -> list[tuple[Any, int]]:
    return [(x[0] if call.posted else result, place.summed(place.index))]


def _want_from(parts: Any, place: Place) -> list[tuple[Any, int]]:
    return [(part, place.value(sender, place.index)) for sender, part in enumerate(parts)]


def _want_message(x: Any, result: Any, call: Call, place: Place) -> list[tuple[Any, int]]:
    return [(x, place.value(call.record.peer, place.index))]


WANTED: dict[str, Callable[[Any, Any, Call, Place], list[tuple[Any, int]]]] = {
    "all_reduce": _want_sum, "reduce": _want_at_root, "broadcast": _want_from_root,
    "all_gather": _want_whole, "reduce_scatter": _want_part,
    "all_to_all": lambda x, result, call, place: _want_from(result, place),
    "all_to_allv": lambda x, result, call, place: _want_from(rows_of(*result), place),
    "send": lambda x, result, call, place: [], "recv": _want_message}
