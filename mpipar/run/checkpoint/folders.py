"""Checkpoint folders of a run: how one is created, committed and deleted; on rank 0 only.

They are accessed without following links, see `mpipar.run.files.no_links`, and nothing but the
files of checkpoints is ever deleted in them.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from mpipar.errors import DataError
from mpipar.run.checkpoint.disk import sync_folder
from mpipar.run.checkpoint.manifest import (
    NAME,
    PIECES_FILE,
    STEP_FOLDER,
    committed_steps,
    step_folder_name,
)
from mpipar.run.files import no_links

PARTIAL = re.compile(rf"{STEP_FOLDER.pattern}\.partial-[0-9a-f]+")
TRASH = ".trash-"


def make_partial(folder: Path, step: int) -> Path:
    """Create the folder in which a step's checkpoint is written, and which no reader looks at.

    Raises OSError.
    """
    no_links.make_root(folder.parent)
    inside = no_links.folder(folder.parent, folder.name, make=True)
    sync_folder(folder.parent)
    partial = inside / f"{step_folder_name(step)}.partial-{secrets.token_hex(4)}"
    partial.mkdir()
    sync_folder(inside)
    return partial


def put_in_place(partial: Path, step: int) -> None:
    """Give a complete partial folder its final name, which is the commit. Raises OSError.

    The step may already exist: damaged, or from a run that has resumed from an earlier step again.
    There is always another checkpoint then, the one that this run started from.
    """
    folder = no_links.folder(partial.parents[1], partial.parent.name)
    final = folder / step_folder_name(step)
    if os.path.lexists(final):
        _rename_away(final)
    partial.rename(final)
    sync_folder(folder)


def rename_outdated(folder: Path, step: int, keep: int) -> list[Path]:
    """Rename what is not needed after the commit of `step`; return the new paths, for `delete`.

    Of the checkpoints before it, the newest keep - 1 stay (keep 0: all). Those of later steps go,
    since this run has replaced theirs, and so do folders left by killed runs. A failure is left for
    the next time.
    """
    with contextlib.suppress(OSError, DataError):
        inside = no_links.folder(folder.parent, folder.name)
        committed = committed_steps(folder)
        earlier = [path for number, path in committed if number < step]
        later = [path for number, path in committed if number > step]
        left = [path for path in inside.iterdir() if PARTIAL.fullmatch(path.name)]
        for path in left + later + (earlier[: max(0, len(earlier) - keep + 1)] if keep else []):
            _rename_away(path)
        return [path for path in inside.iterdir() if path.name.startswith(TRASH)]
    return []


def delete(paths: list[Path]) -> None:
    """Delete checkpoints that were renamed. This takes long, so it runs in a thread.

    A folder stays while something else is in it.
    """
    for path in paths:
        with contextlib.suppress(OSError):
            folder = no_links.folder(path.parents[1], f"{path.parent.name}/{path.name}")
            for file in folder.iterdir():
                if file.name == NAME or PIECES_FILE.fullmatch(file.name):
                    file.unlink()
            folder.rmdir()


def _rename_away(path: Path) -> None:
    """Rename a folder before it is deleted, so that half of it never has a checkpoint's name."""
    path.rename(path.with_name(f"{TRASH}{path.name}-{secrets.token_hex(4)}"))
