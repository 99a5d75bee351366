"""How a process of a job starts, stops and fails: nothing may hang, and every end has one meaning.

A plain exception in one rank leaves the others waiting for it for ever. guard() wraps the whole
command, so that whatever goes wrong on any rank, in any thread, ends every rank with one error
block and one exit code:

    guard -> Session.start (MPI) -> command -> Session.finish (all ranks together)
                 any failure -> Session.fail -> claim -> block -> Abort

No state outside the Session object, which the command gets as an argument.
"""

import array
import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable

from mpipar import errors, failure
from mpipar.environment import Launcher, presets, read_launcher
from mpipar.errors import EnvironmentProblem, UserError

STOP_SECONDS = 4.0  # a Ctrl-C ends the job within 5 s, whatever the ranks are doing
ABORT_SECONDS = 2.0  # how long one rank's abort may take before the others stop waiting for it


class AgreedError(Exception):
    """All ranks leave with this code, and one of them has printed why; only guard() catches it."""

    def __init__(self, exit_code: int):
        self.exit_code = exit_code
        super().__init__(f"all ranks leave with exit code {exit_code}")


class Session:
    """One process of a job.

    world: COMM_WORLD after start(). host_ranks: world ranks on this host, ascending.
    run_folder: set it (on every rank) once the folder exists; failing ranks write errors/ there.
    where: called when an error is reported, says what the rank is doing, as "step 17".
    """

    def __init__(self, launcher: Launcher):
        self.launcher = launcher
        self.world = None
        self.host_ranks = (0,)
        self.run_folder: str | None = None
        self.where: Callable[[], str] = str
        self.stop_requested = False
        self._grace: float | None = None
        self._private = None
        self._token = ""
        self._failing = threading.Lock()

    def start(self):
        """Start MPI and return COMM_WORLD; raises EnvironmentProblem if the ranks are not one job.

        Comm: a broadcast and an all-gather over the ranks of a host.
        """
        MPI = _import_mpi()
        _check_library(self.launcher, MPI.Get_library_version())
        if not MPI.Is_initialized():
            with warnings.catch_warnings():
                # mpi4py's own warning about a foreign launcher: _check_alone says it with the cure
                warnings.simplefilter("ignore", RuntimeWarning)
                MPI.Init_thread(MPI.THREAD_MULTIPLE)
        _check_alone(self.launcher, MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())
        self.world = MPI.COMM_WORLD
        # own communicator: agree() and finish() must never match a message of the command
        self._private = self.world.Dup()
        token = bytearray(os.urandom(8))
        self._private.Bcast(token, root=0)
        self._token = token.hex()
        host = self._private.Split_type(MPI.COMM_TYPE_SHARED)
        ranks = array.array("i", [0] * host.Get_size())
        host.Allgather(array.array("i", [self.world.Get_rank()]), ranks)
        host.Free()
        self.host_ranks = tuple(sorted(ranks))
        return self.world

    def agree(self, function: Callable):
        """Run function() on every rank and return its result, or leave together if it fails.

        The lowest rank on which it raised UserError prints it; every rank then ends with its code,
        without an abort. Comm: one all-gather of a byte per rank; every rank must call it.
        """
        result = error = None
        try:
            result = function()
        except UserError as raised:
            error = raised
        codes = self._gather_code(error.exit_code if error else errors.EXIT_OK)
        failing = [rank for rank, code in enumerate(codes) if code]
        if not failing:
            return result
        if self.world.Get_rank() == failing[0]:
            everywhere = len(failing) == len(codes)
            failure.show(failure.report(error, "" if everywhere else self._place()))
        raise AgreedError(codes[failing[0]])

    def _gather_code(self, code: int) -> bytearray:
        codes = bytearray(self._private.Get_size())
        self._private.Allgather(bytes([code]), codes)
        return codes

    @contextlib.contextmanager
    def stop_on_request(self, grace: float = 0.0):
        """Inside, the first Ctrl-C only sets stop_requested: the loop ends at a step boundary.

        The ranks must agree on it there: a signal may reach one rank, or each at another step.
        A process that has not ended max(4, grace) seconds later leaves at once with code 130; so
        does a second Ctrl-C.
        """
        self._grace = max(STOP_SECONDS, grace)
        try:
            yield self
        finally:
            self._grace = None

    def interrupt(self) -> None:
        """What one SIGINT does; runs in the signal thread, also while the rank waits in MPI."""
        if self._grace is None or self.stop_requested:
            self.fail(KeyboardInterrupt("interrupted (SIGINT)"))
        self.stop_requested = True
        late = KeyboardInterrupt(f"interrupted (SIGINT), and not done {self._grace:g} s later")
        timer = threading.Timer(self._grace, self.fail, (late,))
        timer.daemon = True
        timer.start()

    def finish(self, exit_code: int) -> int:
        """The regular end, reached by all ranks together; returns the highest of their codes.

        Comm: one all-gather of a byte per rank, then MPI_Finalize.
        """
        if self.world is None:
            return exit_code
        exit_code = max(self._gather_code(exit_code))
        self._private.Free()
        _import_mpi().Finalize()
        return exit_code

    def _place(self) -> str:
        doing = f", {self.where()}" if self.where() else ""
        if self.world is None:
            return f"before MPI started, on host {os.uname().nodename} (pid {os.getpid()}){doing}"
        return (f"rank {self.world.Get_rank()} of {self.world.Get_size()} on host "
                f"{os.uname().nodename} (pid {os.getpid()}){doing}")

    def fail(self, error: BaseException, thread: str = ""):
        """End the whole job because of `error`: one block on the console, one exit code. No return.

        Any thread may call it. Ranks that fail at the same time race for one file: the first
        prints its block and aborts with its code; the others are silent and take over that code.
        """
        self._failing.acquire()  # never released: a second failing thread of this rank stops here
        place = self._place() + (f", thread {thread}" if thread else "")
        report = failure.report(error, place)
        if self.world is None:
            if isinstance(error, UserError | KeyboardInterrupt):
                speaks = self.launcher.local_rank == 0
            ...
