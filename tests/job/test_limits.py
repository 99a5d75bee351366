"""System limits that are too low end with a sentence and a cure, before a library dies of them."""

import math
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
from fault_table import fault
from helpers import find_launcher, run_command
from program import LIMIT, PROGRAM, block_of, environment, mpipar
from threadpoolctl import threadpool_info, threadpool_limits

from mpipar import ops as ops_module
from mpipar.comm.launcher import Launcher
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config
from mpipar.errors import OutOfMemory
from mpipar.run.memory_limit import data_bytes, memory_limit
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


# --- --memory-limit: an error names what does not fit; on more ranks it trains


# One layer of 17 million parameters: 68 MB each for weights, gradients and two moments.
WIDE = """--layers 1 --d-model 256 --heads 8 --ffn 32768 --seq-len 16 --batch-size 4
    --num-microbatches 1 --steps 1 --sample-tokens 0""".split()
BYTES = 190 << 20


@pytest.mark.slow
@fault(39, "a layer too large for the memory of a rank", 69)
def test_a_layer_too_large_for_one_rank_is_named_and_trains_on_two(tmp_path):
    text = tmp_path / "text"
    text.write_text("A short text: its held-out end is read to the last row.\n" * 40)
    words = ("train", *WIDE, "--data", text, "--memory-limit", BYTES)
    alone = mpipar(*words, cwd=tmp_path)
    block_of(alone, 69, "out of memory: optimizer (mpipar/", "allocate 65.4 MiB for an", "--tp")
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


def test_without_a_limit_the_array_is_named():
    ops = ops_module.make("cpu", "float32")
    message = r"out of memory: weights \(mpipar/.*1125899906842624"
    with pytest.raises(OutOfMemory, match=message), memory_limit(config_of(), ops):
        ops.empty((1 << 50,), label="weights")


def test_on_a_gpu_the_pool_gets_the_limit():
    limits = []

    class Pool:
        def set_limit(self, size):
            limits.append(size)

    cupy = SimpleNamespace(get_default_memory_pool=Pool)
    error = MemoryError("Out of memory allocating 1,024 bytes (allocated so far: 700 bytes).")
    message = "allocating 1,024 bytes .*, but less is left of --memory-limit 1000;"
    config, _ = resolve(config_of(1000), 1)
    with (
        pytest.raises(OutOfMemory, match=message),
        memory_limit(config, SimpleNamespace(device="cuda", xp=cupy)),
    ):
        raise error
    assert limits == [1000, 0]
