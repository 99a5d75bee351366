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
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from mpipar import errors, failure
from mpipar.environment import OPEN_MPI, Launcher, presets, read_launcher
from mpipar.errors import EnvironmentProblem, UsageError, UserError

STOP_SECONDS = 3.5  # a Ctrl-C ends the job within 5 s, whatever the ranks are doing
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
        A process that has not ended max(STOP_SECONDS, grace) seconds later leaves at once with
        code 130; so does a second Ctrl-C.
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
        _later(self._grace, self.fail, late)

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
            return f"host {os.uname().nodename} (pid {os.getpid()}){doing}"
        return (f"rank {self.world.Get_rank()} of {self.world.Get_size()} on host "
                f"{os.uname().nodename} (pid {os.getpid()}){doing}")

    def fail(self, error: BaseException, thread: str = ""):
        """End the whole job because of `error`: one block on the console, one exit code. No return.

        Any thread may call it. Ranks that fail at the same time race for one file: the first
        prints its block and aborts with its code; the others are silent and take over that code.
        """
        self._failing.acquire()  # never released: a second failing thread of this rank stops here
        if self._others_may_wait_in_init(error):
            with contextlib.suppress(Exception):
                self.start()
        place = self._place() + (f", thread {thread}" if thread else "")
        symmetric = self.world is None and isinstance(error, UsageError)
        found = failure.report(error, "" if symmetric else place)
        if self.world is None:
            # the same on every rank (a flag), or on every rank of a host (its installation)
            per_host = isinstance(error, EnvironmentProblem | KeyboardInterrupt)
            if (self.launcher.local_rank if per_host else self.launcher.rank) == 0:
                if not isinstance(error, BrokenPipeError):  # `mpipar schedule ... | head`
                    failure.show(found)
            else:  # the first to leave makes some launchers kill the others: let one speak before
                time.sleep(ABORT_SECONDS / 4)
            os._exit(found.exit_code)
        code, speaks, record = failure.claim(self._error_folders(), self.world.Get_rank(), found)
        if speaks:
            # a console that nobody reads must not keep the job alive
            _later(ABORT_SECONDS, self._abort, code)
            failure.show(found, record)
        else:
            time.sleep(ABORT_SECONDS)  # the speaker's abort ends this process while it sleeps
        self._abort(code)

    def _others_may_wait_in_init(self, error: BaseException) -> bool:
        """A defect before MPI on one rank: launchers let the others wait in MPI_Init for it.

        So the rank starts MPI and aborts from within. Mistakes of the user come alike to all.
        """
        return (self.world is None and self.launcher.size > 1
                and not isinstance(error, UserError | KeyboardInterrupt)
                and threading.current_thread() is threading.main_thread())

    def _error_folders(self) -> list[Path]:
        own = [Path(self.run_folder) / "errors"] if self.run_folder else []
        return [*own, Path(tempfile.gettempdir()) / f"mpipar-errors-{self._token}"]

    def _abort(self, code: int):
        """Kill every rank; where MPI cannot, at least this process."""
        _later(ABORT_SECONDS, os._exit, code)
        if self.launcher.name:
            self.world.Abort(code)
        os._exit(code)


def _later(seconds: float, function: Callable, *arguments) -> None:
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()


def _import_mpi():
    """mpi4py.MPI, not yet initialized: the library is checked against the launcher first."""
    try:
        import mpi4py
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise EnvironmentProblem(f"MPI cannot be loaded ({reason}); install one with "
                                 "pip install '.[mpich]', or load your cluster's MPI") from error
    return MPI


def _check_library(launcher: Launcher, library: str) -> None:
    """MPICH does not start under Open MPI's mpirun: it would abort inside MPI_Init, hint or no."""
    if launcher.name == OPEN_MPI and launcher.size > 1 and library.startswith("MPICH"):
        raise EnvironmentProblem(
            f"{launcher.name} started these {launcher.size} ranks, but the MPI library is "
            f"{_short(library)}: start them with the mpiexec of MPICH "
            f"({Path(sys.executable).parent / 'mpiexec'}), or install mpi4py for Open MPI")


def _check_alone(launcher: Launcher, world_size: int, library: str) -> None:
    """N processes that each believe to be rank 0 of 1 would run the job N times over."""
    if world_size > 1 or launcher.size == 1:
        return
    cure = {"srun": "with MPICH use srun --mpi=pmi2, with Open MPI srun --mpi=pmix"}.get(
        launcher.name, "use the mpiexec that belongs to the library, or install the library that "
        "belongs to the launcher: pip install '.[mpich]' for MPICH")
    raise EnvironmentProblem(
        f"this process is alone (rank 0 of 1), but {launcher.name} started {launcher.size}: the "
        f"MPI library ({_short(library)}) does not hear this launcher; {cure}")


def _short(library: str) -> str:
    return " ".join(re.split("[\n,]", library, maxsplit=1)[0].split())


def _listen(session: Session) -> None:
    """Take SIGINT in a thread: a Python handler would wait until the MPI call returns."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def watch():
        while True:
            for number in os.read(read_end, 64):
                if number == signal.SIGINT:
                    session.interrupt()

    threading.Thread(target=watch, name="signals", daemon=True).start()


def _run(main: Callable, argv: list[str], session: Session) -> int:
    try:
        exit_code = main(argv, session)
    except AgreedError as agreed:
        exit_code = agreed.exit_code
    except SystemExit as leaving:
        if session.world is not None:
            raise
        exit_code = leaving.code or errors.EXIT_OK
    return session.finish(exit_code)


def guard(main: Callable, argv: list[str] | None = None):
    """Run main(argv, session) -> exit code as this process's whole life; does not return.

    Call it before NumPy is imported: it sets the number of BLAS threads.
    """
    os.environ.update(presets(os.environ, len(os.sched_getaffinity(0))))
    session = Session(read_launcher(os.environ))
    threading.excepthook = lambda failed: session.fail(failed.exc_value, failed.thread.name)
    _listen(session)
    try:
        exit_code = _run(main, sys.argv[1:] if argv is None else argv, session)
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - whatever it is, no rank may be left waiting
        session.fail(error)
    sys.exit(exit_code)
