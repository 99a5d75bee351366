"""Files that a view writes on request, and those that grow while a run goes on."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from mpipar.errors import OutputError
from mpipar.job.failure import DISK_ERRORS


def write_text(path: Path, text: str) -> None:
    """Write a file as UTF-8, whole or not at all; raises OutputError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if error.errno in DISK_ERRORS and path.is_file():  # a partial file is useless
            path.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror}; name another file") from None


def warn(text: str) -> None:
    """Say on stderr what went wrong beside a run that goes on."""
    with contextlib.suppress(OSError, ValueError):  # nobody reads it: no reason to stop either
        print(f"mpipar: warning: {text}", file=sys.stderr, flush=True)


class GrowingFile:
    """A text file that a run adds to. A disk that refuses a text never ends the run.

    What is refused stays in memory and is tried again with the next text. So the file is at any
    time a beginning of what was written, perhaps with a cut last line.
    """

    def __init__(self, path: Path):
        self.path, self.pending, self.warned = path, b"", False
        self.file = open(path, "ab", buffering=0)  # noqa: SIM115 (close() does)

    def write(self, text: str) -> None:
        """Add a text, now or later; a first refusal is reported."""
        self.pending += text.encode("utf-8")
        try:
            while self.pending:
                self.pending = self.pending[self.file.write(self.pending):]
        except OSError as error:
            self._refused(error)

    def sync(self) -> None:
        """Bring what is written to the disk."""
        try:
            os.fsync(self.file.fileno())
        except OSError as error:
            self._refused(error)

    def _refused(self, error: OSError) -> None:
        if not self.warned:
            warn(f"{self.path} can't be written: {error.strerror}; the run goes on")
        self.warned = True

    def close(self) -> None:
        """Try for the last time to write what was refused."""
        self.write("")
        self.file.close()
