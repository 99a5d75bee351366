"""Environment: the launcher's variables, and those to set before NumPy and MPI are loaded.

These are plain functions of plain dictionaries. BLAS reads its thread count and MPI its settings
only once, when they are loaded, so the guard applies the settings first (`job.session.guard`).
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpipar.errors import EnvironmentProblem

OPEN_MPI, MPICH = "Open MPI's mpirun", "MPICH's mpiexec"
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
QUIET_VARIABLES = {
    "UCX_DEBUG_SIGNO": "0",  # else UCX takes SIGHUP as "stop here and wait for a debugger"
    "OMPI_MCA_osc": "^ucx",  # else Open MPI warns where UCX is missing; the window does not need it
}


class Mismatch(EnvironmentProblem):
    """The launcher and the MPI library do not match; every rank of a host notices this itself."""


@dataclass(frozen=True)
class Launcher:
    """The process's place according to the launcher's variables; rank 0 of 1 without a launcher."""

    name: str | None = None
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def read_launcher(environ: Mapping[str, str]) -> Launcher:
    """Return the launcher that started this process, the innermost first.

    Only a SLURM *step* starts ranks. The batch script and a shell under salloc also see
    SLURM_NTASKS but are a single process; SLURM_STEP_NUM_TASKS is set in steps only.
    """

    def number(name, default):
        text = environ.get(name, "")
        return int(text) if text.isdecimal() else default

    for name, rank, size, local_rank, local_size in (
        (
            OPEN_MPI,
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        (MPICH, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if number(size, 0) and local_size in environ:
            return Launcher(
                name, number(rank, 0), number(size, 1), number(local_rank, 0), number(local_size, 1)
            )
    if number("SLURM_STEP_NUM_TASKS", 0):
        on_node = _tasks_on_node(
            environ.get("SLURM_STEP_TASKS_PER_NODE", "1"), number("SLURM_NODEID", 0)
        )
        return Launcher(
            "srun",
            number("SLURM_PROCID", 0),
            number("SLURM_STEP_NUM_TASKS", 1),
            number("SLURM_LOCALID", 0),
            on_node,
        )
    if number("PMI_SIZE", 0):
        rank, size = number("PMI_RANK", 0), number("PMI_SIZE", 1)
        return Launcher(
            "a PMI launcher",
            rank,
            size,
            number("PMI_LOCAL_RANK", rank),
            number("PMI_LOCAL_SIZE", size),
        )
    return Launcher()


def _tasks_on_node(text: str, node: int) -> int:
    """Return the tasks on one node from SLURM's compressed list, such as 2(x3),1."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else max(counts, default=1)


def presets(environ: Mapping[str, str], num_cores: int) -> dict[str, str]:
    """Return variables to set for this process; `num_cores` = cores it may run on.

    The ranks of a host share its cores. Variables that the user has set are kept; setting a single
    thread variable keeps all of them, because BLAS libraries read each other's.
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
        chosen.update(
            {name: value for name, value in YIELD_VARIABLES.items() if name not in environ}
        )
    return chosen


def check_library(launcher: Launcher, library: str) -> None:
    """Refuse MPICH under Open MPI's mpirun, where MPI_Init would abort without naming a cure."""
    if launcher.name == OPEN_MPI and launcher.size > 1 and library.startswith("MPICH"):
        raise Mismatch(
            f"{launcher.name} started these {launcher.size} ranks, but the MPI library is "
            f"{_short(library)}: start them with the mpiexec of MPICH "
            f"({Path(sys.executable).parent / 'mpiexec'}), or install mpi4py for Open MPI"
        )


def check_alone(launcher: Launcher, world_size: int, library: str) -> None:
    """Refuse N processes that each believe they are rank 0 of 1 and would run the job N times."""
    if world_size > 1 or launcher.size == 1:
        return
    cure = (
        "with MPICH use srun --mpi=pmi2, with Open MPI srun --mpi=pmix"
        if launcher.name == "srun"
        else "use the mpiexec that belongs to the library, or install the library that belongs to "
        "the launcher: pip install '.[mpich]' for MPICH"
    )
    raise Mismatch(
        f"this process is alone (rank 0 of 1), but {launcher.name} started {launcher.size}: the "
        f"MPI library ({_short(library)}) does not understand this launcher; {cure}"
    )


def _short(library: str) -> str:
    """Return the library's name and version: the start of its first line."""
    return " ".join(re.split("[\n,]", library, maxsplit=1)[0].split())


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
