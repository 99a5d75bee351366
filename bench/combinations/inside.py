"""A job inside a job: commands of mpipar run on some ranks of one that has begun already."""

from __future__ import annotations

import contextlib
import io
import os
from unittest import mock

from mpipar import cli
from mpipar.job.environment import Launcher
from mpipar.job.session import AgreedError, Session
from mpipar.train.worker import Worker


class Inside(Session):
    """The Session of a command on a communicator; MPI has started, and stays when it ends.

    comm: an mpi4py communicator.
    """

    def __init__(self, comm):
        super().__init__(Launcher("a session", comm.rank, comm.size, comm.rank, comm.size))
        self.comm = comm

    def start(self):
        """The communicator. Comm: a copy of it, a broadcast, and that of compare()."""
        if self.world is None:
            self.world, self._private = self.comm, self.comm.Dup()
            token = bytearray(os.urandom(8))
            self._private.Bcast(token, root=0)
            self._token = token.hex()
            self.host_ranks, self.host_rank = tuple(range(self.comm.size)), self.comm.rank
            if self.facts:
                self.compare(self.facts)
        return self.world

    def leave_mpi(self, exit_code: int) -> int:
        """Return the highest code; MPI goes on. Comm: one all-gather of a byte per rank."""
        if self.world is not None:
            exit_code = max(self._gather_code(exit_code))
            self._private.Free()
            self.world = None
        return exit_code


@contextlib.contextmanager
def freed_groups():
    """Free the groups of all workers that are made inside; else only the end of MPI would.

    Comm: as many as workers were made, which all ranks make alike.
    """
    made, plain = [], Worker.__init__

    def noted(worker, *arguments):
        plain(worker, *arguments)
        made.append(worker)

    with mock.patch.object(Worker, "__init__", noted):
        yield
    for worker in made:
        if worker.mpi_world is not None:
            worker.close()


def run(comm, *words: object) -> tuple[int, str]:
    """(exit code, what this rank printed) of a command on all ranks of a communicator.

    An error of the user that one rank has shown ends the command on all ranks, as in a job of its
    own. Any other exception is raised here.
    Comm: that of the command.
    """
    session, text = Inside(comm), io.StringIO()
    with (contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), freed_groups(),
          mock.patch.object(os, "fsync", return_value=None)):  # no power fails in a life
        try:
            code = cli.main([str(word) for word in words], session)
        except AgreedError as agreed:
            code = agreed.exit_code
        code = session.finish(code)
    return code, text.getvalue()
