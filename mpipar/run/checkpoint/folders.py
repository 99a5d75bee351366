"""Checkpoints on disk: new files that are hashed while they are written, and their folders.

Folders are created, committed and deleted on rank 0 only. They are accessed without following
links, see `mpipar.run.files.no_links`, and nothing but the files of checkpoints is ever deleted in
them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from pathlib import Path

import numpy as np

from mpipar.errors import DataError
from mpipar.run.checkpoint.boxes import BLOCK_BYTES
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


def write_new(path: Path, chunks) -> tuple[int, str]:
    """Write a file that must not exist yet; return (bytes, SHA-256) of its intended content.

    path: of a file in a checkpoint folder in a run's `checkpoints`; none of the three may be a
    link. chunks: bytes and arrays. Each is hashed in memory before it is written, so that a disk
    that writes something else is detected. The file is on disk when this returns. Raises OSError.

    The kernel starts writing a block once it is told that its pages are no longer needed, so the
    disk writes one block while the next one is hashed.
    """
    digest, size, told = hashlib.sha256(), 0, 0
    run_folder = path.parents[2]
    file = no_links.opened(run_folder, str(path.relative_to(run_folder)), no_links.NEW)
    try:
        for chunk in chunks:
            data = memoryview(
                np.ascontiguousarray(chunk)  # a transposed view has other bytes
                if isinstance(chunk, np.ndarray)
                else chunk
            ).cast("B")
            digest.update(data)
            size += len(data)
            while data:
                data = data[os.write(file, data) :]
            if size - told >= BLOCK_BYTES and hasattr(os, "posix_fadvise"):  # not on every system
                os.posix_fadvise(file, told, size - told, os.POSIX_FADV_DONTNEED)
                told = size
        os.fsync(file)
    finally:
        os.close(file)
    return size, digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk; its files have their own fsync."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)


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
