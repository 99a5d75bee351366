"""Signals: which make a run save or stop at a step boundary, and which end the process.

| signal | before the loop of steps | in it | after it |
| --- | --- | --- | --- |
| SIGINT (Ctrl-C), SIGTERM, SIGHUP | stop at once | finish the step, save, stop | stop at once |
| SIGUSR1 | save and stop after the first step | the same | stop at once |
| a second SIGINT | - | stop at once, without saving | - |
| SIGUSR2 | save after the first step | finish the step, save, continue | - |

A command without such a loop stops at once. A SIGHUP that is ignored at the start stays ignored,
which is what nohup is for. SLURM sends SIGUSR1 before a job's time is up; a run that is still
starting then has to leave a checkpoint from which the job can resume.
"""

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable

from mpipar.job.streams import note

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SAVING = signal.SIGUSR2
ORPHANED = 0  # what the parent sends instead of a signal's number when the launcher has ended
MOST_BYTES = 64  # read from a pipe of signal numbers at a time
SAME_SECONDS = 0.2  # one Ctrl-C arrives twice: directly, and passed on by the parent


class Interruptible:
    """A process that signals can stop. Subclasses provide `fail(error)`, which ends it at once.

    speaks: whether this process, among all of its job, announces that a request has arrived.
    stop_requested, save_requested: see stop_on_request(). Whoever saves clears save_requested.
    will_loop: whether stop_on_request() is still to come, so that SIGUSR1 can wait for it.
    """

    def __init__(self, speaks: bool = True):
        self.speaks = speaks
        self.stop_requested = self.save_requested = False
        self.will_loop = self._in_loop = False
        self._ctrl_c: float | None = None  # when the first one came

    @contextlib.contextmanager
    def stop_on_request(self):
        """Turn signals into stop_requested or save_requested, which the loop obeys between steps.

        The ranks must agree there, because a signal may reach a single rank, or each in a different
        step. No timer cuts off a step or a save that takes long, but a second Ctrl-C does.
        """
        self._in_loop, self.will_loop = True, False
        try:
            yield self
        finally:
            self._in_loop = False

    def interrupt(self, number: int) -> None:
        """Act on one signal; runs in the signal thread, even while the rank waits in MPI."""
        if number == SAVING:
            self.save_requested = True
            return
        name = signal.Signals(number).name
        early = self.will_loop and number == signal.SIGUSR1
        if not self._in_loop and not early:
            self.fail(KeyboardInterrupt(f"interrupted ({name})"))
        if number == signal.SIGINT:
            now = time.monotonic()
            self._ctrl_c = now if self._ctrl_c is None else self._ctrl_c
            if now - self._ctrl_c > SAME_SECONDS:
                self.fail(KeyboardInterrupt(f"interrupted twice ({name})"))
        if self.speaks and not self.stop_requested:
            # in a thread of its own: a blocked console must not hold up the signals
            when = "the first step" if early else "this step; a second Ctrl-C stops at once"
            later(0, note, f"{name}: stops after {when}")
        self.stop_requested = True


def obeyed() -> set[int]:
    """Return the signals that this process handles."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return {*STOPPING, SAVING} - ({signal.SIGHUP} if nohup else set())


def numbers_of(signals: set[int]) -> int:
    """Return a descriptor that yields the number of each of these signals, one byte each.

    Blocked ones are unblocked. (`signal.sigtimedwait` would be shorter, but after the process was
    paused by SIGSTOP it may return a number that is no signal.)
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for number in signals:
        signal.signal(number, lambda number, frame: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    return read_end


def later(seconds: float, function: Callable, *arguments) -> None:
    """Call the function in a thread of its own after so many seconds."""
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()


def listen(
    interrupt: Callable[[int], None], line: socket.socket, orphaned: Callable[[], None]
) -> None:
    """Call interrupt(number) for each signal, from a thread of its own.

    A Python signal handler would have to wait until MPI returns. line: delivers the numbers of
    signals that reached the parent, and ORPHANED. orphaned: called for the latter, because a rank
    that computes would otherwise run forever.
    """
    numbers = obeyed()
    sources = numbers_of(numbers), line.fileno()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})

    def watch():
        while True:
            for source in select.select(sources, [], [])[0]:
                for number in os.read(source, MOST_BYTES):
                    if number == ORPHANED:
                        orphaned()
                    elif number in numbers:
                        interrupt(number)

    threading.Thread(target=watch, name="signals", daemon=True).start()
