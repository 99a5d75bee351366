"""One job at a time writes into a run folder; a lock whose owner is gone is taken over."""

import contextlib
import json
import os
import subprocess

import pytest
from fault_table import fault
from helpers import run_ranks
from in_process import results_at_once
from program import (
    FAULTY,
    LIMIT,
    PROGRAM,
    block_of,
    environment,
    killed_by,
    metrics,
    mpipar,
    pair,
)

from mpipar.errors import OutputError, UsageError
from mpipar.run.process import lock


def left_by(folder, **facts):
    """Put a lock into the folder, of this process unless `facts` say otherwise."""
    text = json.dumps(lock.owner("other", {}) | facts)
    (folder / lock.NAME).write_text(text)
    return text


ELSEWHERE = {"host": "n9", "machine": ["n9", "another boot", "pid:[1]"]}
REQUEUED = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}


@pytest.mark.parametrize("held", ["no", "by a process that is gone"])
def test_one_of_many_that_start_at_once_gets_the_lock(held, tmp_path):
    if held != "no":
        left_by(tmp_path, started=1)

    def start():
        with contextlib.suppress(UsageError):
            return lock.acquire(tmp_path, "token").own["pid"]

    won = [pid for pid in results_at_once(start) if pid]
    assert won == [json.loads((tmp_path / lock.NAME).read_text())["pid"]]
    assert [path.name for path in tmp_path.iterdir()] == [lock.NAME]


def test_a_lock_ends_with_its_job_and_says_who_has_it(tmp_path):
    held = lock.acquire(tmp_path, "one")
    with pytest.raises(UsageError) as refused:
        lock.acquire(tmp_path, "two")
    assert str(os.getpid()) in str(refused.value)
    assert f"type rm {tmp_path / lock.NAME}" in str(refused.value)
    lock.release(tmp_path, "two")  # which does not hold it
    assert json.loads((tmp_path / lock.NAME).read_text()) == held.own
    lock.release(tmp_path, "one")
    assert list(tmp_path.iterdir()) == []
    assert lock.acquire(tmp_path, "two").note == ""


@pytest.mark.parametrize(
    ("facts", "environ", "why"),
    [
        ({"started": 1}, {}, "its process is gone"),
        ({"pid": 1 << 22}, {}, "its process is gone"),
        ({}, {}, None),
        (ELSEWHERE, {}, None),
        (ELSEWHERE | {"machine": []}, {}, None),
        (ELSEWHERE | {"slurm_job": "7"}, {}, None),
        (ELSEWHERE | {"slurm_job": "7"}, REQUEUED, "SLURM has requeued this job"),
        (ELSEWHERE | {"slurm_job": "7"}, REQUEUED | {"SLURM_RESTART_COUNT": "no number"}, None),
        (ELSEWHERE | {"slurm_job": "8"}, REQUEUED, None),
        (ELSEWHERE | {"slurm_job": "7", "slurm_restarts": 1}, REQUEUED, None),
        (ELSEWHERE | {"slurm_job": "7", "slurm_cluster": "other"}, REQUEUED, None),
        ({"slurm_job": "7"}, REQUEUED, None),  # it is here, and runs
    ],
)
def test_whether_the_owner_is_gone(facts, environ, why, tmp_path):
    left_by(tmp_path, **facts)
    if why is not None:
        assert why in lock.acquire(tmp_path, "new", environ).note
        return
    with pytest.raises(UsageError) as refused:
        lock.acquire(tmp_path, "new", environ)
    subprocess.run(["sh", "-c", str(refused.value).rpartition(", type ")[2]], check=True)
    assert lock.acquire(tmp_path, "new", environ).note == ""


@pytest.mark.parametrize("text", ["", "[]", '{"pid": 1}'])
def test_a_lock_that_cannot_be_read_is_refused(text, tmp_path):
    """As a start that was killed while it wrote, or a damaged disk, may leave it."""
    (tmp_path / lock.NAME).write_text(text, "latin-1")
    with pytest.raises(UsageError, match=f"an unknown job .*type rm {tmp_path / lock.NAME}"):
        lock.acquire(tmp_path, "new")


def test_a_start_that_is_taking_over_keeps_others_away(tmp_path):
    """Or was killed in between, which only its owner can know."""
    first = left_by(tmp_path, started=1)
    (tmp_path / lock.NAME).rename(tmp_path / lock.NEXT)
    left_by(tmp_path, started=1)
    with pytest.raises(UsageError, match=f"type rm {tmp_path / lock.NEXT}"):
        lock.acquire(tmp_path, "next")
    assert (tmp_path / lock.NEXT).read_text() == first
    (tmp_path / lock.NEXT).unlink()
    assert "its process is gone" in lock.acquire(tmp_path, "next").note
    assert [path.name for path in tmp_path.iterdir()] == [lock.NAME]


@pytest.mark.parametrize("token", [None, "of another job"])
def test_a_host_that_does_not_see_the_folder_of_this_job(token, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "SHARED_SECONDS", 0.2)
    if token is not None:
        lock.acquire(tmp_path, token)
    with pytest.raises(OutputError, match="does not see"):
        lock.check_seen(tmp_path, "token")


SMALL = (
    "train --layers 2 --d-model 8 --heads 2 --seq-len 5 --batch-size 4 --sample-tokens 0"
    " --num-microbatches 1 --data text.txt --out run --steps 8 --layout tp=2"
).split()


@fault(25, "kill -9 of a rank: the same command with --resume auto takes its lock over", None)
def test_resuming_after_kill_9_is_one_command(text_folder):
    killed_by(
        run_ranks(2, [*FAULTY, "forward/kill/1", *SMALL], LIMIT, environment(), text_folder), 9
    )
    assert (text_folder / "run" / lock.NAME).exists()
    done = mpipar(*SMALL, "--resume", "auto", ranks=2, cwd=text_folder).ended()
    assert "took over the lock" in done.stdout
    assert not (text_folder / "run" / lock.NAME).exists()


@fault(7, "a run folder that a rank does not see", 74)
@pytest.mark.slow
def test_a_run_folder_that_a_rank_does_not_see_is_74(text_folder):
    """Two working folders stand for two hosts without a shared disk."""
    other = text_folder / "other"
    other.mkdir()
    (other / "text.txt").write_bytes((text_folder / "text.txt").read_bytes())
    block_of(pair(SMALL, SMALL, [text_folder, other]), 74, "does not see", "rank 1 of 2")
    assert not (text_folder / "run" / lock.NAME).exists()


@fault(21, "two jobs on one run folder", 2)
def test_two_starts_with_one_folder_at_once(text_folder):
    """Both have looked at the folder before either has made it."""
    words = (
        "train --data text.txt --out run --layers 2 --d-model 8 --heads 2"
        " --seq-len 5 --batch-size 4 --num-microbatches 2 --sample-tokens 4 --steps 60"
    )
    env = {**os.environ, **environment()}
    starts = [subprocess.Popen([*PROGRAM, *words.split()], cwd=text_folder, env=env, text=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
              for _ in range(2)]  # fmt: skip
    said = [start.communicate(timeout=LIMIT)[1] for start in starts]
    assert sorted(start.returncode for start in starts) == [0, 2], said
    assert len(metrics(text_folder / "run")) == 60
    assert not (text_folder / "run" / lock.NAME).exists()
