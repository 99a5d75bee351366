"""A bar that shows how far a long piece of work has come, where somebody looks at it."""

from __future__ import annotations

import sys
from time import monotonic

from mpipar.console.progress import StatusLine, is_terminal

WIDTH = 30


class Bar:
    """A status line on standard error; nothing if that is no terminal."""

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
        full = int(share * WIDTH)
        rate = done / 1e6 / max(now - self.begun, 1e-3)
        self.line.show(f"{work}  [{'#' * full}{'.' * (WIDTH - full)}] {share:4.0%}"
                       f"  {rate:.1f} MB/s")

    def clear(self) -> None:
        """Leave an empty line for what is printed next."""
        if self.line is not None:
            self.line.erase()
