"""Rules for the tests that run as one pytest session on every rank of ``mpiexec -n P``.

All ranks run the same tests in the same order. A rank that fails reports and then aborts the whole
session. Otherwise the others might wait for it inside MPI for ever.
"""

import contextlib
import fcntl
import os
import re
import shutil
import sys
import tempfile
import termios
import threading
import time
import traceback
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpipar.comm import groups

TEST_LIMIT = float(os.environ.get("MPIPAR_TEST_LIMIT", "100"))  # seconds for one test
HARNESS = MPI.COMM_WORLD.Dup()  # for this file's own messages: they must not meet those of a test
NAME = f"rank {HARNESS.Get_rank()} of {HARNESS.Get_size()}"


CORES: dict[tuple[int, ...], object] = {}
shares_cores = groups.shares_cores


def known_cores(mpi_world):
    """`shares_cores`, asked once for the same ranks: each of some thousand workers asks."""
    if mpi_world is None:
        return shares_cores(None)
    members = mpi_world.Get_group()
    ranks = tuple(MPI.Group.Translate_ranks(members, None, MPI.COMM_WORLD.Get_group()))
    members.Free()
    if ranks not in CORES:
        CORES[ranks] = shares_cores(mpi_world)
    return CORES[ranks]


groups.shares_cores = known_cores


def say(text: str) -> None:
    """Print a report of this rank in one piece, past pytest's capture."""
    sys.__stderr__.write(f"\n===== {NAME}{text}\n")
    sys.__stderr__.flush()


def abort(text: str) -> None:
    """Report and end all ranks."""
    say(f" failed =====\n{text}")
    sys.__stdout__.flush()
    # The launcher drops output that it has not forwarded when a rank aborts.
    for stream in (sys.__stdout__, sys.__stderr__):
        wait_until_read(stream.fileno())
    time.sleep(0.3)
    MPI.COMM_WORLD.Abort(1)


def wait_until_read(file: int, limit: float = 20.0) -> None:
    """Wait until the launcher has taken all that is in this pipe; at most `limit` seconds."""
    end = time.monotonic() + limit
    with contextlib.suppress(OSError):  # no pipe: nothing is lost
        while any(fcntl.ioctl(file, termios.FIONREAD, bytes(4))) and time.monotonic() < end:
            time.sleep(0.01)


def assert_same_everywhere(value: int, what: str) -> None:
    """Assert that all ranks hold the same integer. Comm: one all-reduce of 16 bytes."""
    ends = np.array([value, -value], dtype=np.int64)
    HARNESS.Allreduce(MPI.IN_PLACE, ends, op=MPI.MAX)
    low, high = int(-ends[1]), int(ends[0])
    assert low == high, f"ranks differ in {what}: from {low} to {high}, here {value}"


def stuck(nodeid: str, thread_id: int) -> None:
    """Print the main thread's place, let the other ranks do the same, and end all ranks.

    It runs in a separate thread: a signal handler would wait for the MPI call that hangs.
    """
    frames = traceback.extract_stack(sys._current_frames()[thread_id])
    own = [x for x in frames if not re.search(r"/(_pytest|pluggy|runpy)\b", x.filename)]
    say(f": {TEST_LIMIT} s in {nodeid} =====\n{''.join(traceback.format_list(own))}")
    time.sleep(3.0)  # another rank may have begun this test so much later
    MPI.COMM_WORLD.Abort(1)


@pytest.fixture
def folder() -> Iterator[Path]:
    """One new folder for all ranks. Comm: a broadcast, and a barrier before it goes."""
    made = tempfile.mkdtemp(prefix="mpipar-test-") if HARNESS.Get_rank() == 0 else None
    path = Path(HARNESS.bcast(made))
    yield path
    HARNESS.Barrier()
    if HARNESS.Get_rank() == 0:
        shutil.rmtree(path)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every newly allocated array, receive buffers included, is full of NaN."""
    from small_model import poison_unwritten  # the harness is tested without it

    poison_unwritten(monkeypatch)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Limit the time of each test, set-up and clean-up included."""
    timer = threading.Timer(TEST_LIMIT, stuck, [item.nodeid, threading.get_ident()])
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let rank 0 alone print progress and summary."""
    if MPI.COMM_WORLD.Get_rank() == 0:
        return
    reporter = config.pluginmanager.getplugin("terminalreporter")
    config.pluginmanager.unregister(reporter)
    silent = open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)
    config.pluginmanager.register(pytest.TerminalReporter(config, silent), "terminalreporter")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests for other numbers of ranks: nothing is missing, they run there."""

    def fits(item: pytest.Item) -> bool:
        marker = item.get_closest_marker("ranks")
        return marker is None or MPI.COMM_WORLD.Get_size() in marker.args

    config.hook.pytest_deselected(items=[item for item in items if not fits(item)])
    items[:] = [item for item in items if fits(item)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check that all ranks are at the same test: drift shows here, not as a later hang."""
    assert_same_everywhere(zlib.crc32(item.nodeid.encode()), f"the test they run ({item.nodeid})")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """End all ranks when one fails, in set-up, test or clean-up."""
    if report.failed:
        abort(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n" + captured(report))
    if report.when == "call" or report.skipped:
        assert_same_everywhere(report.skipped, f"the outcome of {report.nodeid}")


@pytest.hookimpl(trylast=True)
def pytest_collectreport(report: pytest.CollectReport) -> None:
    """End all ranks when one cannot import a test file."""
    if report.failed:
        abort(f"{report.nodeid} (collection)\n{report.longreprtext}")


def captured(report: pytest.TestReport) -> str:
    """Return what the failing test printed."""
    return "\n".join(f"--- {name}\n{text}" for name, text in report.sections)
