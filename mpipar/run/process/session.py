"""The life of a job's process: nothing may hang, and every way of ending has one meaning.

If one rank leaves with a plain exception, the others wait for it forever. guard() therefore wraps
the whole command: whatever goes wrong, on any rank and in any thread, ends every rank with one
error block and one exit code:

    guard -> Session.start (MPI) -> command -> Session.finish
        any failure -> Session.fail -> one rank's block -> Abort

A rank that a signal kills cannot speak: its launcher says which it was, and ends the others. All
state is in the Session object, which is passed to the command.
"""

import atexit
import contextlib
import ctypes
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from mpipar import errors
from mpipar.comm.launcher import Launcher, Mismatch, read_launcher
from mpipar.comm.objects import all_gather_objects, broadcast_text
from mpipar.errors import EnvironmentProblem, UsageError, UserError
from mpipar.run.files import no_links
from mpipar.run.process import consistency, failure, lock, mpi
from mpipar.run.process.environment import chosen_by_user, keep_heap, limit_problems, presets
from mpipar.run.process.self_test import check_reductions
from mpipar.run.process.signals import Interruptible, later, listen
from mpipar.run.process.streams import open_closed
from mpipar.run.process.watchdog import HANG, Watchdog

STARTING = (
    "MPI is starting: are all variables of MPI (MPIR_CVAR_*, OMPI_MCA_*) the same on all ranks?"
)
ABORT_SECONDS = 2.0  # how long one rank's abort may take before the others stop waiting for it


class AgreedError(Exception):
    """All ranks leave with the code in its argument, and one has printed the reason.

    Only guard() catches it.
    """


class Session(Interruptible):
    """One process of a job.

    world: COMM_WORLD after start(), or a OneRank.
    host_ranks: world ranks on this host, ascending.
    host_rank: place of this process among them.
    facts: what must be identical on all ranks, as text by name; start() compares them. Empty for a
    command that needs no MPI.
    watch: the watchdog, which notices a lack of progress, from start() to the end of finish().
    where: called when an error is reported; returns what the rank is doing, such as "step 17".
    presets: names of the environment variables that guard() has set because the user had not.
    unfinished: a folder to be removed if the process ends at once, or None.
    starting: whether MPI is starting.
    saved: the folder of the final weights once they are written; stopping then loses nothing.
    """

    def __init__(self, launcher: Launcher, presets: Collection[str] = ()):
        self.launcher, self.presets, self.speaks = launcher, presets, launcher.rank == 0
        self.world = self._private = None
        self.host_ranks, self.host_rank = (0,), 0
        self.facts: dict[str, str] = {}
        self.where: Callable[[], str] = str
        self.unfinished: Path | None = None
        self.saved = ""
        self.held: lock.RunLock | None = None  # of the run folder, on world rank 0
        self._token, self._host = "", 0  # of the job, and this host's number, once MPI has started
        self._failing = threading.Lock()
        self.starting = False
        self.watch = Watchdog(
            launcher.rank, lambda: STARTING if self.starting else self.where(), self.fail
        )

    def start(self):
        """Start MPI, compare the facts of all ranks, and return `world`; later calls only return.

        Raises EnvironmentProblem if the ranks are not one job; they leave together if they differ.
        Comm: that of check_same(), host_ranks(), compare() and check_reductions(), a broadcast, an
        agreement.
        """
        if self.world is not None:
            return self.world
        self.watch.start()
        self.starting = True
        self.world = mpi.start(self.launcher)
        self.starting = False
        mpi.check_same(self.world, chosen_by_user(os.environ, self.presets))
        # a private communicator: agree() and finish() must never match the command's messages
        self._private = self.world.Dup() if self.world.size > 1 else self.world
        self._token = broadcast_text(self._private, os.urandom(8).hex())
        self.host_ranks, self._host = mpi.host_ranks(self._private)
        self.host_rank = self.host_ranks.index(self.world.rank)
        mpi.forget_shared_memory()
        self.compare(self.facts)
        self.agree(lambda: check_reductions(self._private, mpi.library_name(self.world)))
        return self.world

    def exited(self) -> None:
        """End the job because a library has called exit(), as MPICH does if it cannot start."""
        words = "a library called exit() in this process"
        early = EnvironmentProblem([f"{words}: see its message", STARTING])
        self.fail(early if self.starting else RuntimeError(words))

    def use_folder(self, folder: Path) -> None:
        """Let ranks write states and errors into the locked run folder from now on.

        All ranks leave together if some host does not see the lock of this job there.
        Comm: an agreement.
        """
        self.agree(lambda: lock.check_seen(folder, self._token))
        self.watch.ranks, self.watch.folder = range(self.world.size), folder

    def compare(self, facts: Mapping[str, str]) -> None:
        """Return if all ranks have the same facts; else show the differences and leave together.

        Comm: that of check_same(), an agreement.
        """
        self.agree(lambda: mpi.check_same(self._private, facts))

    def agree(self, function: Callable):
        """Run function() on every rank and return its result, or leave together if it fails.

        The lowest rank on which it raised UserError prints the error; every rank then ends with
        that error's exit code, without an abort.
        Comm: an all-gather of exit codes; every rank must call it.
        """
        result = error = None
        try:
            result = function()
        except UserError as raised:
            error = raised
        code = error.exit_code if error else errors.EXIT_OK
        codes = all_gather_objects(self._private, code)
        failing = [rank for rank, code in enumerate(codes) if code]
        if not failing:
            return result
        if self.world.rank == failing[0]:
            place = "" if len(failing) == len(codes) else self._place()
            failure.show(failure.report(error, place)[1])
        raise AgreedError(codes[failing[0]])

    def lock(self, folder: Path) -> None:
        """Lock the run folder until this job ends; called by world rank 0 only.

        Raises UsageError if another job holds the lock, and OSError if it cannot be written.
        """
        self.held = lock.acquire(folder, self._token)

    def unlock(self) -> None:
        """Remove this job's lock, if it has one; any rank may do so when the job ends."""
        if folder := self.held.folder if self.held else self.watch.folder:
            lock.release(folder, self._token)

    def leave_mpi(self, exit_code: int) -> int:
        """Leave MPI together with all ranks; return the highest of their exit codes.

        A rank may then work on alone for as long as it likes, because no other rank waits for it.
        Comm: an all-gather of exit codes, then MPI_Finalize.
        """
        with self._failing:  # a failing thread never releases it, and ends this process
            pass
        if self.world is None:
            return exit_code
        exit_code = max(all_gather_objects(self._private, exit_code))
        world, self.world = self.world, None  # from here on, a Ctrl-C must not call MPI
        mpi.finalize(world)
        self.watch.end()
        return exit_code

    def finish(self, exit_code: int) -> int:
        """End regularly; return the exit code of the job. Comm: that of leave_mpi()."""
        exit_code = self.leave_mpi(exit_code)
        self.unlock()
        return exit_code

    def _place(self) -> str:
        """Return which process this is, and what it is doing."""
        here, job = f"host {os.uname().nodename} (pid {os.getpid()})", self.world or self.launcher
        if job.size > 1:
            here = f"rank {job.rank} of {job.size} on {here}"
        return ", ".join(filter(None, (here, self.where())))

    def fail(self, error: BaseException, thread: str = ""):
        """End the whole job because of `error`: one block on the console, one exit code.

        It never returns, and any thread may call it. Of the ranks that fail at the same time, one
        prints its block and aborts with its code (see `failure`); the others stay silent and adopt
        that code.
        """
        self._failing.acquire()  # never released: a second failing thread of this rank stops here
        code = errors.EXIT_INTERNAL
        try:
            code = self._tell(error, thread)
        finally:  # reporting may fail too, and even then no rank may be left waiting
            self._abort(code)

    def _tell(self, error: BaseException, thread: str) -> int:
        """Let one rank print the block of this failure; return the job's exit code."""
        everywhere = self.world is None and isinstance(error, UsageError)  # a wrong flag
        place = "" if everywhere else self._place()
        place += f", thread {thread}" if thread else ""
        code, block = failure.report(error, place, self.saved)
        speaks, turn = True, self.launcher.rank
        if everywhere or isinstance(error, Mismatch):  # the others say it, or need not
            speaks, turn = not (turn if everywhere else self.launcher.local_rank), 0
        elif self._token:
            speaks, turn = failure.is_first(self._token), self._host
        if speaks:
            time.sleep(failure.TURN_SECONDS * min(turn, failure.MOST_TURNS))
            # a blocked console must not keep the job alive
            later(ABORT_SECONDS, self._abort, code)
            failure.show(block)
        else:  # the reporting rank's abort also ends this process; if not, it ends itself
            time.sleep(ABORT_SECONDS + failure.TURN_SECONDS * failure.MOST_TURNS)
        return code

    def _abort(self, code: int):
        """Kill every rank or, if MPI cannot, at least this process."""
        failure.leave_code(os.environ, code)
        later(ABORT_SECONDS, os._exit, code)
        time.sleep(failure.FORWARD_SECONDS)
        if self.watch.folder is not None:
            with contextlib.suppress(OSError):  # the block has reported its content
                no_links.remove_tree(self.watch.folder, HANG)
        self.unlock()
        if self.unfinished is not None:
            shutil.rmtree(self.unfinished, ignore_errors=True)
        mpi.abort(self.world, self.launcher, os.environ, code)
        os._exit(code)


def tell_of_exit(tell: Callable[[], None]) -> None:
    """Call tell() if a library calls exit(), with which a launcher may report success.

    The C library then runs the functions that were registered for the end of this handle. Python
    itself unregisters this one before it ends the process.
    """
    library, handle, armed = ctypes.CDLL(None), ctypes.c_int(), [True]
    called = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: tell() if armed else None)
    library["__cxa_atexit"](called, None, ctypes.byref(handle))

    def disarm(_kept=called):
        armed.clear()
        library["__cxa_finalize"](ctypes.byref(handle))

    atexit.register(disarm)


def _main(main: Callable, argv: list[str], session: Session) -> int:
    """Run the command; ranks of which not all have rejected their flags leave with a table."""
    try:
        return main(argv, session)
    except UsageError as refused:
        if session.world is not None or session.launcher.size == 1 or not session.facts:
            raise

        def refuse(refused=refused):
            raise refused

        session.facts |= {consistency.REFUSED: "; ".join(refused.problems)}
        with contextlib.suppress(EnvironmentProblem):  # then the flags are the first problem
            session.start()
            session.agree(refuse)
        raise


def _run(main: Callable, argv: list[str], session: Session) -> int:
    try:
        try:
            exit_code = _main(main, argv, session)
        except AgreedError as agreed:
            [exit_code] = agreed.args
        except SystemExit as leaving:
            if session.world is not None:
                raise
            exit_code = leaving.code or errors.EXIT_OK
        sys.stdout.flush()
    except BrokenPipeError:  # mpipar schedule ... | head: the reader has left
        if session.world is not None and session.world.size > 1:
            raise
        os._exit(errors.EXIT_NO_READER)
    return session.finish(exit_code)


def guard(main: Callable, argv: list[str] | None = None):
    """Run main(argv, session) -> exit code as this process's whole life; never returns.

    Call it before NumPy is imported, because it sets the number of BLAS threads.
    """
    open_closed()
    os.environ.update(chosen := presets(os.environ, len(os.sched_getaffinity(0))))
    keep_heap()
    threading.stack_size(1 << 20)  # 8 MiB for each would count against --memory-limit
    # NumPy's: numbers that are not finite are found by our own checks, which name tensor and rank.
    warnings.filterwarnings("ignore", ".* encountered in ", RuntimeWarning)
    session = Session(read_launcher(os.environ), chosen)
    mpi.choose_library(session.launcher, os.environ, chosen)
    threading.excepthook = lambda failed: session.fail(failed.exc_value, failed.thread.name)
    try:
        if problems := limit_problems(session.launcher):
            raise EnvironmentProblem(problems)
        tell_of_exit(session.exited)
        name = session.launcher.name
        gone = EnvironmentProblem(f"{name} ended before its ranks (killed?), so they end too")
        listen(session.interrupt, (lambda: session.fail(gone)) if name else None)
        exit_code = _run(main, sys.argv[1:] if argv is None else argv, session)
    except BaseException as error:  # noqa: BLE001 - whatever it is, no rank may be left waiting
        session.fail(error)
    if exit_code:
        failure.leave_code(os.environ, exit_code)
    sys.exit(exit_code)
