"""The supervisor: the process that the launcher started only waits for its working child.

A process cannot report that a signal has killed it or that a library has ended it with exit code 0,
but its parent can. Whatever the launcher does to a job, such as killing it, reaches both. A parent
that outlives a child without last words has therefore seen the first failure of the job.
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

LOOK_SECONDS = 1.0  # between two checks that the launcher is still there
END = b"end"  # sent by the child: it has reported how it ends, or has nothing to report
DIES_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
KILLED = {  # signals with an external cause, and what to check
    signal.SIGKILL: "for example because memory or processor time (ulimit -t) ran out",
    signal.SIGBUS: "for example because /dev/shm or a disk is full",
    signal.SIGXCPU: "because of the limit on processor time (ulimit -t)",
}


def supervise(launcher: Launcher) -> socket.socket:
    """Fork; return in the child, with its line to the parent. The parent never returns.

    The line delivers the numbers of signals that reached the parent, and ORPHANED. Signals stay
    blocked in the child until `listen`. Raises EnvironmentProblem if the fork fails.
    """
    library = sys.modules.get("mpi4py.MPI")
    assert not (library and library.Is_initialized()), (
        "MPI was started before this process forked: a fork loses its threads, and MPI_Finalize"
        " would wait for them. Import mpi4py.MPI inside main"
    )
    upper, lower = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent, heard = os.getpid(), obeyed() | {signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    try:
        child = os.fork()
    except OSError as error:
        raise errors.EnvironmentProblem(
            f"no process can be started ({error.strerror}): check ulimit -u, and free memory"
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
            send(line, bytes(told))
        if launcher.name and os.getppid() != parent:
            send(line, bytes([ORPHANED]))


def send(line: socket.socket, message: bytes) -> None:
    """Send a message unless the other process is ending, or does not read."""
    with contextlib.suppress(OSError):
        line.send(message, socket.MSG_DONTWAIT)


def _end(child: int, code: int, line: socket.socket, launcher: Launcher) -> int:
    """Return the exit code of a child that has ended; end all ranks if it left no last word."""
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
    """Return the report for a process that ended without a word; code: see `os`."""
    exit_code, do = errors.EXIT_INTERNAL, "report this with the command line"
    if code >= 0:
        what = (
            f"the process ended with exit code {code} before its job had ended: a library"
            " called exit()"
        )
    else:
        what = f"the process was killed by signal {-code} ({signal.strsignal(-code)})"
        if -code in KILLED:
            exit_code, do = errors.EXIT_ENVIRONMENT, ""
            what += f", {KILLED[-code]}"
    place = failure.place(launcher.rank, launcher.size, child)
    return failure.Report(exit_code, (what,), place, do=do)
