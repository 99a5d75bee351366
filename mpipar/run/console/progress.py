"""The progress line of a long operation: tqdm's on a terminal, elsewhere a line every ten seconds.

Both go to standard error. What else a process prints stands above the line, see `streams.above`.
"""

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress

SECONDS = 10.0  # between lines where standard error is no terminal
PATIENCE_SECONDS = 2.0  # what ends sooner, as most checkpoints do, gets no line


class Lines:
    """A stream that makes a line of its own of each text with which tqdm replaces its line."""

    def write(self, text: str) -> None:
        """Write the text to standard error, if that still has a reader."""
        if line := text.strip():
            with suppress(OSError, ValueError):
                print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Do nothing: each line is flushed."""


def is_terminal(stream) -> bool:
    """Return whether a stream is a terminal that can return to the start of a line."""
    return stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def progress(what: str, total: int | None, unit: str, **more):
    """Return a tqdm for a `with` block, which tells with update(n) that n more units are done.

    more: other options of tqdm.
    """
    from tqdm import tqdm  # takes 37 ms, which a run without a line need not spend

    tqdm.set_lock(threading.RLock())  # its own also locks other processes out
    tqdm.monitor_interval = 0  # no thread that looks at lines that do not move
    if not is_terminal(sys.stderr):
        more |= {"file": Lines(), "delay": SECONDS, "mininterval": SECONDS}
    return tqdm(
        desc=what, total=total, unit=unit, unit_scale=True, leave=False, dynamic_ncols=True, **more
    )


def watched(what: str, blocks: Iterable, total: int) -> Iterator:
    """Yield blocks of bytes or numbers; show a line once that takes long. total: their bytes."""
    with progress(what, total, "B", delay=PATIENCE_SECONDS) as line:
        for block in blocks:
            yield block
            line.update(getattr(block, "nbytes", None) or len(block))
