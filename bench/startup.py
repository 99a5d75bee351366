"""The time of a training run from the command to its first step, on one rank and on several.

    python -m bench.startup [--ranks 1,2,4] [--repeats 5] [--json bench/results/startup.json]

Each repetition starts `mpipar train` for three steps in an empty folder, with the default model and
text. Caches of compiled code are warm: one untimed start fills them.

Columns, medians: start_s: from the command to the line of the first step, which is then done.
least_s: the fastest start. first_step_ms, later_step_ms: the first step, and the faster one of the
two after it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.interconnect.launches import environment_of_jobs, own_launcher
from bench.program import Outcome, Program
from mpipar.config import flags
from mpipar.errors import EnvironmentProblem
from mpipar.ops import KERNELS

FLAGS = "--steps 3 --log-interval 1 --eval-tokens 100 --sample-tokens 0".split()


def add_flags(parser) -> None:
    """Add the flags that a run is started with."""
    parser.add_argument(
        "--ranks",
        type=flags.counts,
        default=(1, 2, 4),
        metavar="N,N",
        help="numbers of ranks (1,2,4)",
    )
    parser.add_argument("--kernels", choices=KERNELS["cpu"], help="as of mpipar train")


def command(num_ranks: int, kernels: str | None) -> list[str]:
    """Return what a user types, with the programs of this environment."""
    prefix = [] if num_ranks == 1 else [own_launcher(), "-n", str(num_ranks)]
    more = ["--kernels", kernels] if kernels else []
    return [*prefix, sys.executable, "-m", "mpipar", "train", *FLAGS, *more]


def one_start(argv: list[str]) -> tuple[float, list[float]]:
    """Return (seconds from the command to the first step's line, seconds of each step)."""
    with tempfile.TemporaryDirectory() as folder:
        begin, found = time.perf_counter(), None
        with subprocess.Popen(
            argv,
            cwd=folder,
            text=True,
            stdin=subprocess.DEVNULL,
            env=environment_of_jobs(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            for line in process.stdout:
                if found is None and line.startswith("step 1/"):
                    found = time.perf_counter() - begin
            said = process.stderr.read()
        if process.returncode or found is None:
            raise EnvironmentProblem(f"{' '.join(argv)} failed: {said.strip()[-500:]}")
        (path,) = Path(folder).glob("runs/*/metrics.jsonl")
        steps = [json.loads(line)["step_seconds"] for line in path.read_text().splitlines()]
    return found, steps


def row(num_ranks: int, kernels: str | None, repeats: int) -> dict:
    """Return the figures of one number of ranks."""
    argv = command(num_ranks, kernels)
    one_start(argv)
    found = [one_start(argv) for _ in range(repeats)]
    starts = [start for start, _ in found]
    return {
        "ranks": num_ranks,
        "kernels": kernels or KERNELS["cpu"][0],
        "start_s": median(starts),
        "least_s": min(starts),
        "first_step_ms": 1e3 * median(one[0] for _, one in found),
        "later_step_ms": 1e3 * median(min(one[1:]) for _, one in found),
    }


main = Program(
    "startup",
    __doc__,
    lambda args, session: Outcome(
        [row(one, args.kernels, args.repeats) for one in args.ranks], {"repeats": args.repeats}
    ),
    add=add_flags,
    counts={"--repeats": (5, "timed starts of each")},
).started(__name__)
