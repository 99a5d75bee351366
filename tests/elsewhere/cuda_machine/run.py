"""Runs a command on the CUDA machine, building it first if it is missing.

    python tests/elsewhere/cuda_machine/run.py python -m pytest -m "gpu and not real_gpu" tests
    python tests/elsewhere/cuda_machine/run.py mpiexec -n 2 mpipar train --device cuda

The command gets the environment of `build.Machine`, and its exit code is that of this program.
"""

import os
import sys

from build import Machine, default_folder

if __name__ == "__main__":
    machine = Machine(default_folder().resolve())
    machine.build()
    os.execvpe(sys.argv[1], sys.argv[1:], machine.environment())  # noqa: S606
