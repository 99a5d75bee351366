"""Buffers for messages, in three states of memory: `rotated`, `reused` and `cold`.

Training sends freshly written data from many places. `rotated` imitates that: it cycles through
more memory than the last-level cache holds. `reused` takes the same array each time, as most other
benchmarks do, and measures the cache. `osu` is the same, and also sends a whole window from one
array and receives it into one array, as OSU's benchmarks do. `cold` takes fresh memory each time,
so that a receive meets pages that were never touched.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mpipar.errors import UsageError

POLICIES = ("rotated", "reused", "osu", "cold")
MAX_SLOTS = 4096
TOUCHED_AT_ONCE = 1 << 24  # elements
LINE_BYTES = 64
UNKNOWN_CACHE = 32 << 20


def cache_bytes(folder: str = "/sys/devices/system/cpu/cpu0/cache") -> int:
    """Return the size of the last-level cache; 32 MiB if the system does not report it."""
    sizes = [0]
    for path in Path(folder).glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KM]?)", path.read_text().strip())
        if found:
            sizes.append(int(found[1]) << {"": 0, "K": 10, "M": 20}[found[2]])
    return max(sizes) or UNKNOWN_CACHE


class Arena:
    """One stretch of touched memory for each of the roles "send" and "receive".

    footprint: bytes of each stretch; the two of a rank together exceed the last-level cache.
    ranks: of this host, which share its memory. touched: called while memory is filled.
    """

    def __init__(
        self,
        ops,
        policy: str,
        footprint: int,
        *,
        ranks: int = 1,
        touched: Callable[[], None] = lambda: None,
    ):
        self.ops, self.policy, self.footprint = ops, policy, footprint
        self.ranks, self.touched = ranks, touched
        self.memory: dict = {}

    def cut(self, role: str, count: int, num_elements: int) -> Slots:
        """Return Slots of `num_elements` each: at least `count` of them, the number in use at once.

        Raises UsageError if they cannot fit into memory.
        """
        line = LINE_BYTES // self.ops.dtype.itemsize
        room = self.footprint // self.ops.dtype.itemsize
        stride = -(-max(num_elements, 1) // line) * line
        if self.policy == "rotated":
            stride = max(stride, room // MAX_SLOTS // line * line)
            slots = max(count, room // stride)
        else:
            slots = count
        needed = slots * stride if self.policy == "cold" else max(slots * stride, room)
        self._check_room(needed * self.ops.dtype.itemsize)
        if self.policy == "cold":
            return Slots(None, self.ops, count, num_elements)
        if role not in self.memory or self.memory[role].size < needed:
            self.memory[role] = None  # free the old one first
            self.memory[role] = self.ops.zeros((needed,), label="buffers")
            for start in range(0, needed, TOUCHED_AT_ONCE):
                self.memory[role][start : start + TOUCHED_AT_ONCE] = 1  # touch every page
                self.touched()
        base = self.memory[role]
        views = [base[k * stride : k * stride + num_elements] for k in range(slots)]
        return Slots(views, self.ops, count, num_elements)

    def _check_room(self, nbytes: int) -> None:
        """Raise UsageError if a send and a receive side cannot fit into the host's memory."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.ops.device == "cpu" and 2 * nbytes * self.ranks > memory:
            raise UsageError(
                f"buffers of 2 x {nbytes >> 20} MiB on each of {self.ranks} ranks, but the host"
                f" has {memory >> 20} MiB: take a smaller --end-bytes, --window or "
                "--footprint"
            )


class Slots:
    """Hands out `count` arrays for each iteration, in turn; cold ones are newly allocated."""

    def __init__(self, views, ops, count: int, num_elements: int):
        self.views, self.ops, self.count, self.num_elements = views, ops, count, num_elements
        self.next = 0

    def take(self) -> list:
        """Return the arrays of the next iteration."""
        if self.views is None:
            return [self._fresh() for _ in range(self.count)]
        first, number = self.next, len(self.views)
        self.next = (first + self.count) % number
        if first + self.count <= number:
            return self.views[first : first + self.count]
        return [self.views[(first + k) % number] for k in range(self.count)]

    def _fresh(self):
        """Return an array on pages that were never touched; on a GPU, a new allocation."""
        if self.ops.device != "cpu":
            return self.ops.empty((self.num_elements,), label="buffers")
        nbytes = self.num_elements * self.ops.dtype.itemsize
        return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), self.ops.dtype, self.num_elements)
