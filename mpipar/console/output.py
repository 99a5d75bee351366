"""What a run prints, files that a view writes on request, and those that grow with a run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mpipar.errors import OutputError
from mpipar.files import no_links
from mpipar.files.replace import replaced_files, set_aside
from mpipar.files.text import harmless, printable
from mpipar.job.failure import DISK_ERRORS
from mpipar.job.streams import silence_output, warn


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
            self.file = no_links.append(folder, name)
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
        new = no_links.append(self.folder, self.name)
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


class Log:
    """Prints what a run has to say on world rank 0, and keeps a copy in its folder's log.txt.

    line: a `StatusLine` of world rank 0, or None. Standard output that takes no more, or has no
    reader, does not end the run.
    """

    def __init__(self, world_rank: int, file=None, line=None):
        self.speaks, self.file, self.line = world_rank == 0, file, line

    def step(self, text: str, last: bool) -> None:
        """A step's line. With a status line the console gets only that of the last step."""
        self(text, on_console=last or self.line is None)

    def status(self, text: str) -> None:
        """Show a text that the next one replaces, where there is a status line for it."""
        if self.line is not None:
            self.line.show(text)

    def __call__(self, text: str = "", *, on_console: bool = True) -> None:
        if self.speaks and on_console:
            try:
                print(printable(text), flush=True)
            except OSError as error:
                silence_output()
                warn(f"standard output can't be written: {error.strerror}; the run goes on")
        if self.file is not None:
            self.file.write(harmless(text) + "\n")
