"""Tries in a child job whether this MPI accepts device pointers: a crash there is harmless.

`python -m bench.interconnect.cuda_probe` under mpiexec -n 2 is that child: rank 0 sends device
memory to rank 1.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

from bench.interconnect.compiled import program_of_mpi

NUM_ELEMENTS = 1 << 16  # more than any library sends eagerly
TIME_LIMIT = 60.0
CANNOT_TRY = 3  # exit code of a child without a GPU
OUTER_JOB = re.compile(r"(PMI|PMIX|OMPI|PRTE|MPI_LOCAL|HYDI|HYDRA|SLURM|MPIPAR_EXIT)")


def command() -> list[str]:
    """Return the command of the child job; [] if nothing can start one."""
    launcher = program_of_mpi("mpiexec")
    child = [sys.executable, "-m", "bench.interconnect.cuda_probe"]
    return [launcher, "-n", "2", *child] if launcher else []


def probe(words, time_limit: float = TIME_LIMIT) -> str:
    """Return yes, no or unknown, from how the child job ends."""
    if not words:
        return "unknown"
    inherited = {name: value for name, value in os.environ.items() if not OUTER_JOB.match(name)}
    try:
        done = subprocess.run(
            words,
            env=inherited,
            timeout=time_limit,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return {0: "yes", CANNOT_TRY: "unknown"}.get(done.returncode, "no")


def main() -> int:
    """Run the child: return 0 if device memory arrived as it was sent, CANNOT_TRY without a GPU."""
    try:
        import cupy

        cupy.cuda.Device(0).use()
        x = cupy.arange(NUM_ELEMENTS, dtype="float32")
        cupy.cuda.get_current_stream().synchronize()
    except (ImportError, RuntimeError, OSError):
        return CANNOT_TRY
    from mpi4py import MPI

    world, y = MPI.COMM_WORLD, cupy.zeros_like(x)
    cupy.cuda.get_current_stream().synchronize()
    if world.rank == 0:
        world.Send(x, 1)
    elif world.rank == 1:
        world.Recv(y, 0)
        return int(not bool((x == y).all()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
