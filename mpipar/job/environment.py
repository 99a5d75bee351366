"""What the launcher says, and what must be set before NumPy and MPI are loaded.

These are plain functions of plain dictionaries. BLAS reads its thread count, and MPI its settings,
only once, when they are loaded. So the guard applies the settings first (`job.session.guard`).
"""

import contextlib
import os
import re
import stat
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpipar.errors import EnvironmentProblem

OPEN_MPI, MPICH = "Open MPI's mpirun", "MPICH's mpiexec"
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
                    "BLIS_NUM_THREADS")
# A rank that waits in MPI spins. With more ranks than cores it takes the core from the rank it
# waits for. So it has to give the core away after each poll. Measured with 4 ranks on 2 cores, 1 ms
# of work + ring exchange + all-reduce, median. Open MPI 5.0.11: 3.6 ms without, 1.8 ms with. MPICH
# 5.0.2: 1.7 ms either way, but 5.2 and 1.7 ms in a round with other load. More of MPICH's settings
# do not pay: progress throttling changes nothing, heavy yield costs 0.5 ms in every all-reduce.
YIELD_VARIABLES = {
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",  # MPICH
    "OMPI_MCA_mpi_yield_when_idle": "true",  # Open MPI
}
QUIET_VARIABLES = {
    "UCX_DEBUG_SIGNO": "0",  # else UCX takes SIGHUP for "stop here, and wait for a debugger"
    "OMPI_MCA_osc": "^ucx",  # else Open MPI warns where there is no UCX; the window needs none
}


class Mismatch(EnvironmentProblem):
    """Launcher and MPI library do not belong together, which every rank of a host finds alike."""


@dataclass(frozen=True)
class Launcher:
    """The process's place as the launcher's variables give it; rank 0 of 1 without a launcher."""

    name: str | None = None
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def read_launcher(environ: Mapping[str, str]) -> Launcher:
    """Return the launcher that started this process, the innermost first.

    Only a SLURM *step* starts ranks. The batch script itself and a shell under salloc see
    SLURM_NTASKS too, but are one process. SLURM_STEP_NUM_TASKS is set in steps alone.
    """
    def number(name, default):
        text = environ.get(name, "")
        return int(text) if text.isdecimal() else default

    for name, rank, size, local_rank, local_size in (
            (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
             "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
            (MPICH, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")):
        if number(size, 0) and local_size in environ:
            return Launcher(name, number(rank, 0), number(size, 1), number(local_rank, 0),
                            number(local_size, 1))
    if number("SLURM_STEP_NUM_TASKS", 0):
        on_node = _tasks_on_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"),
                                 number("SLURM_NODEID", 0))
        return Launcher("srun", number("SLURM_PROCID", 0), number("SLURM_STEP_NUM_TASKS", 1),
                        number("SLURM_LOCALID", 0), on_node)
    if number("PMI_SIZE", 0):
        rank, size = number("PMI_RANK", 0), number("PMI_SIZE", 1)
        return Launcher("a PMI launcher", rank, size, number("PMI_LOCAL_RANK", rank),
                        number("PMI_LOCAL_SIZE", size))
    return Launcher()


def _tasks_on_node(text: str, node: int) -> int:
    """Tasks on one node from SLURM's compressed list, such as 2(x3),1."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else max(counts, default=1)


def presets(environ: Mapping[str, str], num_cores: int) -> dict[str, str]:
    """Variables to set for this process; `num_cores` = cores it may run on.

    The ranks of a host share its cores. What the user set stays. One thread variable of theirs is
    enough to leave all of them alone, because BLAS libraries read each other's.
    """
    launcher = read_launcher(environ)
    local_size = launcher.local_size
    threads = max(1, num_cores // local_size)
    bound = environ.get("SLURM_CPUS_PER_TASK", "")
    if launcher.name == "srun" and bound.isdecimal():
        threads = min(num_cores, int(bound))  # srun gives each task its own cores
    chosen = {name: value for name, value in QUIET_VARIABLES.items() if name not in environ}
    if not any(name in environ for name in THREAD_VARIABLES):
        chosen.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    if local_size > num_cores:
        chosen.update({name: value for name, value in YIELD_VARIABLES.items()
                       if name not in environ})
    return chosen


def check_library(launcher: Launcher, library: str) -> None:
    """Refuse MPICH under Open MPI's mpirun, where it would abort in MPI_Init and name no cure."""
    if launcher.name == OPEN_MPI and launcher.size > 1 and library.startswith("MPICH"):
        raise Mismatch(
            f"{launcher.name} started these {launcher.size} ranks, but the MPI library is "
            f"{_short(library)}: start them with the mpiexec of MPICH "
            f"({Path(sys.executable).parent / 'mpiexec'}), or install mpi4py for Open MPI")


def check_alone(launcher: Launcher, world_size: int, library: str) -> None:
    """Refuse N processes that each believe to be rank 0 of 1: they would run the job N times."""
    if world_size > 1 or launcher.size == 1:
        return
    cure = ("with MPICH use srun --mpi=pmi2, with Open MPI srun --mpi=pmix"
            if launcher.name == "srun" else
            "use the mpiexec that belongs to the library, or install the library that belongs to "
            "the launcher: pip install '.[mpich]' for MPICH")
    raise Mismatch(
        f"this process is alone (rank 0 of 1), but {launcher.name} started {launcher.size}: the "
        f"MPI library ({_short(library)}) does not hear this launcher; {cure}")


def _short(library: str) -> str:
    """Name and version of the library: the start of its first line."""
    return " ".join(re.split("[\n,]", library, maxsplit=1)[0].split())


def host_name(environ: Mapping[str, str]) -> str:
    """Return the name to show for this host: SLURM's name of the node, else the system's."""
    return environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]


def started(pid: int) -> int:
    """When a process started, in ticks since the boot; 0 for one that is gone or only a zombie.

    A number of a process is used again later. Number and time together are not.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def scratch(name: str) -> Path:
    """Return a folder for files of a job on this host, made when something is written into it.

    It lies in the folder that the system makes for each user who logs in, if there is one.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if not (os.path.isabs(base) and _is_own(base)):
        base = tempfile.gettempdir()
    return Path(base) / f"mpipar-{name}"


def own_folder(path: Path) -> None:
    """Make a folder for this user alone, if it is not there.

    Raises OSError also if what is there is a link, or a folder that others can write into.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not _is_own(path):
            raise


def _is_own(path) -> bool:
    """Whether this is a folder, no link to one, into which nobody but this user can write."""
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        return (stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
                and not found.st_mode & 0o022)
    return False


def birthplace(launcher: Launcher) -> str:
    """Return a name that the ranks of one job on this host share before MPI tells them anything.

    A launcher starts its ranks of a host from one process. Without a launcher there is one rank.
    """
    pid = os.getppid() if launcher.size > 1 else os.getpid()
    return f"{pid}-{started(pid)}"
