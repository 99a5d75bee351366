"""One product of two matrices on one core in four ways, from plain loops to BLAS.

    python -m bench.tiles [--json FILE]

Two matrices of --size rows and columns are multiplied: by plain loops, in tiles, in packed tiles,
and by BLAS. Numba compiles the first three. Each result is compared with float64 before it is
timed. percent_of_blas: speed over that of BLAS. flop_per_byte: see bench/kernels/products.py.
"""

from __future__ import annotations

import importlib.util
import sys
import timeit
from collections.abc import Callable
from functools import partial

import numpy as np
from threadpoolctl import threadpool_limits

from bench.program import Outcome, Program
from mpipar.errors import EXIT_CHECK_FAILED, EnvironmentProblem
from mpipar.run.process.environment import blas_pools, blas_words

COPY_BYTES = 1 << 28


def best_seconds(function: Callable, repeats: int) -> float:
    """Return the shortest of `repeats` calls, after one that is not timed."""
    function()
    return min(timeit.repeat(function, number=1, repeat=repeats))


def copy_gbs(repeats: int) -> float:
    """Return GB/s that a copy larger than the caches writes: half of what memory moves."""
    source, copy = np.ones((2, COPY_BYTES // 8), np.float32)  # pages of zeros may share memory
    return 1e-9 * COPY_BYTES / best_seconds(partial(np.copyto, copy, source), repeats)


def check_flags(args, parser) -> None:
    """Check what was typed. Raises UsageError."""
    if args.size % 4:
        parser.error(f"--size {args.size}: must be a multiple of 4")


def measure(args, session) -> Outcome | int:
    """Measure; code 1 if a result is wrong. Raises EnvironmentProblem without Numba."""
    if importlib.util.find_spec("numba") is None:
        raise EnvironmentProblem("bench.tiles needs Numba: pip install '.[cpu]'")
    from bench.kernels import products

    try:
        with threadpool_limits(1):
            copied = copy_gbs(args.repeats)
            rows = products.rows(args.size, partial(best_seconds, repeats=args.repeats))
    except ValueError as error:
        print(f"not timed: {error}", file=sys.stderr)
        return EXIT_CHECK_FAILED
    facts = {
        "size": args.size,
        "repeats": args.repeats,
        "blas": blas_words(blas_pools()[0]).replace(", kernels for", ""),
        "copy_gbs": copied,
        "blas_gflops": rows[-1]["gflops"],
    }
    return Outcome(rows, facts, head=f"one thread: copy {copied:.1f} GB/s, {facts['blas']}")


main = Program(
    "tiles",
    __doc__,
    measure,
    check=check_flags,
    counts={
        "--size": (768, "sides of the matrices, a multiple of 4"),
        "--repeats": (5, "timed calls, of which the best counts"),
    },
).started(__name__)
