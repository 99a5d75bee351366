"""One job at a time writes into a run folder; a lock whose owner is gone is taken over."""

import contextlib
import json
import multiprocessing
import os
import subprocess

import pytest
from fault_table import fault
from program import LIMIT, PROGRAM, block_of, environment, metrics, mpipar

from mpipar.errors import UsageError
from mpipar.job import lock

RACERS = 8


def race(barrier, folder, won):
    barrier.wait()
    try:
        lock.acquire(folder, str(os.getpid()))
    except UsageError:
        return
    won.put(os.getpid())
    won.close()
    won.join_thread()
    barrier.wait()  # the winner's process stays until all others have tried


def winners(folder):
    """How many of several processes get the lock if they all ask at the same moment."""
    context = multiprocessing.get_context("fork")
    won, barrier = context.Queue(), context.Barrier(RACERS)
    racers = [context.Process(target=race, args=(barrier, folder, won)) for _ in range(RACERS)]
    for racer in racers:
        racer.start()
    first = won.get(timeout=LIMIT)
    for racer in racers:
        if racer.pid != first:
            racer.join(LIMIT)
    barrier.abort()
    for racer in racers:
        racer.join(LIMIT)
    assert won.empty()
    return first


def left_by(folder, **facts):
    """Put a lock into the folder, of this process unless `facts` say otherwise."""
    text = json.dumps(lock.owner("other", {}) | facts)
    (folder / lock.NAME).write_text(text)
    return text


ELSEWHERE = {"host": "n9", "machine": ["another boot", "pid:[1]"]}


@pytest.mark.parametrize("held", ["no", "by a process that is gone"])
def test_one_of_many_that_start_at_once_gets_the_lock(held, tmp_path):
    if held != "no":
        left_by(tmp_path, started=1)
    first = winners(tmp_path)
    assert json.loads((tmp_path / lock.NAME).read_text())["pid"] == first
    assert [path.name for path in tmp_path.iterdir()] == [lock.NAME]


def test_a_lock_ends_with_its_job_and_says_who_has_it(tmp_path):
    held = lock.acquire(tmp_path, "one")
    with pytest.raises(UsageError) as refused:
        lock.acquire(tmp_path, "two")
    assert str(os.getpid()) in str(refused.value)
    assert "--take-over" in str(refused.value)
    held.release()
    assert list(tmp_path.iterdir()) == []
    assert lock.acquire(tmp_path, "two").note == ""


@pytest.mark.parametrize(
    ("facts", "environ", "answer", "why"),
    [
        ({"started": 1}, {}, "", "its process is gone"),
        ({}, {}, "", None),
        (ELSEWHERE, {}, "", None),
        (ELSEWHERE | {"slurm_job": "7"}, {}, "echo 7", None),
        (ELSEWHERE | {"slurm_job": "7"}, {}, "echo 8", "SLURM job 7 is over"),
        (
            ELSEWHERE | {"slurm_job": "7"},
            {},
            "echo Invalid job id specified >&2; exit 1",
            "SLURM job 7 is over",
        ),
        (ELSEWHERE | {"slurm_job": "7"}, {}, "echo no controller >&2; exit 1", None),
        (ELSEWHERE | {"slurm_job": "7"}, {"SLURM_CLUSTER_NAME": "other"}, "echo 8", None),
        (
            ELSEWHERE | {"slurm_job": "7"},
            {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"},
            "echo 7",
            "SLURM has requeued this job",
        ),
        (ELSEWHERE | {"slurm_job": "7"}, {"SLURM_JOB_ID": "7"}, "echo 8", None),
    ],
)
def test_whether_the_owner_is_gone(facts, environ, answer, why, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(f"#!/bin/sh\n{answer or 'exit 1'}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    folder = tmp_path / "run"
    folder.mkdir()
    left_by(folder, **facts)
    if why is not None:
        assert why in lock.acquire(folder, "new", environ=environ).note
        return
    with pytest.raises(UsageError):
        lock.acquire(folder, "new", environ=environ)
    assert "--take-over" in lock.acquire(folder, "new", True, environ).note


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "\xff", "1" * 5000])
def test_a_lock_that_cannot_be_read_needs_take_over(text, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "WRITE_SECONDS", 0.1)
    (tmp_path / lock.NAME).write_text(text, "latin-1")
    with pytest.raises(UsageError, match="--take-over"):
        lock.acquire(tmp_path, "new")
    assert lock.acquire(tmp_path, "new", take_over=True).note


@contextlib.contextmanager
def killed_starts(monkeypatch, **facts):
    """Inside, a start that takes over a lock is killed before it renames its own; `owner` says."""

    def killed(*_, **__):
        raise KeyboardInterrupt

    plain = lock.owner
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        patched.setattr(lock, "owner", lambda *given: plain(*given) | facts)
        yield pytest.raises(KeyboardInterrupt)


@fault(57, "a start killed while it took over a lock: the next one takes it over", 0)
@pytest.mark.parametrize("kills", [1, 2, 5])
def test_a_start_that_was_killed_while_it_took_over_is_passed_by(kills, tmp_path, monkeypatch):
    """Each start has written its own lock beside the old one, and could not rename it."""
    first = left_by(tmp_path, started=1)
    for number in range(kills):
        with killed_starts(monkeypatch, started=1) as raised, raised:
            lock.acquire(tmp_path, f"killed {number}")
    assert (tmp_path / lock.NAME).read_text() == first
    assert len(list(tmp_path.iterdir())) == 1 + kills
    held = lock.acquire(tmp_path, "next")
    assert "its process is gone" in held.note
    assert (tmp_path / lock.NAME).read_text() == held.text
    assert [path.name for path in tmp_path.iterdir()] == [lock.NAME]


def test_one_of_many_passes_a_killed_start_by(tmp_path, monkeypatch):
    left_by(tmp_path, started=1)
    with killed_starts(monkeypatch, started=1) as raised, raised:
        lock.acquire(tmp_path, "killed")
    first = winners(tmp_path)
    assert json.loads((tmp_path / lock.NAME).read_text())["pid"] == first


def test_a_start_that_is_taking_over_keeps_others_away(tmp_path, monkeypatch):
    left_by(tmp_path, started=1)
    with killed_starts(monkeypatch) as raised, raised:
        lock.acquire(tmp_path, "slow")  # its process is this one, which lives
    with pytest.raises(UsageError, match=f"process {os.getpid()} "):
        lock.acquire(tmp_path, "next")
    assert "--take-over" not in lock.acquire(tmp_path, "next", take_over=True).note


def test_a_lock_that_was_taken_over_is_not_released_by_its_former_owner(tmp_path):
    former = lock.acquire(tmp_path, "former")
    new = lock.acquire(tmp_path, "new", take_over=True)
    former.release()
    assert (tmp_path / lock.NAME).read_text() == new.text


@fault(21, "two jobs on one run folder", 2)
def test_two_starts_with_one_folder_at_once(text_folder):
    """Both have looked at the folder before either has made it."""
    words = (
        "train --data text.txt --out run --schedule auto --layers 2 --d-model 8 --heads 2"
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


def test_a_failed_run_releases_its_lock(tmp_path):
    words = "train --out run --lr 1e30 --clip 0 --optimizer sgd --steps 9".split()
    block_of(mpipar(*words, cwd=tmp_path), 79)
    assert not (tmp_path / "run" / lock.NAME).exists()
