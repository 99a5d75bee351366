"""How a process of a job starts, stops and fails: nothing may hang, and every end has one meaning.

If one rank leaves with a plain exception, the others wait for it for ever. So guard() wraps the
whole command. Whatever goes wrong on any rank, in any thread, it ends every rank with one error
block and one exit code:

    guard -> Session.start (MPI) -> command -> Session.finish (all ranks together)
                 any failure -> Session.fail -> claim -> block -> Abort

All state is in the Session object, which the command gets as an argument.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mpipar import errors
from mpipar.errors import EnvironmentProblem, UsageError, UserError
from mpipar.job import alike, failure, lock, mpi, status
from mpipar.job.environment import (
    MPICH,
    Launcher,
    Mismatch,
    birthplace,
    check_alone,
    check_library,
    host_name,
    presets,
    read_launcher,
    scratch,
)
from mpipar.job.heap import keep_heap
from mpipar.job.siblings import watch_ends
from mpipar.job.signals import Interruptible, later, listen
from mpipar.job.streams import open_closed
from mpipar.job.watch import Watch

FORWARD_SECONDS = 0.3  # the launcher drops output that it has not forwarded when ranks abort
ABORT_SECONDS = 2.0  # how long one rank's abort may take before the others stop waiting for it


class AgreedError(Exception):
    """All ranks leave with this code, and one of them has printed why; only guard() catches it."""

    def __init__(self, exit_code: int):
        self.exit_code = exit_code
        super().__init__(f"all ranks leave with exit code {exit_code}")


class Session(Interruptible):
    """One process of a job.

    world: COMM_WORLD after start().
    host_ranks: world ranks on this host, ascending.
    host_rank: place of this process among them.
    facts: what must be the same on all ranks, as text by name; start() compares it. Empty for a
    command that needs no MPI.
    watch: notices that nothing happens any more, from start() to the end of finish().
    where: called when an error is reported; it says what the rank is doing, such as "step 17".
    take_over: whether lock() takes also a lock whose owner may still be there (--take-over).
    notes: lines for the log about earlier jobs in the run folder.
    status: this rank's file that says what it does, once there is a run folder.
    ending: what finish() closes, on this rank, before MPI ends.
    unfinished: a folder that is removed if the process ends at once, or None.
    presets: variables of the environment that guard() has set, because the user had not.
    saved: set to the folder of the final weights once they are written. A stop then loses nothing.
    """

    def __init__(self, launcher: Launcher):
        super().__init__(speaks=launcher.rank == 0)
        self.launcher = launcher
        self.world = None
        self.host_ranks, self.host_rank = (0,), 0
        self.facts: dict[str, str] = {}
        self.run_folder: Path | None = None
        self.where: Callable[[], str] = str
        self.unfinished: Path | None = None
        self.saved = ""
        self.take_over, self.notes, self.presets = False, [], {}
        self.status: status.Status | None = None
        self._leaving = self._killed = False
        self.ending = contextlib.ExitStack()
        self._private = None
        self._token, self._claim = "", failure.Claim()
        self._keeps = False  # whether the console has named a record in the temporary folder
        self._failing = threading.Lock()
        # Where ranks of this host find each other until they have a run folder.
        self._name = f"{os.getuid()}-{birthplace(launcher)}"
        size = launcher.size if launcher.size == launcher.local_size else 0
        self.watch = Watch(scratch(self._name, "hang"), range(size), self.doing, self.fail)

    def start(self):
        """Start MPI, compare the facts of all ranks, and return COMM_WORLD. Once is enough.

        Raises EnvironmentProblem if the ranks are not one job; they leave together if they differ.
        Comm: a broadcast, an all-gather over the ranks of a host, and that of compare().
        """
        if self.world is not None:
            return self.world
        self.watch.start(self.launcher.rank)
        MPI = mpi.load()
        check_library(self.launcher, MPI.Get_library_version())
        mpi.initialize(MPI)
        check_alone(self.launcher, MPI.COMM_WORLD.Get_size(), MPI.Get_library_version())
        self.world = MPI.COMM_WORLD
        # a communicator of its own: agree() and finish() must never match the command's messages
        self._private = self.world.Dup()
        token = bytearray(os.urandom(8))
        self._private.Bcast(token, root=0)
        self._token = self._name = token.hex()
        own = self.world.Get_rank()
        others = mpi.host_processes(self._private, own, self._claim.open())
        self.host_ranks = tuple(sorted(others))
        self.host_rank = self.host_ranks.index(own)
        self._claim.share(*others[self.host_ranks[0]])
        del others[own]
        watch_ends(others, self.sibling_ended)
        if self.host_rank == 0:
            mpi.forget_shared_memory()
        self.watch.folder, self.watch.ranks = scratch(self._name, "hang"), self.host_ranks
        if self.facts:
            self.compare(self.facts)
        return self.world

    def doing(self) -> str:
        """What the command says that this rank is doing, such as "step 17"."""
        return self.where()

    def use_folder(self, folder: Path) -> None:
        """From now on ranks write states and errors into the run folder, which all hosts share.

        All ranks leave together if some host does not see the folder or cannot write into it.
        Comm: three all-gathers of a byte per rank.
        """
        rank, host = self.world.Get_rank(), host_name(os.environ)
        if rank == 0:
            self.ending.callback(status.close_folder, folder)
        self.notes += self.agree(
            lambda: status.open_folder(folder, self._token) if rank == 0 else [])
        self.agree(lambda: status.check_shared(folder, self._token, host))
        self.status = self.agree(lambda: status.Status(folder, rank, host))
        self.ending.callback(self.status.close)
        self.run_folder = folder
        self.watch.folder, self.watch.ranks = folder / "hang", range(self.world.Get_size())

    def sibling_ended(self, rank: int) -> None:
        """End the job because another rank of this host has ended without a word; in a thread.

        A process that was asked to stop says nothing: the launcher is ending all ranks. Nor does
        one whose job another rank is ending.
        """
        if self._leaving or self.stop_requested or self._claim.is_taken(self._error_folders()):
            return
        self._killed = True
        if self.status is not None:
            self.status.lost(rank)
        self.fail(EnvironmentProblem(
            f"the process of rank {rank} on this host has ended without a word: killed by a signal,"
            " for example because memory was short"))

    def compare(self, facts: Mapping[str, str]) -> None:
        """Return if all ranks have the same facts; else world rank 0 shows the table, and they
        leave together.

        Comm: two small all-gathers, and those of all facts if they differ.
        """
        digest = hashlib.sha256(json.dumps(facts).encode()).digest()
        if len(set(mpi.gather_bytes(self._private, digest))) == 1:
            return
        everybody = mpi.gather_facts(self._private, facts)
        if self.world.Get_rank() == 0:
            problem = EnvironmentProblem(["the ranks of this job differ, and must not:",
                                          *alike.differences(everybody)])
            failure.show(failure.error_report(problem, ""))
        raise AgreedError(errors.EXIT_ENVIRONMENT)

    def refuse(self, error: UsageError):
        """End all ranks because of flags that this rank refused before it started MPI.

        If the others have understood theirs, the table of what differs says so.
        Comm: that of start(), and one all-gather.
        """
        self.facts |= {alike.REFUSED: "; ".join(error.problems)}
        try:
            self.start()
        except EnvironmentProblem:
            raise error from None
        self.agree(lambda: raised(error))

    def agree(self, function: Callable):
        """Run function() on every rank and return its result, or leave together if it fails.

        The lowest rank on which it raised UserError prints the error. Every rank then ends with its
        code, without an abort.
        Comm: one all-gather of a byte per rank; every rank must call it.
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
            failure.show(failure.error_report(error, "" if everywhere else self._place()))
        raise AgreedError(codes[failing[0]])

    def _gather_code(self, code: int) -> bytearray:
        codes = bytearray(self._private.Get_size())
        self._private.Allgather(bytes([code]), codes)
        return codes

    def lock(self, folder: Path) -> None:
        """Lock the run folder until this job ends. Only world rank 0 calls it.

        Raises UsageError if another job has it, and OSError if the lock cannot be written.
        """
        held = lock.acquire(folder, self._token, self.take_over)
        self.notes += filter(None, [held.note])
        self.ending.callback(held.release)

    def finish(self, exit_code: int) -> int:
        """The regular end, reached by all ranks together; returns the highest of their codes.

        Comm: one all-gather of a byte per rank, then MPI_Finalize.
        """
        with self._failing:  # a thread that fails never gives it back, and ends this process
            pass
        if self.world is None:
            return exit_code
        self._leaving = True  # before any rank can end
        exit_code = max(self._gather_code(exit_code))
        self.ending.close()
        self._private.Free()
        self.world = None  # a Ctrl-C from here on must ask MPI nothing
        mpi.finalize(mpi.load())
        self.watch.end()
        return exit_code

    def orphaned(self) -> None:
        """End this rank because the process that started it is gone; see `listen`."""
        self.fail(EnvironmentProblem(
            f"{self.launcher.name} has ended without its ranks (killed?); they end too"))

    def _place(self) -> str:
        here = f"host {os.uname().nodename} (pid {os.getpid()})"
        rank, size = self.launcher.rank, self.launcher.size
        if self.world is not None:
            rank, size = self.world.Get_rank(), self.world.Get_size()
        if self.world is not None or size > 1:
            here = f"rank {rank} of {size} on {here}"
        return ", ".join(filter(None, (here, self.doing())))

    def fail(self, error: BaseException, thread: str = ""):
        """End the whole job because of `error`: one block on the console, one exit code. Never
        returns.

        Any thread may call it. Ranks that fail at the same time race for one file. The first prints
        its block and aborts with its code. The others are silent and take over that code. On
        several hosts, before the run folder is known, there is one such file for each host.
        """
        self._failing.acquire()  # never released: a second failing thread of this rank stops here
        code = errors.EXIT_INTERNAL
        try:
            if self._others_may_wait_in_init(error):
                self.start()
            code = self._tell(error, thread)
        finally:  # telling may fail too, and even then no rank may be left waiting
            self._abort(code)

    def _tell(self, error: BaseException, thread: str) -> int:
        """Let one rank print the block of this failure; returns the job's exit code."""
        starting = self.world is None
        # before MPI, a flag is wrong on every rank
        place = "" if starting and isinstance(error, UsageError) else self._place()
        place += f", thread {thread}" if thread else ""
        found = failure.error_report(error, place, self.saved)
        code, record = found.exit_code, None
        if starting and (isinstance(error, UsageError) or self.launcher.size == 1):
            speaks = self.launcher.rank == 0
        elif isinstance(error, Mismatch):
            speaks = self.launcher.local_rank == 0
        else:
            number = self.launcher.rank if starting else self.world.Get_rank()
            code, speaks, record = self._claim.take(self._error_folders(), number, found)
        if speaks:
            # a console that nobody reads must not keep the job alive
            later(ABORT_SECONDS, self._abort, code)
            self._keeps = bool(found.trace) and record is not None
            failure.show(found, record if self.run_folder or self._keeps else None)
            if self.run_folder and not self._killed:
                status.forget(self.run_folder)
        else:  # the speaker's end also ends this process; if not, it ends by itself
            time.sleep(ABORT_SECONDS)
        return code

    def _others_may_wait_in_init(self, error: BaseException) -> bool:
        """Whether a defect before MPI on one rank leaves the others waiting in MPI_Init.

        Launchers let them wait there. So this rank starts MPI and aborts from within, unless it can
        ask the launcher. A mistake of the user comes alike to all ranks.
        """
        return (self.world is None and self.launcher.size > 1 and self.launcher.name != MPICH
                and not isinstance(error, UserError | KeyboardInterrupt)
                and threading.current_thread() is threading.main_thread())

    def _error_folders(self) -> list[Path]:
        own = [self.run_folder / "errors"] if self.run_folder else []
        return [*own, scratch(self._name, "errors")]

    def _abort(self, code: int):
        """Kill every rank or, if MPI cannot, at least this process."""
        if not self._killed:  # what each rank did tells the next start who was killed
            with contextlib.suppress(OSError):
                self.ending.close()
        leave_code(os.environ, code)
        later(ABORT_SECONDS, os._exit, code)
        time.sleep(FORWARD_SECONDS)
        shutil.rmtree(self.watch.folder, ignore_errors=True)  # the block has said what is in it
        if self.unfinished is not None:
            shutil.rmtree(self.unfinished, ignore_errors=True)
        if not self._keeps:
            shutil.rmtree(scratch(self._name, "errors"), ignore_errors=True)
        if self.world is None:
            if self.launcher.size > 1:
                mpi.abort_before_start(self.launcher, os.environ, code)
        elif self.launcher.name or self.world.Get_size() > 1:
            self.world.Abort(code)
        os._exit(code)


def leave_code(environ: Mapping[str, str], code: int) -> None:
    """Write the job's exit code to the file that MPIPAR_EXIT_FILE names; the first rank wins.

    srun itself answers with the highest code of all ranks, 128 + signal for those that it killed.
    slurm/train.sbatch reads the file, to end with the code of the failure instead.
    """
    if path := environ.get("MPIPAR_EXIT_FILE"):
        with contextlib.suppress(OSError), open(path, "x") as file:
            file.write(f"{code}\n")


def raised(error: BaseException):
    """Raise an error, where only an expression can stand."""
    raise error


def _run(main: Callable, argv: list[str], session: Session) -> int:
    try:
        try:
            exit_code = main(argv, session)
        except UsageError as error:
            if session.world is not None or session.launcher.size == 1 or not session.facts:
                raise
            exit_code = session.refuse(error)
        sys.stdout.flush()
    except BrokenPipeError:
        if session.world is not None:
            raise
        os._exit(errors.EXIT_OUTPUT)  # mpipar schedule ... | head: nobody wants to hear more
    except AgreedError as agreed:
        exit_code = agreed.exit_code
    except SystemExit as leaving:
        if session.world is not None:
            raise
        exit_code = leaving.code or errors.EXIT_OK
    return session.finish(exit_code)


def guard(main: Callable, argv: list[str] | None = None):
    """Run main(argv, session) -> exit code as this process's whole life; does not return.

    Call it before NumPy is imported, because it sets the number of BLAS threads.
    """
    open_closed()
    os.environ.update(chosen := presets(os.environ, len(os.sched_getaffinity(0))))
    keep_heap()
    threading.stack_size(1 << 20)  # 8 MiB for each would count against --memory-limit
    session = Session(read_launcher(os.environ))
    session.presets = chosen
    threading.excepthook = lambda failed: session.fail(failed.exc_value, failed.thread.name)
    listen(session.interrupt, session.orphaned if session.launcher.name else None)
    try:
        exit_code = _run(main, sys.argv[1:] if argv is None else argv, session)
    except BaseException as error:  # noqa: BLE001 - whatever it is, no rank may be left waiting
        session.fail(error)
    if exit_code:
        leave_code(os.environ, exit_code)
    sys.exit(exit_code)
