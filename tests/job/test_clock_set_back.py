"""The time of day is set back during a run: nothing is measured or decided by it."""

import re
import sys

from helpers import REPOSITORY, run_command
from in_process import alone, printed
from program import LIMIT, TEXT, environment, metrics

SET_BACK = """
import datetime, os, time
from mpipar.train.worker import Worker
plain_time, plain_step, days = time.time, Worker.train_step, [0]
time.time = lambda: plain_time() - 86400 * days[0]
time.time_ns = lambda: int(time.time() * 1e9)
def step(self, number, *rest):
    days[0] = max(0, number - 2)  # from step 3 on, a day for each step
    return plain_step(self, number, *rest)
Worker.train_step = step
from mpipar.__main__ import main
main()
"""
SMALL = (
    "--layers 1 --d-model 8 --heads 2 --seq-len 5 --batch-size 4 --num-microbatches 1"
    " --sample-tokens 0 --log-interval 1 --save-interval 2"
).split()


def test_a_run_goes_on_and_is_resumed_when_the_clock_is_set_back(tmp_path):
    words = ["train", *SMALL, *TEXT, "--out", str(tmp_path / "run"), "--resume", "auto", "--steps"]
    result = run_command([sys.executable, "-c", SET_BACK, *words, "5"], LIMIT, environment())
    assert result.returncode == 0, result.tail()
    assert not re.search(r"eta -|-\d+ ms|took -|-\d\.\d+ s", result.stdout), result.tail()
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(0 < line["step_seconds"] < LIMIT for line in lines)
    assert not re.search(r" -\d", printed("ckpt", "ls", tmp_path / "run")), "an age"
    alone(*words, "6").ended()
    assert metrics(tmp_path / "run")[-1]["step"] == 6


def test_only_what_is_shown_reads_the_time_of_day():
    """A new use needs a look: whether a clock that is set back does any harm."""
    found = {
        str(path.relative_to(REPOSITORY / "mpipar"))
        for path in (REPOSITORY / "mpipar").rglob("*.py")
        if re.search(r"\btime\.time(_ns)?\(|datetime\.now\(", path.read_text())
    }
    assert found == {
        "study/report.py",
        "run/console/tensorboard.py",
        "run/files/digests.py",
        "interconnect/job.py",
    }  # a file from the future is not remembered
