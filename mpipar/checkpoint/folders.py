"""The folders of a run's checkpoints: how one begins, is committed, and goes. Rank 0 alone."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path

from mpipar.checkpoint.disk import sync_folder
from mpipar.checkpoint.manifest import committed_steps, read_manifest, step_folder_name
from mpipar.errors import DataError

PARTIAL, TRASH = ".partial-", ".trash-"


def make_partial(folder: Path, step: int) -> Path:
    """Make the folder in which a step's checkpoint is written, and which no reader looks at.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sync_folder(folder.parent)
    partial = folder / f"{step_folder_name(step)}{PARTIAL}{secrets.token_hex(4)}"
    os.mkdir(partial)
    sync_folder(folder)
    return partial


def put_in_place(partial: Path, step: int) -> None:
    """Give a complete partial folder its name: the commit. Raises OSError.

    A step can be there already: damaged, or of a run that went on from an earlier step again.
    There is always another checkpoint then, the one that this run has started from. If it is this
    very state, nothing needs to change.
    """
    folder, place = partial.parent, partial.parent / step_folder_name(step)
    if place.exists():
        with contextlib.suppress(DataError):
            if read_manifest(place) == read_manifest(partial):
                shutil.rmtree(partial)
                return
        _to_trash(place)
    os.rename(partial, place)
    sync_folder(folder)


def set_aside(folder: Path, step: int, keep: int) -> list[Path]:
    """Rename what is not needed after the commit of `step`; the new paths, for `delete`.

    Of the checkpoints before it the newest keep - 1 stay (keep 0: all). Those of later steps belong
    to a run that this one has replaced. Folders that killed runs have left go too. A failure is
    left for the next time.
    """
    with contextlib.suppress(OSError):
        committed = committed_steps(folder)
        earlier = [path for number, path in committed if number < step]
        later = [path for number, path in committed if number > step]
        left = [path for path in folder.iterdir() if PARTIAL in path.name
                and not path.name.startswith(TRASH)]
        for path in left + later + (earlier[:max(0, len(earlier) - keep + 1)] if keep else []):
            _to_trash(path)
        return [path for path in folder.iterdir() if path.name.startswith(TRASH)]
    return []


def delete(paths: list[Path]) -> None:
    """Delete folders that have been set aside. It takes long, so a thread does it."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def _to_trash(path: Path) -> None:
    """Rename a folder before it is deleted: half of it never has the name of a checkpoint."""
    os.rename(path, path.with_name(f"{TRASH}{path.name}-{secrets.token_hex(4)}"))
