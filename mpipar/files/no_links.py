"""Access to a run's files without following links: regular files that belong to this user.

Another user may have created the folder, or may be able to write to it. Every step from the folder,
the *root*, down to a file therefore starts from an open folder and follows no symbolic link. An
existing file is opened for writing only if it belongs to this user and has no other hard link. The
root itself is what the user typed: links on the way to it are followed.

Each function raises OSError, whose message says what is there instead.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK has no effect on a regular file; it opens a pipe without waiting for its other end.
SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | SAFELY
KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def kind_of(mode: int) -> str:
    """Return what a file is if it is not a regular file, as text; else ""."""
    return next((text for check, text in KINDS if check(mode)), "")


@contextmanager
def folder(root, inside: str | os.PathLike = "", *, make: bool = False) -> Iterator[int]:
    """Yield the descriptor of the folder root/inside, each part of which must be a real folder.

    make: create what is missing below the root, and refuse folders of other users.
    """
    descriptor = os.open(root, FOLDER)
    try:
        for name in Path(inside).parts:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=descriptor)
            try:
                deeper = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError as error:
                raise _in_words(error, name, descriptor) from None
            os.close(descriptor)
            descriptor = deeper
            if make:
                _check_owner(os.fstat(descriptor), name, descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def make_root(root) -> None:
    """Create a root, and the folders above it, if it does not exist."""
    if not os.path.exists(root):
        os.makedirs(root)


def opened(root, name: str, flags: int, *, make: bool = False) -> int:
    """Return the descriptor of the regular file root/name; the flags are those of os.open.

    make: create the folder that contains it.
    """
    inside, _, last = name.rpartition("/")
    with folder(root, inside, make=make) as parent:
        try:
            descriptor = os.open(last, flags | SAFELY, 0o666, dir_fd=parent)
        except OSError as error:
            raise _in_words(error, last, parent) from None
        try:
            status = os.fstat(descriptor)
            if kind := kind_of(status.st_mode):
                raise _refusal(last, kind)
            if flags & (os.O_WRONLY | os.O_RDWR) and not flags & os.O_EXCL:
                _check_owner(status, last, parent)
                if status.st_nlink > 1:
                    raise OSError(
                        errno.EPERM,
                        f"{last} has {status.st_nlink} names (hard links),"
                        " so others would change with it; put a copy in its place",
                    )
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def create(root, name: str, *, make: bool = False) -> BinaryIO:
    """Return a new binary file; FileExistsError if anything has that name."""
    return open(opened(root, name, NEW, make=make), "wb")


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
        if (kind := kind_of(os.lstat(last, dir_fd=parent).st_mode)) != "a folder":
            raise _refusal(last, kind or "a file")
        shutil.rmtree(last, dir_fd=parent)


def _check_owner(status: os.stat_result, name: str, parent: int) -> None:
    """Refuse what another user owns. Root may write anywhere, whoever the owner."""
    user = os.geteuid()
    if user not in (0, status.st_uid) and _owner_of_new(parent) != status.st_uid:
        raise OSError(
            errno.EPERM,
            f"{name} belongs to another user (id {status.st_uid}, yours is"
            f" {user}); work on a copy of the folder",
        )


def _owner_of_new(parent: int) -> int:
    """Return the owner of files created here: some file systems show all files as one user's."""
    name = f".owner-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(name, NEW, 0o600, dir_fd=parent)
    except OSError:
        return os.geteuid()
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        os.unlink(name, dir_fd=parent)


def _in_words(error: OSError, name: str, parent: int) -> OSError:
    """Return the error, or one that says what is there instead of a file or folder."""
    with suppress(OSError):
        kind = kind_of(os.lstat(name, dir_fd=parent).st_mode)
        if kind == "a symbolic link" or (kind and error.errno in (errno.ENXIO, errno.EISDIR)):
            return _refusal(name, kind)
    return type(error)(error.errno, f"{name}: {error.strerror}")


def _refusal(name: str, kind: str) -> OSError:
    return OSError(errno.EPERM, f"{name} is {kind}, which is not allowed in a run; move it away")
