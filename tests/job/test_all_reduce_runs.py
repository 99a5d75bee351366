"""`--all-reduce` as a user types it: a rank that dies."""

import signal
import sys

import pytest
from helpers import REPOSITORY, run_ranks
from program import TEXT, killed_by

SMALL = (
    "train --layers 2 --d-model 16 --heads 2 --seq-len 8 --batch-size 4 --num-microbatches 1"
    " --steps 4 --sample-tokens 0 --log-interval 1 --dtype float64"
).split()


DIES = """
import os, signal, sys
from mpipar.comm.algorithms.shared import Marks
plain, seen = Marks.meet, []
def meet(marks, row, mark):
    seen.append(row)
    place = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
    if len(seen) == 20 and place == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(marks, row, mark)
Marks.meet = meet
from mpipar.__main__ import main
main()
"""


@pytest.mark.slow
def test_a_rank_that_dies_inside_a_window_ends_the_job(tmp_path):
    """The launcher ends the one that would spin at their next meeting for ever."""
    result = run_ranks(
        2,
        [
            sys.executable,
            "-c",
            DIES,
            *SMALL,
            *TEXT,
            "--layout",
            "tp=2",
            "--all-reduce",
            "window",
            "--steps",
            "1000",
            "--hang-stop",
            "5",
            "--out",
            str(tmp_path / "run"),
        ],
        timeout=100,
        env={"PYTHONPATH": str(REPOSITORY)},
    )
    killed_by(result, signal.SIGKILL)
