"""Limits of the system under which MPI ends a process without a word: open files, shared memory.

The minimum values are what a small run on NumPy with one thread needs, measured with MPICH.
"""

import contextlib
import math
import os
import resource
from pathlib import Path

from mpipar.comm.launcher import Launcher

MIB = 1 << 20
DESCRIPTORS, DESCRIPTORS_PER_RANK = 48, 4  # two ranks: 48 are enough, 32 are not
SHARED_PER_RANK = 2 * MIB  # of /dev/shm: two ranks run with 4 MiB
SHARED = Path("/dev/shm")  # noqa: S108 (MPI libraries choose the names in it)
CGROUP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def problems(launcher: Launcher) -> list[str]:
    """Return the limits under which this host's ranks cannot run, each with its cure."""
    found = []
    least, limit = DESCRIPTORS + DESCRIPTORS_PER_RANK * launcher.local_size, open_files()
    if 0 <= limit < least:
        found.append(f"the limit of open files is {limit}, but {least} are needed: ulimit -n 1024")
    least = SHARED_PER_RANK * launcher.local_size
    cure = f"mount -t tmpfs -o size={max(64, least // MIB)}m tmpfs {SHARED}, or docker's --shm-size"
    if launcher.local_size == 1:  # nobody to exchange messages with
        return found
    if not os.access(SHARED, os.W_OK):
        found.append(f"{SHARED} can't be written to, but ranks exchange messages there: {cure}")
    elif (free := shared_free()) < least:
        found.append(
            f"{SHARED} has {free / MIB:.4g} MiB left, but the ranks of this host need"
            f" {least // MIB} MiB: {cure}"
        )
    return found


def open_files() -> int:
    """Return how many files this process may have open; -1 if there is no limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def shared_free() -> int:
    """Return the free bytes of shared memory; 0 if there is none."""
    if not SHARED.exists():
        return 0
    found = os.statvfs(SHARED)
    return found.f_bavail * found.f_frsize


def cpu_quota(own: Path = CGROUP, root: Path = CGROUPS) -> float:
    """Return how many cores' time the control group of this process allows, as containers do.

    It is infinite without a quota, and where control groups are of version 1. Parents count, too.
    """
    text = own.read_text() if own.exists() else ""
    folder, least = root / text.strip().rpartition("::/")[2], math.inf
    for place in (folder, *(one for one in folder.parents if one.is_relative_to(root))):
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, (place / "cpu.max").read_text().split())
            least = min(least, quota / period)
    return least
