"""Buffers for messages: rotated through more memory than the last-level cache holds, or reused.

Training sends freshly written data from many places, which `rotated` imitates. `reused` takes the
same array each time, as most other benchmarks do, and measures the cache.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpipar.console.tables import nbytes
from mpipar.errors import UsageError
from mpipar.interconnect.cases import chunks

POLICIES = ("rotated", "reused")
MOST_SLOTS, LINE_BYTES, UNKNOWN_CACHE = 4096, 64, 32 << 20


def cache_bytes(folder: str = "/sys/devices/system/cpu/cpu0/cache") -> int:
    """Return the size of the last-level cache; 32 MiB if the system does not report it."""
    sizes = [0]
    for path in Path(folder).glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KM]?)", path.read_text().strip())
        if found:
            sizes.append(int(found[1]) << {"": 0, "K": 10, "M": 20}[found[2]])
    return max(sizes) or UNKNOWN_CACHE


def free_bytes(meminfo: str = "/proc/meminfo") -> int:
    """Return the memory that this host has available; very much if it does not report it."""
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", Path(meminfo).read_text(), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) << 10 if found else 1 << 62


def check_room(needed: int, ranks: int, free: int) -> None:
    """Raise UsageError if the buffers of all ranks of a host do not fit into its free memory.

    needed: bytes of a rank.
    """
    if needed * ranks > free:
        raise UsageError(
            f"buffers of {nbytes(needed)} on each of {ranks} ranks of a host, which has"
            f" {nbytes(free)} free: give a smaller -e (--end-bytes) or --window"
        )


class Arena:
    """Touched memory for each of the roles "send" and "receive", which the cases share.

    room: bytes that rotated buffers cycle through; 0: the same array each time. touched: called
    while memory is filled, because that takes long.
    """

    def __init__(self, ops: Any, room: int, touched: Callable[[], None] = lambda: None):
        self.ops, self.room, self.touched = ops, room, touched
        self.memory: dict[str, Any] = {}

    def views(self, role: str, shape: tuple[int, ...]) -> list[Any]:
        """Return arrays of this shape: as many as the room holds, at least one."""
        line = LINE_BYTES // self.ops.dtype.itemsize
        count, room = 1, self.room // self.ops.dtype.itemsize
        for side in shape:
            count *= side
        stride = -(-max(count, 1) // line) * line
        stride = max(stride, room // MOST_SLOTS // line * line)
        slots = max(1, room // stride)
        if role not in self.memory or self.memory[role].size < slots * stride:
            self.memory[role] = None  # free the old one first
            fresh = self.ops.zeros((max(slots * stride, room),), label="buffers")
            for start, stop in chunks(0, fresh.size):
                fresh[start:stop] = 0  # touch every page
                self.touched()
            self.memory[role] = fresh
        base = self.memory[role]
        return [base[k * stride : k * stride + count].reshape(shape) for k in range(slots)]
