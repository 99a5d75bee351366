"""What a process sets before NumPy and MPI are loaded, and the limits of the system it looks at.

BLAS reads its thread count and MPI its settings only once, when they are loaded, so the guard
applies them first (`session.guard`).
"""

import contextlib
import ctypes
import math
import os
import re
import resource
import sys
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from pathlib import Path

from mpipar.comm.launcher import Launcher, read_launcher
from mpipar.errors import broken

THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
)
# A rank that waits in MPI spins. With more ranks than cores it may occupy the core of the very rank
# it waits for, so it has to yield after each poll. Measured with 4 ranks on 2 cores, 1 ms of work +
# ring exchange + all-reduce, median. Open MPI 5.0.11: 3.6 ms without, 1.8 ms with yielding. MPICH
# 5.0.2: 1.7 ms either way, but 5.2 and 1.7 ms in a round with other load. MPICH's other settings do
# not pay off: progress throttling changes nothing, heavy yield costs 0.5 ms in every all-reduce.
YIELD_VARIABLES = {
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",  # MPICH
    "OMPI_MCA_mpi_yield_when_idle": "true",  # Open MPI
}
# OpenBLAS ships kernels for many processors and picks one set by the processor's vendor and model.
# An unknown model gets old kernels that reach half of what its vector units could deliver. So the
# units decide instead: OpenBLAS's name of an architecture -> those its kernels need, in Linux's
# spelling. The fastest is first; other names run the same kernels for float32 and float64, or
# slower ones.
CORETYPE = "OPENBLAS_CORETYPE"
KERNELS = {
    "SkylakeX": ("avx2", "fma", "avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"),
    "Haswell": ("avx2", "fma"),
}
CPUINFO = Path("/proc/cpuinfo")
COMPARED = (*THREAD_VARIABLES, CORETYPE, "MPIR_CVAR_", "OMPI_MCA_")  # names, or how they begin
# Open MPI's launcher gives each rank and host other values of these.
OF_LAUNCHER = tuple(
    f"OMPI_MCA_{word}" for word in ("orte_", "ess_", "pmix", "prte_", "initial_", "mpi_built")
)
QUIET_VARIABLES = {
    "UCX_DEBUG_SIGNO": "0",  # else UCX takes SIGHUP as "stop here and wait for a debugger"
    "OMPI_MCA_osc": "^ucx",  # else Open MPI warns where UCX is missing; the window does not need it
}

# By default glibc returns freed arrays to the system, and the next step pays for new pages: a page
# fault and 4 KiB of zeros each. Measured on two ranks, 4 layers, D 256, 16 rows of 256 tokens:
# 16,000 faults in a step of 1f1b and 31,000 with gpipe, which took 6 and 10 % of the step.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's parameters, from glibc's malloc.h
WHOLE = 2**31 - 1  # arrays of up to 2 GiB come from the heap, which never shrinks
MOST = 32 << 20  # the largest threshold that older versions accept
LARGE = 1 << 20  # with --memory-limit: larger arrays are mapped, and unmapped when freed
SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")

# Limits under which MPI ends a process without a word. The least values are what a small run on
# NumPy with one thread needs, measured with MPICH.
MIB = 1 << 20
DESCRIPTORS, DESCRIPTORS_PER_RANK = 48, 4  # two ranks: 48 are enough, 32 are not
SHARED_PER_RANK = 2 * MIB  # of /dev/shm: two ranks run with 4 MiB
SHARED = Path("/dev/shm")  # noqa: S108 (MPI libraries choose the names in it)
CGROUP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def chosen_by_user(environ: Mapping[str, str], chosen: Collection[str]) -> dict[str, str]:
    """Return variables that must be equal on all ranks, without those `chosen` by presets().

    They choose algorithms of MPI and kernels and threads of BLAS, hence who waits for whom, and in
    which order numbers are added.
    """
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(COMPARED) and not name.startswith(OF_LAUNCHER) and name not in chosen
    }


def presets(environ: Mapping[str, str], num_cores: int) -> dict[str, str]:
    """Return variables to set for this process; `num_cores` = cores it may run on.

    The ranks of a host share its cores. Variables that the user has set are kept; setting a single
    thread variable to a number keeps all of them, because BLAS libraries read each other's. An
    empty one is no choice: job scripts export it where SLURM_CPUS_PER_TASK is not set.
    """
    launcher = read_launcher(environ)
    threads = max(1, num_cores // launcher.local_size)
    bound = environ.get("SLURM_CPUS_PER_TASK", "")
    if launcher.name == "srun" and bound.isdecimal():
        threads = min(num_cores, int(bound))  # srun gives each task its own cores
    defaults = QUIET_VARIABLES | (YIELD_VARIABLES if launcher.local_size > num_cores else {})
    chosen = {name: value for name, value in defaults.items() if name not in environ}
    if not any(re.match(r"\s*[1-9]", environ.get(name, "")) for name in THREAD_VARIABLES):
        chosen.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    return chosen


def processor() -> tuple[str, frozenset[str]]:
    """Return (name, vector units and other flags) of this host's first processor, or empty ones."""
    text = ""
    with contextlib.suppress(OSError), open(CPUINFO, encoding="utf-8", errors="replace") as file:
        text = file.read(1 << 14)
    name, flags = (
        re.search(rf"^{word}\s*: (.*)$", text, re.MULTILINE) for word in ("model name", "flags")
    )
    return name[1] if name else "", frozenset(flags[1].split()) if flags else frozenset()


def kernels_for(units: Collection[str]) -> str | None:
    """Return the architecture with the fastest kernels for these units; None: OpenBLAS chooses."""
    return next((name for name, needed in KERNELS.items() if {*needed} <= {*units}), None)


def choose_kernels(environ: MutableMapping[str, str]) -> None:
    """Set CORETYPE for this processor, unless the user has set it or NumPy is already loaded."""
    chosen = kernels_for(processor()[1])
    if chosen and not environ.get(CORETYPE) and "numpy" not in sys.modules:
        environ[CORETYPE] = chosen


def blas_pools() -> Sequence[dict]:
    """Return the BLAS libraries that this process has loaded, as threadpoolctl describes them."""
    from threadpoolctl import threadpool_info

    return [pool for pool in threadpool_info() if pool["user_api"] == "blas"]


def blas_words(pool: Mapping) -> str:
    """Return a library with its version, and the architecture of its kernels where it is known."""
    version = ".".join(str(pool["version"]).split(".")[:3])
    kernels = pool.get("architecture")
    return f"{pool['internal_api']} {version}" + (f", kernels for {kernels}" if kernels else "")


def host_name(environ: Mapping[str, str]) -> str:
    """Return the name to show for this host: SLURM's name of the node, else the system's."""
    return environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]


def started(pid: int) -> int:
    """Return when a process started, in ticks since boot; 0 if it is gone or a zombie.

    Process numbers are reused; a number together with a start time is unique.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


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


def limit_problems(launcher: Launcher) -> list[str]:
    """Return the limits under which this host's ranks cannot run, each with its cure."""
    ranks, limit, free = launcher.local_size, open_files(), shared_free()
    files, shared = DESCRIPTORS + DESCRIPTORS_PER_RANK * ranks, SHARED_PER_RANK * ranks
    return broken(
        (
            0 <= limit < files,
            f"the limit of open files is {limit}, but {files} are needed: ulimit -n 1024",
        ),
        (
            ranks > 1 and free < shared,
            (
                f"{SHARED}, in which ranks exchange messages, has {free / MIB:.4g} MiB that can be"
                f" written, but {shared // MIB} MiB are needed: mount -t tmpfs -o"
                f" size={max(64, shared // MIB)}m tmpfs {SHARED}, or docker's --shm-size"
            ),
        ),
    )


def open_files() -> int:
    """Return how many files this process may have open; -1 if there is no limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def shared_free() -> int:
    """Return the free bytes of shared memory; 0 if there is none, or it can't be written."""
    if not os.access(SHARED, os.W_OK):
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
