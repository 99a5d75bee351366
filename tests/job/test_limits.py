"""System limits that are too low end with a sentence and a cure, before a library dies of them."""

import math
import os
import resource
import shutil
import subprocess
import sys

import pytest
from fault_table import fault
from helpers import find_launcher, run_command
from program import LIMIT, PROGRAM, block_of, environment

from mpipar.comm.launcher import Launcher
from mpipar.run.process import failure, limits

TWO = Launcher("mpiexec", 0, 2, 0, 2)
MIB = 1 << 20


def limited(monkeypatch, open_files, shared, folder):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (open_files, -1))
    monkeypatch.setattr(limits, "shared_free", lambda: shared)
    monkeypatch.setattr(limits, "SHARED", folder)


def test_each_small_limit_is_named_with_a_cure(monkeypatch, tmp_path):
    for enough in (56, -1):  # -1: no limit
        limited(monkeypatch, enough, 4 * MIB, tmp_path)
        assert limits.problems(TWO) == []
    limited(monkeypatch, 12, 65536, tmp_path)
    files, shared = limits.problems(TWO)
    assert files == "the limit of open files is 12, but 56 are needed: ulimit -n 1024"
    assert "has 0.0625 MiB left, but the ranks of this host need 4 MiB: mount" in shared
    assert "size=64m" in shared
    monkeypatch.undo()
    monkeypatch.setattr(limits, "SHARED", tmp_path / "absent")
    assert limits.shared_free() == 0
    assert "can't be written to" in limits.problems(TWO)[0]
    assert limits.problems(Launcher()) == []


def test_a_start_with_few_open_files_says_so():
    words = f"ulimit -n 24; exec {' '.join(PROGRAM)} doctor"
    block_of(
        run_command(["bash", "-c", words], LIMIT, environment()),
        69,
        "the limit of open files is 24, but 52 are needed: ulimit -n 1024",
    )


def namespaces():
    """Whether a mount of this test's own is possible: of root, with unshare."""
    return (
        os.getuid() == 0
        and shutil.which("unshare")
        and subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode
        == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "said"),
    [
        pytest.param(before, said, marks=fault(43, what, 69))
        for what, before, said in (
            ("ulimit -n 32", "ulimit -n 32", "the limit of open files is 32"),
            (
                "/dev/shm of 64 KiB",
                "mount -t tmpfs -o size=64k tmpfs /dev/shm",
                "has 0.0625 MiB left",
            ),
            (
                "/dev/shm that cannot be written",
                "mount -t tmpfs -o ro tmpfs /dev/shm",
                "/dev/shm can't be written to",
            ),
        )
    ],
)
def test_two_ranks_where_the_system_allows_too_little(before, said):
    """It is so for the ranks. A launcher may need more, and then says so in its own words."""
    mounts = before.startswith("mount")
    if mounts and not namespaces():
        pytest.skip("only root can mount")
    words = f"{before}; exec {sys.executable} -m mpipar doctor"
    command = [find_launcher(), "-n", "2", *["unshare", "-m"] * mounts, "bash", "-c", words]
    block_of(run_command(command, LIMIT, environment()), 69, said)


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/", {}, math.inf),
        ("0::/a/b", {"a/b/cpu.max": "max 100000"}, math.inf),
        ("0::/a/b", {"a/b/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "150000 100000"}, 0.5),
        ("0::/outside", {"cpu.max": "200000 100000"}, 2.0),
        ("3:cpu,cpuacct:/a\n1:memory:/a", {}, math.inf),
        ("0::/", {"cpu.max": "damaged"}, math.inf),
    ],
)  # fmt: skip
def test_the_quota_of_a_control_group_is_seen(own, files, cores, tmp_path):
    (tmp_path / "own").write_text(own + "\n")
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert limits.cpu_quota(tmp_path / "own", tmp_path / "fs") == cores


@pytest.mark.parametrize("error", [BlockingIOError(11, "again"), RuntimeError(failure.NO_THREAD)])
def test_no_room_for_a_process_or_thread_is_words(error):
    report = failure.error_report(error, "here")
    assert (report.exit_code, report.trace) == (69, "")
    assert "ulimit -u" in report.what[0]
