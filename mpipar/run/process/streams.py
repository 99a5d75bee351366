"""Standard input, output and error that are closed, full, or no longer read."""

import contextlib
import os
import sys


def open_closed() -> None:
    """Open /dev/null for those of the three that are closed.

    Otherwise the next file to be opened would get one of their numbers, and with it their text.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (open for the process's lifetime)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def silence_output() -> None:
    """Redirect standard output, including what is still buffered, to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def above(stream):
    """Return a context in which a text of this stream goes above the progress line, if any."""
    # Only a line imports it; if a signal ends the process meanwhile, it is still empty.
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return tqdm.external_write_mode(file=stream) if tqdm else contextlib.nullcontext()


def note(text: str) -> None:
    """Print a line on stderr, if it can be written: an unreadable stderr is no reason to stop."""
    with contextlib.suppress(OSError, ValueError), above(sys.stderr):
        print(f"mpipar: {text}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a warning about something that does not stop the run."""
    note(f"warning: {text}")
