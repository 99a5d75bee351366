"""Settings of glibc's malloc: keep the memory of one step for the next one.

By default glibc returns freed arrays to the system, and the next step pays for new pages: a page
fault and 4 KiB of zeros each. Measured on two ranks, 4 layers, D 256, 16 rows of 256 tokens: 16,000
faults in a step of 1f1b and 31,000 with gpipe, which took 6 and 10 % of the step.
"""

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's parameters, from glibc's malloc.h
WHOLE = 2**31 - 1  # arrays of up to 2 GiB come from the heap, which never shrinks
MOST = 32 << 20  # the largest threshold that older versions accept
LARGE = 1 << 20  # with --memory-limit: larger arrays are mapped, and unmapped when freed
SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def keep_heap() -> bool:
    """Keep freed memory in this process; return whether the C library accepted the setting."""
    return _set(TRIM_THRESHOLD, WHOLE) and (
        _set(MMAP_THRESHOLD, WHOLE) or _set(MMAP_THRESHOLD, MOST)
    )


def give_back_heap() -> None:
    """Return freed memory to the system from now on, so that a limit counts what is in use."""
    if _set(TRIM_THRESHOLD, LARGE) and _set(MMAP_THRESHOLD, LARGE):
        ctypes.CDLL(None).malloc_trim(0)


def _set(parameter: int, value: int) -> bool:
    """Set one threshold. A user's own setting stays; C libraries other than glibc have none."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in SETTINGS):
        return False
    return bool(mallopt(parameter, value))
