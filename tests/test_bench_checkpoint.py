"""bench.checkpoint: its table and its file; a broken limit sets the exit code."""

import json
import re
import sys

import pytest
from helpers import run_ranks

QUICK = ["--size", "4M", "--repeats", "2"]
STRICT = """
import sys
from bench import checkpoint
from mpipar.job.session import guard
checkpoint.LIMIT = 0.01
guard(checkpoint.main)
"""
DONE = ["write + fsync", "SHA-256", "save", "save, blocked (--save-async)",
        "save, beside (--save-async)"]


def run(ranks, folder, *start):
    path = folder / "checkpoint.json"
    done = run_ranks(ranks, [sys.executable, *start, *QUICK, "--folder", str(folder),
                             "--json", str(path)], timeout=100)
    assert done.returncode in (0, 1), done.tail()  # small files may miss the limit
    assert list(folder.iterdir()) == [path]  # it removes what it has written
    return done, json.loads(path.read_text())


def test_everything_is_measured_and_written(tmp_path):
    done, result = run(2, tmp_path, "-m", "bench.checkpoint")
    layouts = ["load dp=2, as saved", "load pp=2", "load tp=2"]
    assert [row["what"] for row in result["rows"]] == DONE + layouts
    state = result["machine"]["state_MiB"]
    assert 3 < state < 5
    for row in result["rows"]:
        held = state if row["what"] == layouts[0] else state / 2
        assert row["MiB_per_rank"] == pytest.approx(held, rel=0.1)
        assert row["GiB_per_s"] == pytest.approx(2 * row["GiB_per_s_and_rank"])
        assert 0 < row["best_ms"] <= row["median_ms"]
    printed = float(re.search(r"takes ([\d.]+) times", done.stdout)[1])
    assert printed == pytest.approx(result["machine"]["save_over_parts"], abs=0.011)
    assert ("the limit is not kept" in done.stdout) == (done.returncode == 1)


def test_a_limit_that_is_not_kept_is_an_exit_code(tmp_path):
    done, result = run(1, tmp_path, "-c", STRICT)
    assert done.returncode == 1
    assert "the limit is not kept" in done.stdout
    assert [row["what"] for row in result["rows"]] == [*DONE, "load dp=1, as saved"]
