"""Standard input, output and error that are closed, full, or no longer read."""

import contextlib
import os
import sys


def open_closed() -> None:
    """Open /dev/null for those of the three that are closed.

    Otherwise the next file to be opened would get one of their numbers, and with it their text.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # it is the lowest that was free
    os.close(number)
    for number, name in enumerate(("stdout", "stderr"), 1):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 (for the lifetime)


def silence_output() -> None:
    """Redirect standard output, including what is still buffered, to /dev/null."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
