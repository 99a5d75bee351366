"""bench.startup times a run from its command to its first step, and says what a start could not."""

import json
import sys

import pytest

from bench import startup
from mpipar.errors import EnvironmentProblem, UsageError

RUN = """
import json, pathlib, sys, time
pathlib.Path("runs/0001").mkdir(parents=True)
lines = [{"step_seconds": seconds} for seconds in (0.5, 0.2, 0.1)]
pathlib.Path("runs/0001/metrics.jsonl").write_text("\\n".join(map(json.dumps, lines)))
print("headline")
print("step 1/3 | loss 5.5", flush=True)
sys.exit(int(sys.argv[1]))
"""


def test_a_start_ends_with_the_first_step(monkeypatch, tmp_path):
    monkeypatch.setattr(startup, "command", lambda *_: [sys.executable, "-c", RUN, "0"])
    found = startup.row(1, None, 2)
    assert found["first_step_ms"] == 500
    assert found["later_step_ms"] == 100
    assert 0 < found["least_s"] <= found["start_s"]
    path = tmp_path / "startup.json"
    assert startup.main(["--ranks", "1,2", "--repeats", "1", "--json", str(path)], None) == 0
    assert [row["ranks"] for row in json.loads(path.read_text())["rows"]] == [1, 2]


def test_a_start_that_fails_is_said():
    with pytest.raises(EnvironmentProblem, match="failed"):
        startup.one_start([sys.executable, "-c", RUN, "3"])
    with pytest.raises(UsageError, match="--ranks"):
        startup.main.parse(["--ranks", "1,x"])


def test_the_command_is_that_of_a_user():
    assert startup.command(1, None)[1:4] == ["-m", "mpipar", "train"]
    argv = startup.command(2, "numba")
    assert argv[1:3] == ["-n", "2"]
    assert argv[-2:] == ["--kernels", "numba"]
