"""The user's cache folder: what was measured or compiled on this machine and can be redone."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path | None:
    """Return the folder mpipar/NAME in XDG_CACHE_HOME or ~/.cache; None if it can't be written."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base) / "mpipar" / name
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the home folder is unknown
        return None
    return folder if os.access(folder, os.W_OK) else None
