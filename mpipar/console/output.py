"""Files that a view writes on request, and those that grow while a run goes on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mpipar.errors import OutputError
from mpipar.files import own
from mpipar.files.replace import replaced_files, set_aside
from mpipar.job.failure import DISK_ERRORS
from mpipar.job.streams import warn


def write_text(path: Path, text: str) -> None:
    """Write a file as UTF-8, whole or not at all; raises OutputError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if error.errno in DISK_ERRORS and path.is_file():  # a partial file is useless
            path.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror}; name another file") from None


class GrowingFile:
    """A text file of a run folder, that the run adds to. Raises OutputError if it can't be opened.

    A disk that refuses a text never ends the run. What is refused stays in memory and is tried
    again with the next text. So the file is at any time a beginning of what was written, perhaps
    with a cut last line.
    """

    def __init__(self, folder: Path, name: str):
        self.folder, self.name, self.path = folder, name, folder / name
        self.pending, self.warned = b"", False
        try:
            self.file = own.append(folder, name)
        except OSError as error:
            raise OutputError(f"{self.path}: can't be written: {error.strerror}") from None

    def write(self, text: str) -> None:
        """Add a text, now or later; a first refusal is reported."""
        self.pending += text.encode("utf-8")
        try:
            while self.pending:
                self.pending = self.pending[self.file.write(self.pending):]
        except OSError as error:
            self._refused(error)

    def sync(self) -> str:
        """Bring what is written to the disk; return what the user should know, or "".

        If the name leads to this file no longer, all of it is written anew under the name.
        """
        note = ""
        try:
            if not self._is_in_place():
                note = f"WARNING: {self.path} was moved, replaced or removed; it is written anew"
                self._write_anew()
            os.fsync(self.file.fileno())
        except OSError as error:
            self._refused(error)
        return note

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self.file.fileno()))
        except OSError:
            return False

    def _write_anew(self) -> None:
        """Copy the file, which is still open, under its name; what is there is kept aside."""
        set_aside(self.path)
        with replaced_files(self.folder) as create, open(os.dup(self.file.fileno()), "rb") as old:
            old.seek(0)
            shutil.copyfileobj(old, create(self.name))
        new = own.append(self.folder, self.name)
        self.file.close()
        self.file = new

    def _refused(self, error: OSError) -> None:
        if not self.warned:
            warn(f"{self.path} can't be written: {error.strerror}; the run goes on")
        self.warned = True

    def close(self) -> None:
        """Try for the last time to write what was refused."""
        self.write("")
        self.file.close()
