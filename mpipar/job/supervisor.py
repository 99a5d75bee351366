"""The process that the launcher has started only waits for its child, which does all of the work.

A process cannot say itself that a signal has killed it, or that a library has ended it with exit
code 0. Its parent can. What the launcher does to a job, for example to kill it, reaches both. So a
parent that outlives a child without a last word has seen the first failure of the job.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time

from mpipar import errors
from mpipar.job import failure, mpi, status
from mpipar.job.environment import Launcher
from mpipar.job.signals import MOST_BYTES, ORPHANED, numbers_of, obeyed

LOOK_SECONDS = 1.0  # between two looks whether the launcher is still there
END = b"end"  # sent by the child: it has told how it ends, or has nothing to tell
DIES_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
KILLED = {  # signals that come from the surroundings, and what to look at
    signal.SIGKILL: "for example because memory was short or its processor time over (ulimit -t)",
    signal.SIGBUS: "for example because /dev/shm or a disk is full",
    signal.SIGXCPU: "because of a limit of processor time (ulimit -t)",
}


def supervise(launcher: Launcher) -> socket.socket:
    """Return in the child, with its line to the parent. The parent never returns.

    The line brings the numbers of signals that reached the parent, and ORPHANED. Signals stay
    blocked in the child until `listen`. Raises EnvironmentProblem if there can be no child.
    """
    library = sys.modules.get("mpi4py.MPI")
    assert not (library and library.Is_initialized()), (
        "MPI has started before the process that waits for this one: a fork loses its threads, and"
        " MPI_Finalize would wait for them. Import mpi4py.MPI inside main")
    upper, lower = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent, heard = os.getpid(), obeyed() | {signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    try:
        child = os.fork()
    except OSError as error:
        raise errors.EnvironmentProblem(
            f"no process can be started ({error.strerror}): see ulimit -u, and free memory"
        ) from None
    if child:
        lower.close()
        os._exit(_wait(child, upper, heard, launcher))
    upper.close()
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(errors.EXIT_INTERNAL)
    return lower


def _wait(child: int, line: socket.socket, heard: set[int], launcher: Launcher) -> int:
    """Pass on signals until the child ends; return the exit code."""
    parent, numbers = os.getppid(), numbers_of(heard)
    while True:
        ready, _, _ = select.select([numbers], [], [], LOOK_SECONDS)
        came = {*os.read(numbers, MOST_BYTES)} if ready else set()
        ended, found = os.waitpid(child, os.WNOHANG)
        if ended:
            return _end(child, os.waitstatus_to_exitcode(found), line, launcher)
        if told := came - {signal.SIGCHLD}:
            _send(line, bytes(told))
        if launcher.name and os.getppid() != parent:
            _send(line, bytes([ORPHANED]))


def _send(line: socket.socket, message: bytes) -> None:
    with contextlib.suppress(OSError):  # the child is just ending, or reads nothing
        line.send(message, socket.MSG_DONTWAIT)


def _end(child: int, code: int, line: socket.socket, launcher: Launcher) -> int:
    """The exit code of a child that has ended; without its last word all ranks of the job end."""
    told = []
    with contextlib.suppress(OSError):
        while message := line.recv(1 << 16, socket.MSG_DONTWAIT):
            told.append(message)
    if END in told:
        return code if code >= 0 else 128 - code
    for path in told:
        status.lost(os.fsdecode(path), launcher.rank)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher ends the job
    failure.wait_for_turn(launcher.rank)
    found = last_words(child, code, launcher)
    failure.show(found)
    failure.leave_code(os.environ, found.exit_code)
    time.sleep(failure.FORWARD_SECONDS)
    mpi.abort_before_start(launcher, os.environ, found.exit_code)
    return found.exit_code


def last_words(child: int, code: int, launcher: Launcher) -> failure.Report:
    """Return what there is to say of a process that has ended without a word; code: see `os`."""
    exit_code, do = errors.EXIT_INTERNAL, "report this with the command line"
    if code >= 0:
        what = (f"the process has ended with exit code {code} before its job had ended: a library"
                " called exit()")
    else:
        what = f"the process was killed by signal {-code} ({signal.strsignal(-code)})"
        if -code in KILLED:
            exit_code, do = errors.EXIT_ENVIRONMENT, ""
            what += f", {KILLED[-code]}"
    return failure.Report(exit_code, (what,), failure.place(launcher.rank, launcher.size, child),
                          "", do, "")
