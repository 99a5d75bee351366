"""Worked examples equal one rank, on real ranks."""

import pytest
from mpi4py import MPI

from mpipar.study.examples.catalog import EXAMPLES, TOLERANCE, run

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.ranks(2, 4)
HERE = [name for name, one in EXAMPLES.items() if WORLD.size in one.ranks]


@pytest.mark.parametrize("name", HERE)
def test_an_example_equals_one_rank(name):
    lines, off = run(name, WORLD)
    assert off <= TOLERANCE
    assert bool(lines) == (WORLD.rank == 0)
    if lines:
        assert lines[0].startswith(f"{name}: ")
        assert sum("barrier" in line or "gets" in line for line in lines) > 0
