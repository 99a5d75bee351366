"""bench.step: runs, prints its table, and refuses to time a model that computes something else."""

import sys

import pytest
from helpers import run_command

pytestmark = pytest.mark.peers
SIZES = "--layers 2 --d-model 24 --heads 3 --seq-len 20 --batch-size 2 --vocab-size 31 --repeats 2"
WRONG_GRADIENT = """
import sys
from bench import step
from mpipar.ops.numpy_ops import NumpyOps
NumpyOps.gelu_backward_input = lambda self, dy, x: dy.copy()
sys.exit(step.main(sys.argv[1:]))
"""


def test_both_sides_agree_and_are_timed():
    done = run_command([sys.executable, "-m", "bench.step", *SIZES.split()], timeout=100)
    assert done.returncode == 0, done.tail()
    lines = done.stdout.splitlines()
    assert "losses equal" in lines[0]
    assert lines[1].split()[:4] == ["part", "mpipar_ms", "torch_ms", "ratio"]
    assert [line.split()[0] for line in lines[2:]] == ["forward_backward", "update", "step"]
    for line in lines[2:]:
        _, ours, theirs, _, our_best, their_best, _ = line.split()
        assert float(ours) >= float(our_best) > 0
        assert float(theirs) >= float(their_best) > 0


def test_a_wrong_gradient_is_not_timed():
    done = run_command([sys.executable, "-c", WRONG_GRADIENT, *SIZES.split()], timeout=100)
    assert done.returncode == 1, done.tail()
    assert "step 2: loss" in done.stderr
    assert not done.stdout
