"""Runs commands in this process, to see what they print, refuse and write; without MPI.

Other tests start programs. They show that an exit code reaches the shell, with one block for all
ranks: test_cli.py, test_launch.py and test_refusals.py.
"""

import array
import contextlib
import io
import signal
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from mpipar import cli
from mpipar.comm.one_rank import OneRank
from mpipar.errors import UserError
from mpipar.job.environment import Launcher
from mpipar.job.session import Session


class StandIn(Session):
    """The session of one of several ranks, up to a refusal; a number stands in for MPI."""

    def __init__(self, ranks=1, rank=0):
        super().__init__(Launcher("a launcher", rank, ranks, rank, ranks))

    def start(self):
        here = SimpleNamespace(Test=lambda: True)  # nobody is waited for
        self.world = SimpleNamespace(
            rank=self.launcher.rank, size=self.launcher.size, Get_size=lambda: self.launcher.size,
            Ibarrier=lambda: here, Barrier=lambda: None, Allgather=self.alike,
            Allgatherv=self.alike)
        self.host_rank = self.launcher.local_rank
        return self.world

    def alike(self, own, everybody):
        """An all-gather of ranks that all have the same."""
        into = everybody[0] if isinstance(everybody, list | tuple) else everybody
        into[:] = type(into)(into.typecode, list(own) * self.launcher.size) if isinstance(
            into, array.array) else bytes(own) * self.launcher.size

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
    with contextlib.chdir(folder), contextlib.redirect_stdout(text), \
            pytest.raises(UserError) as caught:
        cli.main([str(word) for word in words], StandIn(ranks))
    assert text.getvalue() == ""
    return caught.value


def assert_refused(code, parts, *words, ranks=1, folder="."):
    """Assert that a command is refused with this exit code and says all these parts."""
    found = refusal(*words, ranks=ranks, folder=folder)
    assert found.exit_code == code, found
    missing = [part for part in parts if part not in str(found)]
    assert not missing, f"{missing} in\n{found}"


class Alone(StandIn):
    """The session of a command that computes here, on one rank."""

    def start(self):
        self.world, self.host_rank = OneRank("a test needs none"), 0
        return self.world

    def leave_mpi(self, exit_code):
        return exit_code


def ran(*words, code=0, folder="."):
    """(standard output, standard error) of a command that computes on one rank, in `folder`."""
    session, out, err = Alone(), io.StringIO(), io.StringIO()
    argv = [str(word) for word in words]
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), \
            contextlib.redirect_stderr(err), contextlib.closing(session.ending), \
            mock.patch.object(sys, "argv", ["mpipar", *argv]):
        assert cli.main(argv, session) == code
    return out.getvalue(), err.getvalue()


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
