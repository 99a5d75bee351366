"""The watchdog: a thread per rank that notices and reports when nothing has happened for too long.

It works while the main thread is inside an MPI call, and it uses no MPI itself. A rank that makes
no progress for `warn` seconds writes what it is doing into a folder. The lowest rank that did so
reads what the others wrote, and reports. After `stop` seconds it ends the job.

The caller says what progress is, how a rank describes itself, and what a report looks like. So this
file knows neither MPI nor models.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mpipar.files.replace import replace_file

SETTLE = 1.0  # seconds that the other ranks get to write their states too
LONGEST_PAUSE = 1.0  # seconds between two looks


class Watchdog:
    """The thread of one rank.

    followed: says what this rank does. Its `progress()` is any value that changes while work goes
    on, and its `describe()` is the JSON-able state of this rank. Its `limits()` are the seconds
    until a warning and until the stop, 0 for never. States are written into its `folder`. All of
    them may change at any time.
    on_warn(states), on_stop(states): called in the watchdog's thread. states: {world rank: state}
    of the ranks that wrote one. on_stop runs on the lowest such rank alone, and should not return.
    """

    def __init__(self, followed, world_rank: int, *, on_warn: Callable, on_stop: Callable):
        self.followed, self.world_rank = followed, world_rank
        self.on_warn, self.on_stop = on_warn, on_stop
        self._ended = threading.Event()
        self._written: Path | None = None  # this rank's state, while it has one
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(SETTLE)  # it may be reporting, to a console that nobody reads

    def _watch(self) -> None:
        """Look at the progress again and again.

        A pause counts as what it should have taken. A job that was suspended (Ctrl-Z, SLURM) was
        not stuck meanwhile.
        """
        last, stuck, warned = None, 0.0, False
        while True:
            warn, stop = self.followed.limits()
            first = min((limit for limit in (warn, stop) if limit), default=0.0)
            pause = min(LONGEST_PAUSE, first / 5) if first else LONGEST_PAUSE
            before = time.monotonic()
            if self._ended.wait(pause):
                break
            now = self.followed.progress()
            if now != last or not first:
                last, stuck, warned = now, 0.0, False
                self._withdraw()
                continue
            stuck += min(time.monotonic() - before, 2 * pause)
            if stuck < first:
                continue
            self._write(stuck)
            if warn and not warned and stuck > warn + SETTLE:
                warned = True
                self._report(self.on_warn)
            if stop and stuck > stop + SETTLE:
                self._report(self.on_stop)
        self._withdraw()

    def _withdraw(self) -> None:
        """Remove this rank's state, which is no longer true because the rank goes on."""
        if self._written is not None:
            with contextlib.suppress(OSError):  # others' states may keep the folder
                self._written.unlink(missing_ok=True)
                self._written.parent.rmdir()
            self._written = None

    def _write(self, stuck: float) -> None:
        """Write this rank's state; a reader sees either the whole of it or the previous one."""
        state = {**self.followed.describe(), "stuck_seconds": round(stuck, 1)}
        path = self.followed.folder / f"rank-{self.world_rank:05d}.json"
        with contextlib.suppress(OSError):  # a full disk must not hide the hang itself
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, [json.dumps(state).encode()], sync=False)
            self._written = path

    def _report(self, report: Callable) -> None:
        """Call report with everybody's state, on the lowest rank that has written one."""
        states = {}
        for path in sorted(self.followed.folder.glob("rank-*.json")):
            with contextlib.suppress(OSError, ValueError):
                states[int(path.stem.split("-")[1])] = json.loads(path.read_text())
        if not states or self.world_rank == min(states):
            report(states or {self.world_rank: self.followed.describe()})
