"""Files that a view writes because somebody asked for them."""

from __future__ import annotations

from pathlib import Path

from mpipar.errors import OutputError


def write_text(path: Path, text: str) -> None:
    """Write a file as UTF-8; raises OutputError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; name another file") from None
