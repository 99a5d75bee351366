"""What a run prints, on the console and in log.txt."""

from __future__ import annotations

from mpipar.files.text import harmless, printable
from mpipar.job.streams import silence_output, warn


class Log:
    """Prints on world rank 0 and keeps a copy in the run folder's log.txt.

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
