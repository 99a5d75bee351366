"""What a run prints, on the console and in log.txt."""

from __future__ import annotations

from mpipar.console.output import warn
from mpipar.files.text import harmless, printable
from mpipar.job.streams import silence_output


class Log:
    """Prints on world rank 0 and keeps a copy in the run folder's log.txt.

    Standard output that takes no more, or has no reader, does not end the run.
    """

    def __init__(self, world_rank: int, file=None):
        self.speaks, self.file = world_rank == 0, file

    def __call__(self, text: str = "") -> None:
        if self.speaks:
            try:
                print(printable(text), flush=True)
            except OSError as error:
                silence_output()
                warn(f"standard output can't be written: {error.strerror}; the run goes on")
            if self.file is not None:
                self.file.write(harmless(text) + "\n")
