"""Resource limits: too low a limit ends a process inside a library, often without a message.

The minimum values are what a small run on NumPy with one thread needs, measured with MPICH.
"""

import os
import resource
from pathlib import Path

from mpipar.job.environment import Launcher

MIB = 1 << 20
ADDRESS_SPACE = 512 * MIB  # NumPy, BLAS and MPI: 500 MB are enough, 400 MB are not
DESCRIPTORS, DESCRIPTORS_PER_RANK = 48, 4  # two ranks: 48 are enough, 32 are not
SHARED_PER_RANK = 2 * MIB  # of /dev/shm: two ranks run with 4 MiB
SHARED = Path("/dev/shm")  # noqa: S108 (MPI libraries choose the names in it)
PROCESS = Path("/proc/self/stat")


def process_problems(launcher: Launcher) -> list[str]:
    """Return limits under which no command can run here, each with its cure."""
    least = {
        resource.RLIMIT_AS: (ADDRESS_SPACE, "address space", "ulimit -v unlimited", mib),
        resource.RLIMIT_NOFILE: (
            DESCRIPTORS + DESCRIPTORS_PER_RANK * launcher.local_size,
            "open files",
            "ulimit -n 1024",
            str,
        ),
    }
    return _too_small(least)


def mpi_problems(launcher: Launcher) -> list[str]:
    """Return what keeps MPI from starting on this host, each problem with its cure."""
    found = []
    if not PROCESS.exists():
        found.append(
            "/proc does not show this process, but MPI reads it there: mount it"
            " (mount -t proc proc /proc)"
        )
    if launcher.local_size > 1:
        least = SHARED_PER_RANK * launcher.local_size
        found += _too_small(
            {
                resource.RLIMIT_FSIZE: (
                    least,
                    "file sizes and shared memory",
                    "ulimit -f unlimited",
                    mib,
                )
            }
        )
        found += shared_problems(least)
    return found


def shared_problems(least: int) -> list[str]:
    """Return what is wrong with this host's shared memory if `least` bytes are needed."""
    cure = f"mount -t tmpfs -o size={max(64, least // MIB)}m tmpfs {SHARED}, or docker's --shm-size"
    if not os.access(SHARED, os.W_OK):
        return [f"{SHARED} can't be written to, but ranks exchange messages there: {cure}"]
    free = shared_free()
    if free < least:
        return [
            (f"{SHARED} has {mib(free)} left, but the ranks of this host need {mib(least)}: {cure}")
        ]
    return []


def mib(count: int) -> str:
    """Return bytes as text, such as `0.0625 MiB`."""
    return f"{count / MIB:.4g} MiB"


def shared_free() -> int:
    """Return the free bytes of shared memory."""
    found = os.statvfs(SHARED)
    return found.f_bavail * found.f_frsize


def shown() -> str:
    """Return the limits of this process as text, for `mpipar doctor`."""
    parts = [f"{mib(shared_free())} free in {SHARED}" if SHARED.exists() else f"no {SHARED}"]
    for name, which, text in (
        ("open files", resource.RLIMIT_NOFILE, str),
        ("address space", resource.RLIMIT_AS, mib),
        ("file sizes", resource.RLIMIT_FSIZE, mib),
    ):
        limit = resource.getrlimit(which)[0]
        parts.append(f"{name} {'unlimited' if limit == resource.RLIM_INFINITY else text(limit)}")
    return ", ".join(parts)


def _too_small(least: dict) -> list[str]:
    """Return the limits that are too low. least: {resource: (value, what it limits, cure, text)}.

    text(value) is the value with its unit.
    """
    found = []
    for which, (value, name, cure, text) in least.items():
        limit = resource.getrlimit(which)[0]
        if limit != resource.RLIM_INFINITY and limit < value:
            found.append(
                f"the limit of {name} is {text(limit)}, but {text(value)} are needed: {cure}"
            )
    return found
