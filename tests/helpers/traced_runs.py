"""Traced runs of the program under mpiexec, with a fault planted."""

import shutil

import pytest
from helpers import REPOSITORY, find_launcher, run_ranks
from program import FAULTY, environment

from mpipar.run.trace import trace_file

# The text is short: its held-out part is evaluated in rows of 8 tokens.
SMALL = (
    "--layers 2 --d-model 16 --heads 2 --seq-len 8 --batch-size 4 --num-microbatches 2"
    f" --steps 6 --sample-tokens 0 --data {REPOSITORY / 'LICENSE'}"
).split()
STEPS, PASSES = 5, 5 * 2  # traced steps, and microbatches in them, of `late_runs`


def traced(folder, *words, fault="none", ranks=2):
    """The Trace of a run of `train` under a fault of faulty_run.py."""
    if find_launcher() is None:
        pytest.skip("no mpiexec: install .[mpich]")
    command = [*FAULTY, fault, "train", *words, "--out", str(folder)]
    run_ranks(ranks, command, 100, environment()).ended()
    return trace_file.read(folder)


@pytest.fixture(scope="session")
def late_runs(tmp_path_factory):
    """Return {fault: folder} of two runs that differ in 50 ms of sleep on rank 1, twice a step.

    Of five traced steps one may be delayed by other work, which the quartiles do not see. A run
    that was delayed for longer than by its fault is repeated, since it shows another cause.
    """
    folders = {fault: tmp_path_factory.mktemp("late") / fault for fault in ("none", "delay")}
    for fault, folder in folders.items():
        for _ in range(3):
            shutil.rmtree(folder, ignore_errors=True)
            trace = traced(folder, *SMALL, "--layout", "tp=2", "--trace", "2:6", fault=fault)
            if max(rank.end - rank.start for rank in trace.ranks) < 1.5 * PASSES * 50e6:
                break
    return folders


# By fault: the words of its cause.
FAULTS = {
    "data": "data loading",
    "opt": "optimizer",
    "save": "checkpoint save",
    "between": "between spans (Python, posting, logging)",
    "gc": "garbage collection",
    "F": "forward of stage {stage}, {layer}",
    "B": "backward of stage {stage}, {layer}",
}
