"""`--all-reduce` as a user types it: the same losses, what auto keeps, and a rank that dies."""

import json
import sys

import pytest
from helpers import REPOSITORY, run_ranks
from program import TEXT, mpipar

from mpipar.commands.algorithms import NAME

SMALL = (
    "train --layers 2 --d-model 16 --heads 2 --seq-len 8 --batch-size 4 --num-microbatches 1"
    " --steps 4 --sample-tokens 0 --log-interval 1 --dtype float64"
).split()


def losses(folder) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
def test_auto_is_kept_and_used_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "run"
    words = [*SMALL, *TEXT, "--layout", "dp=2", "--out", run, "--all-reduce", "auto"]
    done = mpipar(*words, "--steps", "2", ranks=2).ended()
    known = json.loads((run / NAME).read_text())
    assert [*known] == ["dp [0, 1]"]
    known["dp [0, 1]"] = {way: ["ring"] * len(names) for way, names in known["dp [0, 1]"].items()}
    (run / NAME).write_text(json.dumps(known))
    again = [*SMALL, *TEXT, "--layout", "dp=2", "--out", run, "--resume", "auto"]
    done = mpipar(*again, ranks=2).ended()
    assert json.loads((run / NAME).read_text()) == known
    plain = tmp_path / "plain"
    assert mpipar(*SMALL, *TEXT, "--layout", "dp=2", "--out", plain, ranks=2).returncode == 0
    assert losses(run) == pytest.approx(losses(plain), rel=1e-12)
    other = [*SMALL, *TEXT, "--layout", "dp=2", "--out", tmp_path / "other", "--resume", run]
    mpipar(*other, "--steps", "5", "--all-reduce", "auto", ranks=2).ended()
    assert json.loads((tmp_path / "other" / NAME).read_text()) == known
    (run / NAME).write_text('{"dp [0, 1]": {"own": ["fast"], "window": []}}')
    done = mpipar(*again, "--steps", "6", ranks=2).ended(65)
    assert f"{NAME}: must have algorithms" in done.stderr
    assert "measures again" in done.stderr


@pytest.mark.slow
def test_auto_takes_what_an_earlier_run_measured_on_these_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = [*SMALL, *TEXT, "--all-reduce", "auto", "--out"]
    first = mpipar(*words, tmp_path / "first", "--layout", "dp=2", ranks=2).ended()
    assert "an earlier run" not in first.stdout
    (machine,) = (tmp_path / "cache" / "mpipar" / "algorithms").glob(f"*/{NAME}")
    known = json.loads(machine.read_text())
    known["dp [0, 1]"] = {way: ["ring"] * len(names) for way, names in known["dp [0, 1]"].items()}
    machine.write_text(json.dumps(known))
    second = mpipar(*words, tmp_path / "second", "--layout", "dp=2", ranks=2).ended()
    assert f"remove {machine}" in second.stdout
    assert json.loads((tmp_path / "second" / NAME).read_text()) == known
    # Another layout measures its own groups, and adds them.
    mpipar(*words, tmp_path / "third", "--layout", "tp=2", ranks=2).ended()
    assert json.loads(machine.read_text()).items() > known.items()
    # A run that continues another one sums as that one did, and leaves the machine's choices alone.
    (tmp_path / "first" / NAME).write_text(
        json.dumps(
            {
                "dp [0, 1]": {
                    way: ["halves"] * len(names) for way, names in known["dp [0, 1]"].items()
                }
            }
        )
    )
    before = machine.read_text()
    again = [*words, tmp_path / "first", "--resume", "auto", "--steps", "5", "--layout", "dp=2"]
    assert "an earlier run" not in mpipar(*again, ranks=2).ended().stdout
    assert machine.read_text() == before
    machine.write_text("[]")
    done = mpipar(*words, tmp_path / "fourth", "--layout", "dp=2", ranks=2).ended(65)
    assert "measures again" in done.stderr


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
    """And the one that waits for it at their next meeting does not spin for ever."""
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
    ).ended(69)
    assert "where:  rank 1 of 2" in result.stderr
