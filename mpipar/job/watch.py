"""What the watchdog of one rank follows, from the first MPI call of a command to the last.

Progress is what the recorder of a command notes, or any other count of the command. Before a
command has one, and after, it is any move of the main thread: a rank that waits in MPI does not
move.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from mpipar.errors import HangError
from mpipar.job import hang
from mpipar.job.signals import note
from mpipar.job.watchdog import Watchdog

WARN_SECONDS, STOP_SECONDS = 60.0, 600.0  # of a command without --hang-warn and --hang-stop
START_SECONDS = 60.0  # at the start no limit is shorter: programs come from shared disks


class Watch:
    """The watchdog of one rank and what it knows.

    warn, stop: seconds without progress; 0: never.
    folder: where ranks write their states; ranks: those that can write there.
    where: says what this rank is doing while it follows nothing else.
    fail: ends the job.
    progress, describe: see `Watchdog`.
    """

    def __init__(self, folder: Path, ranks: Sequence[int], where: Callable[[], str],
                 fail: Callable):
        self.warn, self.stop = WARN_SECONDS, STOP_SECONDS
        self.folder, self.ranks = folder, ranks
        self.begun = False
        self.progress: Callable = hang.position
        self.describe: Callable = lambda: hang.state_of(where=where())
        self._fail = fail
        self._watchdog: Watchdog | None = None

    def start(self, world_rank: int) -> None:
        """Start the watchdog's thread. The caller sets the limits before."""
        if self._watchdog is None and (self.warn or self.stop):
            self._watchdog = Watchdog(
                self, world_rank, on_warn=self._report_warning, on_stop=self._report_stop)
            self._watchdog.start()

    def end(self) -> None:
        """End the watchdog: MPI has ended."""
        if self._watchdog is not None:
            self._watchdog.end()

    @contextlib.contextmanager
    def following(self, progress: Callable, describe: Callable, stop: float | None = None):
        """Inside, progress() and describe() of the caller say what this rank does.

        stop: the caller's own limit, which comes without a warning.
        """
        former = self.progress, self.describe, self.warn, self.stop
        self.progress, self.describe, self.begun = progress, describe, True
        if stop is not None:
            self.warn, self.stop = 0.0, stop
        try:
            yield self
        finally:
            self.progress, self.describe, self.warn, self.stop = former

    def follow_records(self, recorder, comms, more: Callable = lambda: 0):
        """following() what a recorder notes. more(): a count that is progress, too."""
        return self.following(lambda: (hang.marker(recorder), more()),
                              lambda: hang.state_of(recorder, comms))

    def limits(self) -> tuple[float, float]:
        """Seconds without progress until the warning and until the end of the job."""
        if self.begun:
            return self.warn, self.stop
        return tuple(limit and max(limit, START_SECONDS) for limit in (self.warn, self.stop))

    def _lines(self, seconds: float, states: dict) -> list[str]:
        return [f"no progress for {seconds:g} s", *hang.explain(states, self.ranks)]

    def _report_warning(self, states) -> None:
        note("\n".join(self._lines(self.limits()[0], states)))

    def _report_stop(self, states) -> None:
        self._fail(HangError(self._lines(self.limits()[1], states)))
