"""Standard input, output and error that are closed, full, or read by nobody any more."""

import contextlib
import os
import sys


def open_closed() -> None:
    """Give /dev/null to those of the three that are closed.

    Otherwise the next file to be opened would get the number of one of them, and its text.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (it lasts as long as the process)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def silence_output() -> None:
    """Send standard output to /dev/null, with what is waiting in memory for a place."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def warn(text: str) -> None:
    """Say on stderr what went wrong beside a run that goes on."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads it: no reason to stop either
        print(f"mpipar: warning: {text}", file=sys.stderr, flush=True)
