"""Opens files of a run without following links: a run folder may come from someone else.

No part of a path below the run folder, the *root*, may be a link. Links on the way to it are
followed, since the user typed it. A new root is for this user alone, so nobody else changes what
was looked at.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

# O_NONBLOCK has no effect on a regular file; it opens a pipe without waiting for its other end.
SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL


def make_root(root) -> None:
    """Create a root, for this user alone, and the folders above it, if it does not exist."""
    Path(root).parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # what is no folder is refused when it is used
        Path(root).mkdir(mode=0o700)


def folder(root, inside: str | os.PathLike = "", *, make: bool = False) -> Path:
    """Return the folder root/inside; OSError if a part of it below the root is a link.

    make: create what is missing below the root.
    """
    path = Path(root)
    for name in Path(inside).parts:
        path /= name
        if make:
            path.mkdir(exist_ok=True)
        if path.is_symlink():
            raise _strange(name)
    return path


def opened(root, name: str, flags: int) -> int:
    """Return the descriptor of the regular file root/name; the flags are those of os.open."""
    path = _inside(root, name)
    try:
        descriptor = os.open(path, flags | SAFELY, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _strange(path.name) from None
        named = f"{path.name}: " if flags & os.O_CREAT else ""  # a reader says the whole path
        raise type(error)(error.errno, f"{named}{error.strerror}") from None
    found = os.fstat(descriptor)
    alone = found.st_nlink == 1 or not flags & (os.O_WRONLY | os.O_RDWR)
    if stat.S_ISREG(found.st_mode) and alone:  # what has more names would change with it
        return descriptor
    os.close(descriptor)
    raise _strange(path.name)


def create(root, name: str) -> BinaryIO:
    """Return a new binary file; FileExistsError if anything has that name."""
    return open(opened(root, name, NEW), "wb")


def append(root, name: str) -> BinaryIO:
    """Return the file for appending bytes, unbuffered; it can also be read."""
    return open(opened(root, name, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b", buffering=0)


def remove(root, name: str) -> None:
    """Remove a file, or a link itself, if it exists."""
    _inside(root, name).unlink(missing_ok=True)


def remove_tree(root, name: str) -> None:
    """Remove a folder and all its contents, if it exists; refuse a link."""
    with suppress(FileNotFoundError):
        shutil.rmtree(_inside(root, name))


def _inside(root, name: str) -> Path:
    above, last = os.path.split(name)
    return folder(root, above) / last


def _strange(name: str) -> OSError:
    why = "is a link, or another kind of file than a run has; move it away"
    return PermissionError(errno.EPERM, f"{name} {why}")
