"""ZeRO from the command line: its barriers. For a killed run see test_resume_runs.py."""

import pytest
from program import mpipar

pytestmark = pytest.mark.slow


def test_its_barriers_are_shown(tmp_path):
    words = "--steps 2 --layers 1 --batch-size 8 --sample-tokens 0 --eval-tokens 64 --dp 2 --zero 1"
    done = mpipar("train", *words.split(), ranks=2, cwd=tmp_path).ended()
    assert "gradient reduce-scatter: its rank computed in" in done.stdout
    assert "weights.bucket  all_gather" in done.stdout
