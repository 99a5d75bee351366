"""System limits that are too low end with a sentence and a cure, before a library dies of them."""

import os
import resource
import shutil
import subprocess
import sys

import pytest
from fault_table import fault
from helpers import find_launcher, run_command
from program import LIMIT, PROGRAM, block_of, environment

from mpipar.job import limits
from mpipar.job.environment import Launcher

TWO = Launcher("mpiexec", 0, 2, 0, 2)
MIB = 1 << 20


def limited(monkeypatch, **values):
    """Let getrlimit answer with these soft limits, and with none for the others."""
    none = resource.RLIM_INFINITY
    chosen = {getattr(resource, name): value for name, value in values.items()}
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (chosen.get(which, none),) * 2)


def test_each_small_limit_of_a_process_is_named_with_a_cure(monkeypatch):
    limited(monkeypatch)
    assert limits.process_problems(TWO) == []
    limited(monkeypatch, RLIMIT_AS=300 * MIB, RLIMIT_NOFILE=12)
    assert limits.process_problems(TWO) == [
        "the limit of address space is 300 MiB, but 512 MiB are needed: ulimit -v unlimited",
        "the limit of open files is 12, but 56 are needed: ulimit -n 1024",
    ]


def test_what_mpi_needs_is_looked_at_where_ranks_share_a_host(monkeypatch, tmp_path):
    limited(monkeypatch, RLIMIT_FSIZE=MIB)
    monkeypatch.setattr(limits, "shared_free", lambda: 65536)
    monkeypatch.setattr(limits, "SHARED", tmp_path)
    file, shared = limits.mpi_problems(TWO)
    assert file.startswith("the limit of file sizes and shared memory is 1 MiB, but 4 MiB are")
    assert "has 0.0625 MiB left" in shared
    assert "size=64m" in shared
    assert limits.mpi_problems(Launcher()) == []
    monkeypatch.setattr(limits, "PROCESS", tmp_path / "stat")
    assert "mount -t proc" in limits.mpi_problems(Launcher())[0]
    monkeypatch.setattr(limits, "SHARED", tmp_path / "absent")
    assert "can't be written to" in limits.mpi_problems(TWO)[-1]
    assert f"no {tmp_path / 'absent'}" in limits.shown()


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
            ("ulimit -v 300000", "ulimit -v 300000", "the limit of address space is 293 MiB"),
            ("ulimit -n 32", "ulimit -n 32", "the limit of open files is 32"),
            ("ulimit -f 1000", "ulimit -f 1000", "the limit of file sizes and shared memory"),
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
            ("a hidden /proc", "mount -t tmpfs tmpfs /proc", "/proc does not show this process"),
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
