"""Output of a run: its log, its progress line, files on request, and files that grow with the run.

A long operation has a progress line: tqdm's on a terminal, elsewhere a line every ten seconds. Both
go to standard error; what else a process prints stands above it, see `streams.above`. The event
files for TensorBoard (the extra `tensorboard`) hold the numbers of metrics.jsonl as curves.
"""

import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from mpipar.config.text import harmless, printable
from mpipar.errors import OutputError, broken
from mpipar.run.files import no_links
from mpipar.run.files.no_links import replace_file, set_aside
from mpipar.run.process.failure import DISK_ERRORS
from mpipar.run.process.streams import above, silence_output, warn

EVENTS = "tensorboard"  # in the run folder; each start of a run adds a file
TAGS = {
    "loss": "loss/training",
    "held_out_loss": "loss/held_out",
    "lr": "learning_rate",
    "grad_norm": "gradient_norm",
    "loss_scale": "loss_scale",
    "tokens_per_second": "speed/tokens_per_second",
    "step_seconds": "speed/step_seconds",
    "comm_share_mean": "communication/share_mean",
    "comm_share_max": "communication/share_max",
}
SECONDS = 10.0  # between lines where standard error is no terminal
PATIENCE_SECONDS = 2.0  # what ends sooner, as most checkpoints do, gets no line


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
        shown = self.speaks and is_terminal(sys.stdout) and is_terminal(sys.stderr)
        line = progress("train", steps, "step", initial=done) if shown else nullcontext()
        with line as self.line:
            yield
        self.line = None

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


# --- the progress line


class Lines:
    """A stream that makes a line of its own of each text with which tqdm replaces its line."""

    def write(self, text: str) -> None:
        """Write the text to standard error, if that still has a reader."""
        if line := text.strip():
            with suppress(OSError, ValueError):
                print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Do nothing: each line is flushed."""


def is_terminal(stream) -> bool:
    """Return whether a stream is a terminal that can return to the start of a line."""
    return stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def progress(what: str, total: int | None, unit: str, **more):
    """Return a tqdm for a `with` block, which tells with update(n) that n more units are done.

    more: other options of tqdm.
    """
    from tqdm import tqdm  # takes 37 ms, which other commands need not spend

    tqdm.set_lock(threading.RLock())  # its own also locks other processes out
    tqdm.monitor_interval = 0  # no thread that looks at lines that do not move
    if not is_terminal(sys.stderr):
        more |= {"file": Lines(), "delay": SECONDS, "mininterval": SECONDS}
    return tqdm(
        desc=what, total=total, unit=unit, unit_scale=True, leave=False, dynamic_ncols=True, **more
    )


def watched(what: str, blocks: Iterable, total: int) -> Iterator:
    """Yield blocks of bytes or numbers; show a line once that takes long. total: their bytes."""
    with progress(what, total, "B", delay=PATIENCE_SECONDS) as line:
        for block in blocks:
            yield block
            line.update(getattr(block, "nbytes", None) or len(block))


# --- TensorBoard


def tensorboard_problems(config) -> list[str]:
    """Return a problem if --tensorboard is given but its extra is not installed."""
    return broken(
        (
            config.run.tensorboard and importlib.util.find_spec("tensorboard") is None,
            (
                "--tensorboard: the package tensorboard is not installed: pip install"
                " '.[tensorboard]', or leave --tensorboard out; metrics.csv has the same numbers"
            ),
        )
    )


class Events:
    """Writes one event file; any failure is reported once, and the run continues.

    first_step: the first step of this start of the run. TensorBoard drops it and later steps from
    older files.
    """

    def __init__(self, run_folder: Path, first_step: int):
        self.writer = None
        with self._failures_are_said():
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self.writer = EventFileWriter(str(no_links.folder(run_folder, EVENTS, make=True)))
            self._event(first_step, session_log={"status": "START"})

    @contextmanager
    def _failures_are_said(self):
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the run is worth more than its curves
            self.writer = None
            warn(f"no more event files for TensorBoard: {error}; the run continues")

    def _event(self, step: int, **content) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.add_event(Event(wall_time=time.time(), step=step, **content))

    def add(self, line: dict) -> None:
        """Add the numbers of a line of metrics.jsonl or evaluations.jsonl."""
        if self.writer is not None:
            known = {tag: line[name] for name, tag in TAGS.items() if line.get(name) is not None}
            values = [{"tag": tag, "simple_value": value} for tag, value in known.items()]
            with self._failures_are_said():
                self._event(line["step"], summary={"value": values})
                self.writer.flush()

    def close(self) -> None:
        """Write what is left, and close the file."""
        with self._failures_are_said():
            if self.writer is not None:
                self.writer.close()
