"""Runs commands in this process, to see what they print, refuse and write; without MPI.

Other tests start programs. They show that an exit code reaches the shell, with one block for all
ranks: test_cli.py and test_launch.py.
"""

import array
import contextlib
import io
import multiprocessing
import signal
import sys
import time
from types import SimpleNamespace

import pytest
from helpers import Finished

from mpipar import cli
from mpipar.comm.launcher import Launcher
from mpipar.errors import UserError
from mpipar.run.process import failure, mpi
from mpipar.run.process import session as job_session
from mpipar.run.process.mpi import OneRank
from mpipar.run.process.session import Session


class StandIn(Session):
    """The session of one of several ranks, up to a refusal; a number stands in for MPI."""

    def __init__(self, ranks=1, rank=0):
        super().__init__(Launcher("a launcher", rank, ranks, rank, ranks))

    def start(self):
        self.world = SimpleNamespace(
            rank=self.launcher.rank,
            size=self.launcher.size,
            Allgather=self.alike,
            Allgatherv=self.alike,
        )
        self.host_rank = self.launcher.local_rank
        return self.world

    def alike(self, own, everybody):
        """An all-gather of ranks that all have the same."""
        into = everybody[0] if isinstance(everybody, list | tuple) else everybody
        into[:] = (
            type(into)(into.typecode, list(own) * self.launcher.size)
            if isinstance(into, array.array)
            else bytes(own) * self.launcher.size
        )

    def agree(self, function):
        return function()

    def compare(self, facts):
        """Nobody is there to differ."""


def printed(*words, ranks=1, rank=0, code=0):
    """The output of a command on this rank; the command must end with this code."""
    session, text = StandIn(ranks, rank), io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            found = cli.main([str(word) for word in words], session)
        except SystemExit as leaving:  # argparse, after --help
            found = leaving.code
    assert found == code
    assert session.world is None, "MPI was started for something that needs none"
    return text.getvalue()


def refusal(*words, ranks=1, folder="."):
    """The error that ends this command, run in `folder`, before it has printed anything."""
    text = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(text),
        pytest.raises(UserError) as caught,
    ):
        cli.main([str(word) for word in words], StandIn(ranks))
    assert text.getvalue() == ""
    return caught.value


def assert_refused(code, parts, *words, ranks=1, folder="."):
    """Assert that a command is refused with this exit code and says all these parts."""
    found = refusal(*words, ranks=ranks, folder=folder)
    assert found.exit_code == code, found
    missing = [part for part in parts if part not in str(found)]
    assert not missing, f"{missing} in\n{found}"


def alone(*words, cwd="."):
    """How a command ends that runs as one rank in this process, without MPI.

    A start takes a second and more. An error is told as the guard tells it.
    """
    session, out, err = Session(Launcher()), io.StringIO(), io.StringIO()
    words, start = tuple(map(str, words)), time.monotonic()
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setattr(mpi, "start", lambda launcher: OneRank())
        patched.setattr(sys, "argv", ["mpipar", *words])
        try:
            code = job_session._run(cli.main, list(words), session)
        except UserError as error:
            code = error.exit_code
            failure.show(failure.report(error, "")[1])
            session.unlock()
            session.watch.end()
    return Finished(words, code, out.getvalue(), err.getvalue(), time.monotonic() - start)


class LateError(BaseException):
    """A block took too long; nothing that catches errors of files may catch this."""


@contextlib.contextmanager
def at_once(limit=30):
    """Fail a block that takes longer than so many seconds: it hangs, or loops over a huge number.

    Each such block takes a fraction of a second where nothing else runs.
    """

    def late(*_):
        raise LateError(f"longer than {limit} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def results_at_once(function, count=8):
    """What a function returns in each of so many processes that call it at the same moment.

    None of them ends before all have returned.
    """
    context = multiprocessing.get_context("fork")
    gate, found = context.Barrier(count, timeout=60), context.Queue()

    def call():
        gate.wait()
        found.put(function())
        gate.wait()

    processes = [context.Process(target=call, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    results = [found.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    return results
