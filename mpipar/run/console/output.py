"""Output of a run: its log, files written on request, and files that grow with the run."""

import json
import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

from mpipar.config.text import harmless, printable
from mpipar.errors import OutputError
from mpipar.run.console.progress import is_terminal, progress
from mpipar.run.files import no_links
from mpipar.run.files.replace import replace_file, set_aside
from mpipar.run.process.failure import DISK_ERRORS
from mpipar.run.process.streams import above, silence_output, warn


def write_text(path: Path, text: str) -> None:
    """Write a file as UTF-8, as a whole or not at all; raise OutputError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if error.errno in DISK_ERRORS and path.is_file():  # half a file is useless
            with suppress(OSError):
                path.unlink()
        raise OutputError(f"cannot write {path}: {error.strerror}; name another file") from None


class GrowingFile:
    """A text file in a run folder that the run appends to. Raises OutputError if it can't open.

    A disk that refuses a write never ends the run: the text stays in memory and is tried again with
    the next one. The file is thus always a prefix of what was written, perhaps with a cut last
    line.
    """

    def __init__(self, folder: Path, name: str):
        self.folder, self.name, self.path = folder, name, folder / name
        self.pending, self.warned = b"", False
        try:
            self.file = no_links.append(folder, name)
        except OSError as error:
            raise OutputError(f"{self.path}: can't be written: {error.strerror}") from None

    def write(self, text: str) -> None:
        """Append a text, now or later; the first refusal is reported."""
        self.pending += text.encode("utf-8")
        with self._refusals_are_said():
            while self.pending:
                self.pending = self.pending[self.file.write(self.pending) :]

    def add(self, line: dict) -> None:
        """Append an object as a line of JSON."""
        self.write(json.dumps(line) + "\n")

    def sync(self) -> str:
        """Sync what was written to disk; return what the user should know, or "".

        If the name no longer leads to this file, the file, which is still open, is copied to its
        name; what is there is kept aside.
        """
        note = ""
        with self._refusals_are_said():
            here = os.fstat(self.file.fileno())
            if not (os.path.lexists(self.path) and os.path.samestat(os.lstat(self.path), here)):
                note = f"WARNING: {self.path} was moved, replaced or removed; it is written again"
                set_aside(self.path)
                with open(os.dup(self.file.fileno()), "rb") as content:
                    content.seek(0)
                    replace_file(self.name, content, root=self.folder)
                old, self.file = self.file, no_links.append(self.folder, self.name)
                old.close()
            os.fsync(self.file.fileno())
        return note

    @contextmanager
    def _refusals_are_said(self):
        try:
            yield
        except OSError as error:
            if not self.warned:
                warn(f"{self.path} can't be written: {error.strerror}; the run continues")
            self.warned = True

    def close(self) -> None:
        """Try one last time to write what was refused."""
        self.write("")
        self.file.close()


class Log:
    """Prints a run's output on world rank 0, and copies it to the run folder's log.txt.

    line: the progress line of the steps while one is shown. A standard output that is full, or has
    no reader, does not end the run.
    """

    def __init__(self, world_rank: int, file=None):
        self.speaks, self.file, self.line = world_rank == 0, file, None

    @contextmanager
    def steps(self, done: int, steps: int):
        """Show the progress of the steps inside the block, if the console is a terminal."""
        if self.speaks and is_terminal(sys.stdout) and is_terminal(sys.stderr):
            with progress("train", steps, "step", initial=done) as self.line:
                yield
            self.line = None
        else:
            yield

    def step(self, text: str, last: bool) -> None:
        """Log a step's line; with a progress line the console shows only that of the last step."""
        self(text, on_console=last or self.line is None)

    def status(self, text: str) -> None:
        """Say in the progress line, if there is one, that one more step is done, and this text."""
        if self.line is not None:
            self.line.set_postfix_str(text, refresh=False)
            self.line.update()

    def __call__(self, text: str = "", *, on_console: bool = True) -> None:
        if self.speaks and on_console:
            try:
                with above(sys.stdout):
                    print(printable(text), flush=True)
            except OSError as error:
                silence_output()
                warn(f"standard output can't be written: {error.strerror}; the run continues")
        if self.file is not None:
            self.file.write(harmless(text) + "\n")
