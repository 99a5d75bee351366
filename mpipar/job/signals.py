"""Ctrl-C: when a signal asks the loop to stop at a step boundary, and when it ends the process."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable

STOP_SECONDS = 3.5  # a Ctrl-C ends the job within 5 s, whatever the ranks are doing


class Interruptible:
    """A process that SIGINT stops. The subclass brings `fail(error)`, which ends it at once.

    stop_requested, grace: see stop_on_request().
    """

    def __init__(self):
        self.stop_requested = False
        self.grace: float | None = None

    @contextlib.contextmanager
    def stop_on_request(self, grace: float = 0.0):
        """Inside, the first Ctrl-C only sets stop_requested: the loop ends at a step boundary.

        The ranks must agree on it there, because a signal may reach one rank, or each at another
        step. A process that has not ended max(STOP_SECONDS, grace) seconds later leaves at once
        with code 130. So does a process that gets a second Ctrl-C. A loop with longer steps may
        raise self.grace.
        """
        self.grace = max(STOP_SECONDS, grace)
        try:
            yield self
        finally:
            self.grace = None

    def interrupt(self) -> None:
        """What one SIGINT does; runs in the signal thread, also while the rank waits in MPI."""
        if self.grace is None or self.stop_requested:
            self.fail(KeyboardInterrupt("interrupted (SIGINT)"))
        self.stop_requested = True
        late = KeyboardInterrupt(f"interrupted (SIGINT), and not done {self.grace:g} s later")
        later(self.grace, self.fail, late)


def later(seconds: float, function: Callable, *arguments) -> None:
    """Call the function in a thread of its own when the seconds have passed."""
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()


def listen(interrupt: Callable[[], None]) -> None:
    """Call interrupt() for each SIGINT, in a thread, because a Python handler waits until MPI
    returns.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def watch():
        while True:
            for number in os.read(read_end, 64):
                if number == signal.SIGINT:
                    interrupt()

    threading.Thread(target=watch, name="signals", daemon=True).start()
