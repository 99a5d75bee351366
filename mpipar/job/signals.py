"""Signals: which ask a run to save or to stop at a step boundary, and which end the process.

| signal | before the loop of steps | in it | after it |
| --- | --- | --- | --- |
| SIGINT (Ctrl-C), SIGTERM | stop at once | finish the step, save, stop | stop at once |
| SIGUSR1 | save and stop after the first step | the same | stop at once |
| a second SIGINT | - | stop at once, without saving | - |
| SIGUSR2 | save after the first step | finish the step, save, go on | - |

A command without such a loop stops at once. SLURM sends SIGUSR1 before a job's time ends. A run
that still starts up then has to leave a checkpoint with which the job goes on.
"""

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SAVING = signal.SIGUSR2
LOOK_SECONDS = 1.0  # between two looks whether the parent process is still there


class Interruptible:
    """A process that signals stop. The subclass brings `fail(error)`, which ends it at once.

    speaks: whether this process, of all processes of its job, says that a request has come.
    stop_requested, save_requested: see stop_on_request(). Whoever saves clears save_requested.
    will_loop: whether stop_on_request() is still to come, so that SIGUSR1 can wait for it.
    """

    def __init__(self, speaks: bool = True):
        self.speaks = speaks
        self.stop_requested = self.save_requested = False
        self.will_loop = self._in_loop = self._impatient = False

    @contextlib.contextmanager
    def stop_on_request(self):
        """Inside, a signal only sets stop_requested or save_requested: the loop obeys at a step
        boundary.

        The ranks must agree on it there, because a signal may reach one rank, or each at another
        step. No timer ends a step or a save that takes long. A second Ctrl-C does.
        """
        self._in_loop, self.will_loop = True, False
        try:
            yield self
        finally:
            self._in_loop = False

    def interrupt(self, number: int) -> None:
        """What one signal does; runs in the signal thread, also while the rank waits in MPI."""
        if number == SAVING:
            self.save_requested = True
            return
        name = signal.Signals(number).name
        early = self.will_loop and number == signal.SIGUSR1
        if not self._in_loop and not early:
            self.fail(KeyboardInterrupt(f"interrupted ({name})"))
        if number == signal.SIGINT and self._impatient:
            self.fail(KeyboardInterrupt(f"interrupted twice ({name})"))
        self._impatient = self._impatient or number == signal.SIGINT
        if self.speaks and not self.stop_requested:
            # a thread of its own: a console that nobody reads must not stop the signals
            when = "the first step" if early else "this step; a second Ctrl-C stops at once"
            later(0, note, f"{name}: stops after {when}")
        self.stop_requested = True


def note(text: str) -> None:
    """Print a line on stderr, if anybody can read it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"mpipar: {text}\n")
        sys.stderr.flush()


def later(seconds: float, function: Callable, *arguments) -> None:
    """Call the function in a thread of its own when the seconds have passed."""
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()


def listen(interrupt: Callable[[int], None], orphaned: Callable[[], None] | None = None) -> None:
    """Call interrupt(number) for each signal, in a thread, because a Python handler waits until
    MPI returns.

    orphaned: called once when the parent process, the launcher's, has ended. A rank that computes
    would go on for ever: nobody but the parent ends it.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for number in (*STOPPING, SAVING):
        signal.signal(number, lambda number, frame: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    parent = os.getppid()

    def watch():
        while True:
            ready, _, _ = select.select([read_end], [], [], LOOK_SECONDS)
            for number in os.read(read_end, 64) if ready else b"":
                if number in (*STOPPING, SAVING):
                    interrupt(number)
            if orphaned is not None and os.getppid() != parent:
                orphaned()

    threading.Thread(target=watch, name="signals", daemon=True).start()
