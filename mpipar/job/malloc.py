"""The heap of the C library keeps the memory of one step for the next one.

Without this, glibc gives freed arrays back to the system. The next step gets new pages: a page
fault and 4 KiB of zeros each. Measured on two ranks, 4 layers, D 256, 16 rows of 256 tokens: 16,000
faults in a step of 1f1b and 31,000 with gpipe. They took 6 and 10 % of the step.
"""

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's numbers for them, in glibc's malloc.h
WHOLE = 2**31 - 1  # arrays of up to 2 GiB come from the heap, which never shrinks
MOST = 32 << 20  # the largest threshold that older versions take
LARGE = 1 << 20  # with --memory-limit: larger arrays come from the system, and go back to it
SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_",
            "MALLOC_TOP_PAD_")


def keep_heap() -> bool:
    """Let freed memory stay in this process; return whether the C library took it."""
    return _set(TRIM_THRESHOLD, WHOLE) and (
        _set(MMAP_THRESHOLD, WHOLE) or _set(MMAP_THRESHOLD, MOST))


def give_back_heap() -> None:
    """Give free memory back to the system, now and later, so that a limit counts what is used."""
    if _set(TRIM_THRESHOLD, LARGE) and _set(MMAP_THRESHOLD, LARGE):
        ctypes.CDLL(None).malloc_trim(0)


def _set(parameter: int, value: int) -> bool:
    """Set one threshold. A user's own setting stays; C libraries but glibc have none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in SETTINGS):
        return False
    return bool(mallopt(parameter, value))
