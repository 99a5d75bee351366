"""bench.recorder: its table and its file; a broken limit sets the exit code."""

import json
import sys

from helpers import run_ranks

QUICK = ["--repeats", "5", "--steps", "2"]
STRICT = """
import sys
from bench import recorder
from mpipar.job.session import guard
recorder.CALL_LIMIT_NS = 1
guard(recorder.main)
"""


def test_every_operation_is_measured_and_written(tmp_path):
    path = tmp_path / "recorder.json"
    command = [sys.executable, "-m", "bench.recorder", *QUICK, "--json", str(path)]
    done = run_ranks(2, command, timeout=100)
    assert done.returncode in (0, 1), done.tail()  # few batches may miss the limits
    result = json.loads(path.read_text())
    assert [row["operation"] for row in result["rows"]] == [
        "all_reduce", "broadcast", "iall_reduce", "send_and_receive", "span"]
    for row in result["rows"]:
        assert 0 < row["bare_ns"] < row["recorded_ns"]
        assert row["cost_ns"] == row["recorded_ns"] - row["bare_ns"]
    facts = result["machine"]
    assert (facts["ranks"], facts["records_per_step"]) == (2, 10)
    assert f"{facts['percent_of_step']:.3f}% of it; limit 2%" in done.stdout
    assert ("a limit is not kept" in done.stdout) == (done.returncode == 1)


def test_a_limit_that_is_not_kept_is_an_exit_code():
    done = run_ranks(2, [sys.executable, "-c", STRICT, *QUICK], timeout=100)
    assert done.returncode == 1, done.tail()
    assert "a limit is not kept" in done.stdout
