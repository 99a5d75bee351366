"""The launcher that started this process, according to its variables, and whether MPI agrees."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpipar.errors import EnvironmentProblem

if TYPE_CHECKING:
    from mpi4py import MPI

OPEN_MPI, MPICH = "Open MPI's mpirun", "MPICH's mpiexec"
VARIABLES = {  # of rank, size, rank on this host, size on this host
    OPEN_MPI: tuple(
        f"OMPI_COMM_WORLD_{word}" for word in "RANK SIZE LOCAL_RANK LOCAL_SIZE".split()
    ),
    MPICH: ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
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

    def number(name: str, default: int = 0) -> int:
        text = environ.get(name, "")
        return int(text) if text.isdecimal() else default

    for name, variables in VARIABLES.items():
        if number(variables[1]) and variables[3] in environ:
            return Launcher(name, *map(number, variables, (0, 1, 0, 1)))
    if number("SLURM_STEP_NUM_TASKS"):
        tasks, node = environ.get("SLURM_STEP_TASKS_PER_NODE", "1"), number("SLURM_NODEID")
        return Launcher(
            "srun",
            number("SLURM_PROCID"),
            number("SLURM_STEP_NUM_TASKS"),
            number("SLURM_LOCALID"),
            _tasks_on_node(tasks, node),
        )
    if size := number("PMI_SIZE"):
        rank = number("PMI_RANK")
        local = number("PMI_LOCAL_RANK", rank), number("PMI_LOCAL_SIZE", size)
        return Launcher("a PMI launcher", rank, size, *local)
    return Launcher()


def _tasks_on_node(text: str, node: int) -> int:
    """Return the tasks on one node from SLURM's compressed list, such as 2(x3),1."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else max(counts, default=1)


def check_library(launcher: Launcher, library: str) -> None:
    """Refuse MPICH under Open MPI's mpirun, where MPI_Init would abort without naming a cure."""
    if launcher.name == OPEN_MPI and launcher.size > 1 and library.startswith("MPICH"):
        raise Mismatch(
            f"{launcher.name} started these {launcher.size} ranks, but the MPI library is "
            f"{short_name(library)}: start them with the mpiexec of MPICH "
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
        f"MPI library ({short_name(library)}) does not understand this launcher; {cure}"
    )


def check_world(mpi_world: MPI.Comm, environ: Mapping[str, str]) -> None:
    """Apply `check_alone` to a world that a program has made without `mpipar.cli`."""
    if mpi_world.size == 1 < read_launcher(environ).size:
        from mpi4py import MPI

        check_alone(read_launcher(environ), MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())


def short_name(library: str) -> str:
    """Return an MPI library's name and version: the start of its first line."""
    return " ".join(re.split("[\n,]", library, maxsplit=1)[0].strip("\0 ").split())
