"""A rank that a signal has killed is named; a run folder that a host does not see is refused."""

import re

import pytest
from fault_table import fault
from helpers import run_ranks
from in_process import printed
from program import FAULTY, LIMIT, block_of, environment, mpipar, pair

from mpipar.errors import OutputError
from mpipar.job import lock, status

SMALL = (
    "train --layers 2 --d-model 8 --heads 2 --seq-len 5 --batch-size 4 --sample-tokens 0"
    " --num-microbatches 1 --data text.txt --out run"
).split()


@fault(25, "kill -9 of a rank: the next start and ckpt ls name it", None)
def test_a_killed_rank_is_named_by_ls_and_by_the_next_start(text_folder):
    words = [*SMALL, "--layout", "tp=2", "--steps", "8"]
    killed = run_ranks(2, [*FAULTY, "killed", *words], LIMIT, environment(), text_folder)
    assert killed.returncode not in (0, 1), killed.tail()
    named = r"was killed .*(\n.*)*rank 1 on \S+ \(pid \d+\), in step \d, phase F, since"
    assert re.search(named, printed("ckpt", "ls", text_folder / "run"))
    mpipar(*words, "--resume", "auto", ranks=2, cwd=text_folder).ended()
    log = (text_folder / "run" / "log.txt").read_text()
    assert re.search(named, log)
    assert "took over the lock" in log
    assert "killed" not in printed("ckpt", "ls", text_folder / "run")
    assert not {"status", "lock"} & {path.name for path in (text_folder / "run").iterdir()}


@fault(7, "a run folder that a rank does not see", 74)
@pytest.mark.slow
def test_a_run_folder_that_a_rank_does_not_see_is_74(text_folder):
    """Two working folders stand for two hosts without a shared disk."""
    other = text_folder / "other"
    other.mkdir()
    (other / "text.txt").write_bytes((text_folder / "text.txt").read_bytes())
    words = [*SMALL, "--layout", "tp=2", "--steps", "1"]
    block_of(pair(words, words, [text_folder, other]), 74, "does not see", "rank 1 of 2")
    assert not (text_folder / "run" / lock.NAME).exists()


def open_status(folder, ranks):
    assert status.open_folder(folder, "token") == []
    return [status.Status(folder, rank, "n1") for rank in range(ranks)]


def test_the_first_end_that_was_seen_is_the_one_that_is_told(tmp_path):
    first, second, third = open_status(tmp_path, 3)
    second.enter(17, "sync")
    status.lost(first.path, 1)
    status.lost(third.path, 0)
    assert [sign.lost for sign in status.signs(tmp_path)] == [1, -1, 0]
    [line] = status.killed(tmp_path)
    assert re.search(r"first rank 1 on n1 \(pid \d+\), in step 17, phase sync", line)
    assert status.open_folder(tmp_path, "next") == [line]
    assert status.killed(tmp_path) == []


def test_without_a_witness_the_last_sign_is_told(tmp_path):
    first, second = open_status(tmp_path, 2)
    second.enter(3, "W")
    first.enter(4, "opt")
    text, *last = status.killed(tmp_path)
    assert "no rank saw" in text
    assert ["rank 1 on n1" in last[0], "step 4, phase opt" in last[1]] == [True, True]


def test_nothing_is_told_of_a_job_at_work_or_after_a_regular_end(tmp_path):
    ranks = open_status(tmp_path, 2)
    held = lock.acquire(tmp_path, "token")
    assert status.killed(tmp_path) == []
    held.release()
    assert status.killed(tmp_path) != []
    status.close_folder(tmp_path)
    for rank in ranks:
        rank.close()
    assert list(tmp_path.iterdir()) == []
    assert status.killed(tmp_path) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * status.SIZE,
        b"x" * 99,
        b"[" * status.SIZE,
        b'{"rank": 1}'.ljust(status.SIZE, b"\0"),
        b"y" * 10**6,
    ],
)
def test_files_that_are_no_status_are_passed_over(content, tmp_path):
    open_status(tmp_path, 1)
    (tmp_path / "status" / "rank-00001").write_bytes(content)
    assert [sign.rank for sign in status.signs(tmp_path)] == [0]


@pytest.mark.parametrize("token", [None, "of another job"])
def test_a_host_that_does_not_see_the_folder_of_this_job(token, tmp_path, monkeypatch):
    monkeypatch.setattr(status, "SHARED_SECONDS", 0.2)
    if token is not None:
        status.open_folder(tmp_path, token)
    with pytest.raises(OutputError, match="host n2 does not see"):
        status.check_shared(tmp_path, "token", "n2")


def test_a_folder_that_cannot_be_written_is_an_output_error(tmp_path):
    with pytest.raises(OutputError):
        status.open_folder(tmp_path / "absent", "token")
    with pytest.raises(OutputError):
        status.Status(tmp_path, 0, "n1")
