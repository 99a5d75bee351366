"""Files that a view writes on request."""

from __future__ import annotations

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
