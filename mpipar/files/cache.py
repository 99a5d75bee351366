"""The user's cache folder: what was found or compiled on this machine, and can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path | None:
    """Return the folder mpipar/NAME in XDG_CACHE_HOME or ~/.cache; None where it can't be written.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base) / "mpipar" / name
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the second: nobody says where the home is
        return None
    return folder if os.access(folder, os.W_OK) else None
