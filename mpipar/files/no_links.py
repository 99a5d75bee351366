"""Access to a run's files without following links.

A run folder may come from someone else. Every step from the folder, the *root*, down to a file
therefore starts from an open folder and follows no symbolic link. An existing file is opened for
writing only if it has one name, and a file or folder is used for writing only if it belongs to this
user or to the owner of the root. The root itself is what the user typed: links on the way to it are
followed. A new root is for this user alone.

Each function raises OSError, whose message says what is there instead.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK has no effect on a regular file; it opens a pipe without waiting for its other end.
SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFELY
KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def kind_of(mode: int) -> str:
    """Return what a file is if it is not a regular file, as text; else ""."""
    return KINDS.get(stat.S_IFMT(mode), "")


def make_root(root) -> None:
    """Create a root, for this user alone, and the folders above it, if it does not exist."""
    Path(root).parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # what is no folder is refused when it is opened
        Path(root).mkdir(mode=0o700)


@contextmanager
def folder(root, inside: str | os.PathLike = "", *, make: bool = False) -> Iterator[int]:
    """Yield the descriptor of the folder root/inside, each part of which must be a real folder.

    make: create what is missing below the root, and refuse folders of other users.
    """
    with ExitStack() as stack:
        descriptor = os.open(root, FOLDER)
        stack.callback(os.close, descriptor)
        owner = os.fstat(descriptor).st_uid
        for name in Path(inside).parts:
            with suppress(FileExistsError):
                if make:
                    os.mkdir(name, dir_fd=descriptor)
            descriptor = _open(name, FOLDER | os.O_NOFOLLOW, descriptor, owner if make else None)
            stack.callback(os.close, descriptor)
        yield descriptor


def opened(root, name: str, flags: int, *, make: bool = False) -> int:
    """Return the descriptor of the regular file root/name; the flags are those of os.open.

    make: create the folder that contains it.
    """
    inside, _, last = name.rpartition("/")
    with folder(root, inside, make=make) as parent:
        changes = flags & (os.O_WRONLY | os.O_RDWR) and not flags & os.O_EXCL
        owner = os.stat(root).st_uid if changes else None
        return _open(last, flags | SAFELY, parent, owner)


def create(root, name: str) -> BinaryIO:
    """Return a new binary file; FileExistsError if anything has that name."""
    return open(opened(root, name, NEW), "wb")


def append(root, name: str) -> BinaryIO:
    """Return the file for appending bytes, unbuffered; it can also be read."""
    return open(opened(root, name, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b", buffering=0)


def remove(root, name: str) -> None:
    """Remove a file, or a link itself, if it exists."""
    inside, _, last = name.rpartition("/")
    with suppress(FileNotFoundError), folder(root, inside) as parent:
        os.unlink(last, dir_fd=parent)


def remove_tree(root, name: str) -> None:
    """Remove a folder and all its contents, if it exists; refuse a link."""
    inside, _, last = name.rpartition("/")
    with suppress(FileNotFoundError), folder(root, inside) as parent:
        shutil.rmtree(last, dir_fd=parent)


def _open(name: str, flags: int, parent: int, root_owner: int | None) -> int:
    """Open a file or folder; the error says what is there instead.

    root_owner: for what will be written to, which others must not own. Root may write anywhere, and
    some file systems show all files as one user's, who then owns the root, too.
    """
    try:
        descriptor = os.open(name, flags, 0o666, dir_fd=parent)
    except OSError as error:
        with suppress(FileNotFoundError):
            _check_kind(name, os.lstat(name, dir_fd=parent).st_mode, flags)
        raise type(error)(error.errno, f"{name}: {error.strerror}") from None
    try:
        found = os.fstat(descriptor)
        _check_kind(name, found.st_mode, flags)
        user, owner = os.geteuid(), found.st_uid
        if root_owner is not None and user and owner not in (user, root_owner):
            why = f"belongs to another user (id {owner}, yours is {user})"
            raise PermissionError(errno.EPERM, f"{name} {why}; work on a copy of the folder")
        if root_owner is not None and stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
            why = f"has {found.st_nlink} names (hard links), so others would change with it"
            raise PermissionError(errno.EPERM, f"{name} {why}; put a copy in its place")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_kind(name: str, mode: int, flags: int) -> None:
    """Refuse what is not of the kind that is opened: a folder, or a regular file."""
    kind = kind_of(mode)
    if kind and not (flags & os.O_DIRECTORY and stat.S_ISDIR(mode)):
        why = f"is {kind}, which is not allowed in a run; move it away"
        raise PermissionError(errno.EPERM, f"{name} {why}")
