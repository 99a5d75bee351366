"""Runs a command on the CUDA machine, building it first if it is missing.

    python tests/elsewhere/cuda_machine/run.py python -m pytest -m "gpu and not real_gpu" tests
    python tests/elsewhere/cuda_machine/run.py mpiexec -n 2 mpipar train --device cuda
    python tests/elsewhere/cuda_machine/run.py --outcome bench/results/cuda_machine.json \
        python -m pytest -n 2 -m "gpu and not real_gpu" tests

The command gets the environment of `build.Machine`, and its exit code is that of this program.
--outcome: of a run of pytest, what becomes of the tests of each file is kept there.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from build import Machine, default_folder

KEEP = Path(__file__).parent / "outcome.py"


def main(words: list[str]) -> int:
    machine = Machine(default_folder().resolve())
    machine.build()
    if words[:1] != ["--outcome"]:
        os.execvpe(words[0], words, machine.environment())  # noqa: S606
    cold = not any(machine.kernels.iterdir())
    with tempfile.TemporaryDirectory() as folder:
        report, start = Path(folder) / "report.xml", time.monotonic()
        code = subprocess.run(
            [*words[2:], f"--junitxml={report}"], env=machine.environment()
        ).returncode
        subprocess.run(
            [
                machine.python,
                KEEP,
                words[1],
                report,
                "cold" if cold else "warm",
                str(time.monotonic() - start),
            ],
            env=machine.environment(),
            check=True,
        )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
