"""A bar that shows how far a long piece of work has come, where somebody looks at it."""

from __future__ import annotations

import sys
from time import monotonic

EVERY = 0.1  # seconds between two pictures
WIDTH = 30


class Bar:
    """A line on standard error that is drawn anew; nothing if that is no terminal."""

    def __init__(self):
        self.seen = sys.stderr is not None and sys.stderr.isatty()
        self.work, self.begun, self.drawn = "", 0.0, 0.0

    def __call__(self, work: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of this work are done."""
        if not self.seen:
            return
        now = monotonic()
        if work != self.work:
            self.clear()
            self.work, self.begun, self.drawn = work, now, 0.0
        if now - self.drawn < EVERY:
            return
        self.drawn = now
        share = done / total if total else 1.0
        full = int(share * WIDTH)
        rate = done / 1e6 / max(now - self.begun, 1e-3)
        self._write(f"\r{work}  [{'#' * full}{'.' * (WIDTH - full)}] {share:4.0%}"
                    f"  {rate:.1f} MB/s  ")

    def clear(self) -> None:
        """Leave an empty line for what is printed next."""
        if self.seen and self.drawn:
            self._write("\r\033[K")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:
            self.seen = False
