"""The watchdog: a thread per rank that notices and reports when nothing has happened for too long.

It works while the main thread is inside an MPI call, and it uses no MPI itself. A rank that makes
no progress for `warn` seconds writes what it is doing into the run folder. The lowest rank that did
so reads what the others wrote, and reports. After `stop` seconds it ends the job.

The caller's callbacks say what progress is, how a rank describes itself, and what a report looks
like. So this file knows neither MPI nor models.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

SETTLE = 1.0  # seconds that the other ranks get to write their states too


class Watchdog:
    """Use as a context manager around the work to be watched.

    progress() -> any value that changes while work goes on.
    describe() -> JSON-able state of this rank.
    on_warn(states), on_stop(states): called in the watchdog's thread. states: {world rank: state}
    of the ranks that wrote one. on_stop runs on the lowest such rank alone, and should not return.
    warn, stop: seconds, 0 for never.
    """

    def __init__(self, folder: Path, world_rank: int, *, progress: Callable, describe: Callable,
                 on_warn: Callable, on_stop: Callable, warn: float, stop: float):
        self.folder, self.world_rank = folder, world_rank
        self.progress, self.describe = progress, describe
        self.on_warn, self.on_stop = on_warn, on_stop
        self.warn, self.stop = warn, stop
        self._ended = threading.Event()
        self._file = folder / f"rank-{world_rank:05d}.json"
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self):
        if self.warn or self.stop:
            self._thread.start()
        return self

    def __exit__(self, *failure):
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(SETTLE)  # it may be reporting, to a console that nobody reads

    def _watch(self) -> None:
        limits = [limit for limit in (self.warn, self.stop) if limit]
        first, pause = min(limits), min(1.0, min(limits) / 5)
        last, since, warned, written = None, time.monotonic(), False, False
        while not self._ended.wait(pause):
            now = self.progress()
            if now != last:
                last, since, warned = now, time.monotonic(), False
                if written:
                    self._withdraw()
                    written = False
                continue
            stuck = time.monotonic() - since
            if stuck < first:
                continue
            self._write(stuck)
            written = True
            if self.warn and not warned and stuck > self.warn + SETTLE:
                warned = True
                self._report(self.on_warn)
            if self.stop and stuck > self.stop + SETTLE:
                self._report(self.on_stop)
        if written:
            self._withdraw()

    def _withdraw(self) -> None:
        """Remove this rank's state, which is no longer true because the rank goes on."""
        with contextlib.suppress(OSError):  # others' states may keep the folder
            self._file.unlink(missing_ok=True)
            self.folder.rmdir()

    def _write(self, stuck: float) -> None:
        """Write this rank's state; a reader sees either the whole of it or the previous one."""
        state = {**self.describe(), "stuck_seconds": round(stuck, 1)}
        with contextlib.suppress(OSError):  # a full disk must not hide the hang itself
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self._file.with_suffix(".partial")
            partial.write_text(json.dumps(state))
            os.replace(partial, self._file)

    def _report(self, report: Callable) -> None:
        """Call report with everybody's state, on the lowest rank that has written one."""
        states = {}
        for path in sorted(self.folder.glob("rank-*.json")):
            with contextlib.suppress(OSError, ValueError):
                states[int(path.stem.split("-")[1])] = json.loads(path.read_text())
        if not states or self.world_rank == min(states):
            report(states or {self.world_rank: self.describe()})
