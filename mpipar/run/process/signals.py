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
import threading
import time
from collections.abc import Callable

from mpipar.run.process.streams import note

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SAVING = signal.SIGUSR2
LOOK_SECONDS = 1.0  # between two checks that the launcher is still there
MOST_BYTES = 64  # read from a pipe of signal numbers at a time
SAME_SECONDS = 0.2  # one Ctrl-C arrives twice: directly, and passed on by the launcher


class Interruptible:
    """A process that signals can stop. Subclasses provide `fail(error)`, which ends it at once.

    speaks: whether this process, among all of its job, announces that a request has arrived.
    stop_requested, save_requested: see stop_on_request(). Whoever saves clears save_requested.
    will_loop: whether stop_on_request() is still to come, so that SIGUSR1 can wait for it.
    """

    speaks = True
    stop_requested = save_requested = will_loop = _in_loop = False
    _obeys_after = ""
    _ctrl_c: float | None = None  # when the first one came

    @contextlib.contextmanager
    def stop_on_request(self, at: str = "this step (islands: when they meet next)"):
        """Turn signals into stop_requested or save_requested, which the loop obeys between steps.

        The ranks must agree there, because a signal may reach a single rank, or each in a different
        step. No timer cuts off a step or a save that takes long, but a second Ctrl-C does. at: what
        the loop finishes before it obeys, for the user.
        """
        self._in_loop, self.will_loop, self._obeys_after = True, False, at
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
            again = f"{self._obeys_after}; a second Ctrl-C stops at once"
            later(0, note, f"{name}: stops after {'the first step' if early else again}")
        self.stop_requested = True


def obeyed() -> set[int]:
    """Return the signals that this process handles."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return {*STOPPING, SAVING} - ({signal.SIGHUP} if nohup else set())


def later(seconds: float, function: Callable, *arguments) -> None:
    """Call the function in a thread of its own after so many seconds."""
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # the limit of threads: then this is what is reported
        timer.start()


def listen(interrupt: Callable[[int], None], orphaned: Callable[[], None] | None = None) -> None:
    """Call interrupt(number) for each signal, from a thread of its own.

    A Python signal handler would have to wait until MPI returns. orphaned: called once the process
    that started this one, the launcher's, is gone; a rank that computes would otherwise run
    forever. (`signal.sigtimedwait` would be shorter, but after SIGSTOP and SIGCONT it may return a
    number that is no signal.)
    """
    numbers, parent = obeyed(), os.getppid()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for number in numbers:
        signal.signal(number, lambda number, frame: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def watch():
        while True:
            if select.select([read_end], [], [], LOOK_SECONDS)[0]:
                for number in os.read(read_end, MOST_BYTES):
                    if number in numbers:
                        interrupt(number)
            if orphaned is not None and os.getppid() != parent:
                orphaned()

    threading.Thread(target=watch, name="signals", daemon=True).start()
