"""docs/examples/one_file.py gives the losses of `mpipar train`, on every layout."""

import re
import sys

import numpy as np
import pytest
from helpers import run_ranks
from in_process import alone
from program import LIMIT, REPOSITORY, environment

FILE = REPOSITORY / "docs" / "examples" / "one_file.py"
LAYOUTS = {"1,1,1": 1, "1,2,1": 2, "2,1,2": 4, "1,2,2": 4}
QUICK = "1,1,1", "1,2,2"  # the slow tests run all
STEPS = 3
COMMON = (
    "--dtype",
    "float64",
    "--batch-size",
    16,
    "--num-microbatches",
    4,
    "--lr-schedule",
    "constant",
    "--lr",
    1e-3,
    "--clip",
    0,
    "--eval-tokens",
    64,
    "--sample-tokens",
    0,
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """(a file of weights that have been trained for a step, the package's run from there)."""
    folder = tmp_path_factory.mktemp("one_file")
    first, second = folder / "first", folder / "second"
    for out, more in (
        (first, ("--steps", 1)),
        (second, ("--steps", STEPS, "--init-from", first / "weights")),
    ):
        alone("train", "--out", out, *COMMON, *more).ended()
    return first / "weights" / "model.safetensors", second


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[pytest.mark.slow] * (layout not in QUICK)) for layout in LAYOUTS],
)
def test_losses_are_those_of_the_package(reference, layout):
    weights, run = reference
    program = [sys.executable, FILE, "--layout", layout, "--weights", weights, "--compare", run]
    done = run_ranks(LAYOUTS[layout], list(map(str, program)), LIMIT, environment()).ended()
    found = re.findall(r"^step +\d+  loss (\S+)  mpipar (\S+)$", done.stdout, re.MULTILINE)
    assert len(found) == STEPS
    ours, theirs = np.array(found, float).T
    assert ours == pytest.approx(theirs, rel=1e-12, abs=0)


def test_the_command_line():
    done = run_ranks(2, [sys.executable, str(FILE), "--steps", "1"], LIMIT, environment()).ended()
    assert re.search(r"^step +1  loss 5\.\d{4}$", done.stdout, re.MULTILINE)
    assert re.search(r"^from stage 1 +4 calls +1\.05 MB", done.stdout, re.MULTILINE)


def test_a_layout_of_other_ranks_is_refused():
    done = run_ranks(2, [sys.executable, str(FILE), "--layout", "1,1,1"], LIMIT, environment())
    assert done.returncode != 0
    assert "--layout 1,1,1: the product must be 2" in done.stderr
