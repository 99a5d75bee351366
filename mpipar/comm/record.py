"""What a record says: barriers and spans as plain values, their sums, and the words for them.

A record has two places. `site` is the line that crosses the barrier, and `cut` is the line inside
the cut that calls the group. The site is found by going outwards from the caller of the group, past
the modules of `recorder.BELOW_SITE`, such as all cuts; the first line beyond is the site.
ffn.down and attn.proj, which share a cut, thus have different sites.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import CodeType
from typing import NamedTuple

PACKAGE = f"{Path(__file__).resolve().parents[2]}/"
POINT_TO_POINT = ("send", "recv")
PASSES = ("F", "B", "I", "W")  # kinds of spans that a schedule orders
COMPUTE = (*PASSES, "opt", "data")  # kinds of spans in which a rank computes; none contains another
# The state of an array over a group before a collective, and after it. whole: every rank has all of
# it, the same numbers. cut: each rank has its own piece. partial: the ranks' arrays add up to it.
# one: one rank has it. A collective changes the state and never the array.
STATE_CHANGES = {
    "all_reduce": ("partial", "whole"),
    "reduce_scatter": ("partial", "cut"),
    "reduce": ("partial", "one"),
    "all_gather": ("cut", "whole"),
    "all_to_all": ("cut", "cut"),
    "all_to_allv": ("cut", "cut"),
    "broadcast": ("one", "whole"),
}
# Everything that keeps a rank busy; garbage collection happens during the others.
BUSY = (*COMPUTE, "eval", "save", "gc")


class Record(NamedTuple):
    """One operation of one rank. Times: ns of this host's monotonic clock. Bytes: per rank.

    waited_ns: when the rank began to wait; 0 before.
    peer: its group rank; -1 without one.
    site: where a layer, or another caller of the group, crosses the barrier, as file:line.
    cut: the line inside the cut; "" if the call goes through no cut.
    """

    posted_ns: int
    waited_ns: int
    done_ns: int
    operation: str
    name: str
    axis: str
    seq: int
    peer: int
    tag: int
    payload_bytes: int
    wire_bytes: int
    dtype: object
    step: int
    stage: int
    mb: int
    phase: str
    site: str
    cut: str

    @property
    def source(self) -> str:
        """Both places in one phrase."""
        return f"{self.site}, cut {self.cut}" if self.cut else self.site


class Span(NamedTuple):
    """A stretch of computation."""

    kind: str
    start_ns: int
    end_ns: int
    step: int
    stage: int
    mb: int


class Key(NamedTuple):
    """The fields by which operations are counted together."""

    axis: str
    name: str
    operation: str
    phase: str
    dtype: str


class Sums(NamedTuple):
    """Calls, their bytes, and the nanoseconds that the rank spent inside them."""

    calls: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    nanoseconds: int = 0

    def plus(self, other: Sums) -> Sums:
        return Sums(*map(sum, zip(self, other, strict=True)))


NO_SUMS = Sums()


def wire_bytes(operation: str, payload: int, group_size: int) -> int:
    """Return the bytes that one rank sends for a payload of `payload` bytes, by the ring algorithm.

    The payload is the whole vector for all_reduce, the whole output for all_gather, and the whole
    input for reduce_scatter and all_to_all. broadcast and reduce go from rank to rank along a
    chain: all but one rank send the payload, and each rank is charged the mean. Source: the
    bus-bandwidth factors of nccl-tests. The payload of send and all_to_allv is what they send to
    others.
    """
    if operation == "all_reduce":
        return 2 * (group_size - 1) * payload // group_size
    if operation in ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"):
        return (group_size - 1) * payload // group_size
    return payload if operation in ("send", "all_to_allv") else 0


def state_change(operation: str) -> str:
    """Return how a collective changes an array's state, as in `partial -> whole`; else `moved`."""
    return " -> ".join(STATE_CHANGES.get(operation, ("moved",)))


def family(name: str) -> str:
    """Return a barrier's name without its numbers: block3.ffn.down -> block*.ffn.down."""
    return re.sub(r"\d+", "*", name)


class Families(dict[str, str]):
    """The family of each name that was asked for: a trace has few names, and many records."""

    def __missing__(self, name: str) -> str:
        self[name] = family(name)
        return self[name]


def source_line(path: str, line: int) -> str:
    """Return file:line, with a short path for files of this package."""
    return f"{path.removeprefix(PACKAGE)}:{line}"


def line_of(code: CodeType | None, instruction: int) -> str:
    """Return file:line of an instruction of a function."""
    if code is None:
        return ""
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    return source_line(code.co_filename, next(lines, None) or code.co_firstlineno)
