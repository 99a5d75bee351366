"""A terminal's status line, which shows the newest step and is overwritten by the next; a bar.

Everything else that this process prints, on both streams and in any thread, appears above it.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from contextlib import contextmanager, suppress
from time import monotonic

ERASE = "\r\x1b[K"  # back to the start of the line, and clear it
EVERY_SECONDS = 0.1  # faster than anyone reads
PATIENCE_SECONDS = 1.0  # how long a text waits for one that a stopped terminal does not accept
WIDTH = 80  # columns of a stream that reports none
BAR = 30  # characters


class StatusLine:
    """The line at the bottom of a stream's terminal."""

    def __init__(self, stream):
        self.stream, self.shown, self.inside = stream, False, False
        self.next, self.lock = 0.0, threading.Lock()

    @contextmanager
    def alone(self):
        """Keep other threads from writing inside the block."""
        got = self.lock.acquire(timeout=PATIENCE_SECONDS)
        try:
            yield
        finally:
            if got:
                self.lock.release()

    def show(self, text: str) -> None:
        """Replace the line, cut to the terminal's width, unless that was just done."""
        if monotonic() < self.next:
            return
        self.next = monotonic() + EVERY_SECONDS
        with self.alone():
            if self.inside:  # an unfinished line of text
                return
            try:
                self.stream.write(ERASE + text[: width(self.stream) - 1])
                self.stream.flush()
                self.shown = True
            except OSError:  # no reader; the next text in the log reports it
                self.next = math.inf

    def erase(self) -> None:
        """Clear the line, if it is shown."""
        if self.shown:
            with suppress(OSError):
                self.stream.write(ERASE)
                self.stream.flush()
            self.shown = False


class Above:
    """A stream whose texts appear above a status line."""

    def __init__(self, stream, line: StatusLine):
        self.stream, self.line = stream, line

    def write(self, text: str) -> int:
        """Write the text in place of the line; the next step shows the line again."""
        with self.line.alone():
            self.line.erase()
            self.line.inside = not text.endswith("\n")
            return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def width(stream) -> int:
    """Return the columns of a stream's terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except (OSError, ValueError):
        return WIDTH


def is_terminal(stream) -> bool:
    """Return whether a stream is a terminal that can return to the start of a line."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


@contextmanager
def status_line(wanted: str | None):
    """Yield a StatusLine on standard output for the block, or None if output is plain.

    wanted: line or plain; None uses the status line on a terminal.
    """
    if wanted == "plain" or (wanted is None and not is_terminal(sys.stdout)):
        yield None
        return
    line, before = StatusLine(sys.stdout), (sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = (Above(stream, line) for stream in before)
    try:
        yield line
    finally:
        sys.stdout, sys.stderr = before
        line.erase()


class Bar:
    """A progress bar for long work, on standard error; nothing if that is not a terminal."""

    def __init__(self):
        seen = sys.stderr is not None and is_terminal(sys.stderr)
        self.line = StatusLine(sys.stderr) if seen else None
        self.work, self.begun = "", 0.0

    def __call__(self, work: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of this work are done."""
        if self.line is None:
            return
        now = monotonic()
        if work != self.work:
            self.work, self.begun = work, now
        share = done / total if total else 1.0
        full = int(share * BAR)
        rate = done / 1e6 / max(now - self.begun, 1e-3)
        self.line.show(f"{work}  [{'#' * full}{'.' * (BAR - full)}] {share:4.0%}  {rate:.1f} MB/s")

    def clear(self) -> None:
        """Leave an empty line for what is printed next."""
        if self.line is not None:
            self.line.erase()
