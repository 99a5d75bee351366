"""The fastest OpenBLAS kernels on this CPU: the measurement that `mpipar.job.blas.choice` rests on.

    python -m bench.blas_kernels [--rounds 3] [--json bench/results/blas_kernels.json]

There is a process for each architecture that this processor can run, and one for OpenBLAS's own
choice. Each multiplies on one thread what a step of a small decoder does: x w, dy w^T and x^T dy.
They take turns, and the fastest time of each product is taken. The file keeps the rows of other
processors that were measured earlier.

Columns: asked: the value of OPENBLAS_CORETYPE, or `nothing`. runs: the architecture whose kernels
ran. float32_gflops, float64_gflops: of one thread, by processor time. chosen: what mpipar chooses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from time import process_time

import numpy as np

from bench import results
from bench.program import Outcome, Program
from bench.timing import seconds_of
from mpipar.errors import EnvironmentProblem
from mpipar.job import blas
from mpipar.job.environment import THREAD_VARIABLES

ROWS, INNER, COLUMNS = 256, 384, 1536  # x: (ROWS, INNER), w: (INNER, COLUMNS), dy: (ROWS, COLUMNS)
FLOP = 3 * 2 * ROWS * INNER * COLUMNS
REPEATS = 30
OWN = "nothing"
DTYPES = ("float32", "float64")
CHILD = "from bench.blas_kernels import trial; trial()"


def least_seconds(dtype: str) -> float:
    """Return the total time of the three products, each at its fastest.

    It is processor time: other programs' turns on the core do not count.
    """
    x, w, dy = (
        np.ones(shape, dtype) for shape in ((ROWS, INNER), (INNER, COLUMNS), (ROWS, COLUMNS))
    )
    total = 0.0
    for a, b in ((x, w), (dy, w.T), (x.T, dy)):
        out = np.empty((a.shape[0], b.shape[1]), dtype)
        total += min(seconds_of(partial(np.matmul, a, b, out=out), REPEATS, process_time))
    return total


def trial() -> None:
    """Print this process's measurement as a line of JSON."""
    pool = next((one for one in blas.pools() if one["internal_api"] == "openblas"), {})
    print(
        json.dumps(
            {
                "runs": pool.get("architecture"),
                "version": pool.get("version"),
                **{dtype: least_seconds(dtype) for dtype in DTYPES},
            }
        )
    )


def process(asked: str) -> dict:
    """Return the `trial` of a process whose OpenBLAS was asked for an architecture."""
    environ = {name: value for name, value in os.environ.items() if name != blas.VARIABLE}
    environ |= dict.fromkeys(THREAD_VARIABLES, "1")
    if asked != OWN:
        environ[blas.VARIABLE] = asked
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env=environ,
        text=True,
        check=True,
        cwd=results.ROOT,
        capture_output=True,
        timeout=300,
    )
    found = json.loads(done.stdout)
    if found["runs"] is None:
        raise EnvironmentProblem("NumPy has no OpenBLAS here: there is nothing to choose")
    return found


def measure(rounds: int) -> list[dict]:
    """Return a row for each architecture that this processor can run."""
    name, units = blas.processor()
    asked = [OWN, *(one for one in blas.ARCHITECTURES if not blas.lacking(one, units))]
    turns = [{one: process(one) for one in asked} for _ in range(rounds)]
    return [
        {
            "processor": name,
            "vector_units": " ".join(units),
            "asked": one,
            "runs": turns[0][one]["runs"],
            **{
                f"{dtype}_gflops": round(1e-9 * FLOP / min(turn[one][dtype] for turn in turns), 1)
                for dtype in DTYPES
            },
            "chosen": "yes" if one == blas.choice(units) else "",
        }
        for one in asked
    ]


def with_others(path: str | None, rows: list[dict]) -> list[dict]:
    """Return the file's rows of other processors, followed by these rows."""
    if path is None or not Path(path).exists():
        return rows
    kept = json.loads(Path(path).read_text())["rows"]
    own = {(row["processor"], row["vector_units"]) for row in rows}
    return [row for row in kept if (row["processor"], row["vector_units"]) not in own] + rows


main = Program(
    "blas_kernels",
    __doc__,
    lambda args, session: Outcome(
        with_others(args.json, measure(args.rounds)), {"rounds": args.rounds}
    ),
    counts={"--rounds": (3, "processes of each")},
).started(__name__)
