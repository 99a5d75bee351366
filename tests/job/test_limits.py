"""What a host allows: one job in a run folder, limits of the system, and memory for the arrays."""

import contextlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import launcher, run_command, run_ranks
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
from threadpoolctl import threadpool_info, threadpool_limits

from mpipar import ops as ops_module
from mpipar.comm.launcher import Launcher
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config
from mpipar.errors import EnvironmentProblem, OutputError, UsageError
from mpipar.run.memory_limit import data_bytes, memory_limit
from mpipar.run.process import environment as limits
from mpipar.run.process import failure, lock

# --- the lock: one whose owner is gone is taken over


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
        (ELSEWHERE | {"slurm_job": "other 7"}, REQUEUED, None),
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


@pytest.mark.fault
def test_resuming_after_kill_9_is_one_command(text_folder):
    killed_by(
        run_ranks(2, [*FAULTY, "forward/kill/1", *SMALL], LIMIT, environment(), text_folder), 9
    )
    assert (text_folder / "run" / lock.NAME).exists()
    done = mpipar(*SMALL, "--resume", "auto", ranks=2, cwd=text_folder).ended()
    assert "took over the lock" in done.stdout
    assert not (text_folder / "run" / lock.NAME).exists()


@pytest.mark.fault
@pytest.mark.slow
def test_a_run_folder_that_a_rank_does_not_see_is_74(text_folder):
    """Two working folders stand for two hosts without a shared disk."""
    other = text_folder / "other"
    other.mkdir()
    (other / "text.txt").write_bytes((text_folder / "text.txt").read_bytes())
    block_of(pair(SMALL, SMALL, [text_folder, other]), 74, "does not see", "rank 1 of 2")
    assert not (text_folder / "run" / lock.NAME).exists()


@pytest.mark.fault
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


# --- limits of the system, before a library dies of them


TWO = Launcher("mpiexec", 0, 2, 0, 2)
MIB = 1 << 20


def limited(monkeypatch, open_files, shared, folder):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (open_files, -1))
    monkeypatch.setattr(limits, "shared_free", lambda: shared)
    monkeypatch.setattr(limits, "SHARED", folder)


def test_each_small_limit_is_named_with_a_cure(monkeypatch, tmp_path):
    for enough in (56, -1):  # -1: no limit
        limited(monkeypatch, enough, 4 * MIB, tmp_path)
        assert limits.limit_problems(TWO) == []
    limited(monkeypatch, 12, 65536, tmp_path)
    files, shared = limits.limit_problems(TWO)
    assert files == "the limit of open files is 12, but 56 are needed: ulimit -n 1024"
    assert "has 0.0625 MiB that can be written, but 4 MiB are needed: mount" in shared
    monkeypatch.undo()
    monkeypatch.setattr(limits, "SHARED", tmp_path / "absent")
    assert limits.shared_free() == 0
    assert limits.limit_problems(Launcher()) == []


def namespaces():
    """Whether a mount of this test's own is possible: of root, with unshare."""
    return (
        os.getuid() == 0
        and shutil.which("unshare")
        and subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode
        == 0
    )


@pytest.mark.fault
@pytest.mark.parametrize(("before", "said"), [
    ("ulimit -n 32", "the limit of open files is 32"),
    pytest.param("mount -t tmpfs -o size=64k tmpfs /dev/shm", "has 0.0625 MiB that can be written",
                 marks=pytest.mark.slow),
    pytest.param("mount -t tmpfs -o ro tmpfs /dev/shm", "has 0 MiB that can be written",
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_two_ranks_where_the_system_allows_too_little(before, said):
    """It is so for the ranks. A launcher may need more, and then says so in its own words."""
    mounts = before.startswith("mount")
    if mounts and not namespaces():
        pytest.skip("only root can mount")
    words = f"{before}; exec {sys.executable} -m mpipar doctor"
    command = [launcher(), "-n", "2", *["unshare", "-m"] * mounts, "bash", "-c", words]
    block_of(run_command(command, LIMIT, environment()), 69, said)


@pytest.mark.parametrize("error", [BlockingIOError(11, "again"), RuntimeError(failure.NO_THREAD)])
def test_no_room_for_a_process_or_thread_is_words(error):
    code, block = failure.report(error, "here")
    assert code == 69
    assert "ulimit -u" in block
    assert "Traceback" not in block


# --- --memory-limit: an error names what does not fit; on more ranks it trains


# One layer of 17 million parameters: 68 MB each for weights, gradients and two moments.
WIDE = """--layers 1 --d-model 256 --heads 8 --ffn 32768 --seq-len 16 --batch-size 4
    --num-microbatches 1 --steps 1 --sample-tokens 0""".split()
BYTES = 190 << 20


@pytest.mark.slow
@pytest.mark.fault
def test_a_layer_too_large_for_one_rank_is_named_and_trains_on_two(tmp_path):
    text = tmp_path / "text"
    text.write_text("A short text: its held-out end is read to the last row.\n" * 40)
    words = ("train", *WIDE, "--data", text, "--memory-limit", BYTES)
    alone = mpipar(*words, cwd=tmp_path)
    block_of(alone, 69, "out of memory: optimizer of block0.ffn.up", "allocate 65.4 MiB", "--tp")
    done = mpipar(*words, "--layout", "tp=2", ranks=2, cwd=tmp_path).ended()
    assert "held-out loss" in done.stdout


def test_a_pass_that_does_not_fit_names_the_layer(tmp_path):
    words = "--layers 6 --d-model 64 --heads 2 --seq-len 256 --batch-size 32 --num-microbatches 1"
    result = mpipar("train", *words.split(), "--steps", 1, "--memory-limit", 60 << 20, cwd=tmp_path)
    block = block_of(result, 69)
    assert re.search(
        r"of block\d\.\S+ \(mpipar/\S+:\d+\): .* [\d.]+ MiB for an array .*, but less is left",
        block,
    ), block
    assert "mpipar explain" in block


def config_of(budget=None, **parts):
    """The configuration of one rank with a limit."""
    config = Config()
    return replace(config, run=replace(config.run, memory_limit=budget), **parts)


def threads():
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def test_the_limit_and_the_thread_of_products_are_taken_back():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    ops = ops_module.make("cpu", "float32")
    with threadpool_limits(2, "blas"):
        with memory_limit(config_of(64 << 20), ops):
            # 16 MiB beside the budget are for the rest of the process
            limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
            assert limit == pytest.approx(data_bytes() + (80 << 20), abs=4 << 20)
            np.ones(32 << 20, np.uint8)
            with pytest.raises(MemoryError):
                np.ones(128 << 20, np.uint8)
            assert threads() == {1}, "a product of more takes memory of its own"
        assert threads() == {2}
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_on_a_gpu_the_pool_gets_the_limit():
    given = []

    class Pool:
        def set_limit(self, size):
            given.append(size)

    cupy = SimpleNamespace(get_default_memory_pool=Pool)
    error = MemoryError("Out of memory allocating 1,024 bytes (allocated so far: 700 bytes).")
    message = "allocating 1,024 bytes .*, but less is left of --memory-limit 1000;"
    config, _ = resolve(config_of(1000), 1)
    with (
        pytest.raises(EnvironmentProblem, match=message),
        memory_limit(config, SimpleNamespace(device="cuda", xp=cupy)),
    ):
        raise error
    assert given == [1000, 0]
