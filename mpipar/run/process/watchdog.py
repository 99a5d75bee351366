"""The watchdog: a thread per rank that notices when progress has stopped, and finds out why.

It works while the main thread is inside an MPI call, and uses no MPI itself. A rank that makes no
progress for `warn` seconds writes what it is doing to the run folder. The lowest rank that did so
reads what the others wrote and reports who waits for whom; after `stop` seconds it ends the job.
Where there is no run folder, a rank knows only what it waits for itself.

Progress is whatever the command's recorder records, or any other count the command provides. Where
there is none, before and after, it is any move of the main thread: a rank that waits in MPI does
not move.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter_ns
from traceback import walk_stack
from types import FrameType

from mpipar.comm.record import POINT_TO_POINT, source_line
from mpipar.errors import HangError
from mpipar.run.files import no_links
from mpipar.run.files.bounded import read_text
from mpipar.run.files.no_links import replace_file
from mpipar.run.process.streams import note

HANG = "hang"  # the folder of states in a run folder
WARN_SECONDS, STOP_SECONDS = 60.0, 600.0  # for a command without --hang-warn and --hang-stop
START_SECONDS = 60.0  # no limit is shorter at the start: programs load from shared disks
SETTLE = 1.0  # seconds for the other ranks to write their states too
LONGEST_PAUSE = 1.0  # seconds between two checks
MOST_FRAMES = 12  # of the main thread's stack in a state
STEP = ("F", "I", "W", "sync")  # phases in which every communication has a record
INSIDE = ("mpipar/comm/", "mpipar/run/process/")  # code that communicates on behalf of its callers
SILENT = "has written nothing: it works, or its process is stopped or gone"


class Watchdog:
    """The watchdog of one rank, from the first MPI call of a command to the last.

    warn, stop: seconds without progress; 0: never. folder: the run folder, once there is one;
    ranks: all that write there. All of these may change at any time.
    where: returns what this rank is doing while it follows nothing else.
    fail: ends the job; called on the lowest rank that has written its state, or on every rank.
    """

    def __init__(self, world_rank: int, where: Callable[[], str], fail: Callable):
        self.warn, self.stop = WARN_SECONDS, STOP_SECONDS
        self.folder: Path | None = None
        self.ranks: Sequence[int] = ()
        self.begun = False
        self.world_rank, self._fail = world_rank, fail
        self._progress: Callable = position
        self._describe: Callable = lambda: state_of(where=where())
        self._name = f"{HANG}/rank-{world_rank:05d}.json"
        self._written = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """End the thread: MPI has ended."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(SETTLE)  # it may be blocked on a console while reporting

    @contextlib.contextmanager
    def following(self, progress: Callable, describe: Callable):
        """Let the caller define progress and what this rank is doing, inside the block.

        progress(): any value that changes while work proceeds. describe(): a `state_of`.
        """
        former = self._progress, self._describe
        self._progress, self._describe, self.begun = progress, describe, True
        try:
            yield self
        finally:
            self._progress, self._describe = former

    def follow_records(self, recorder, comms, more: Callable = lambda: 0):
        """Call following() with what a recorder records. more(): a count that is progress too."""
        return self.following(lambda: (marker(recorder), more()), lambda: state_of(recorder, comms))

    def _watch(self) -> None:
        """Check the progress again and again.

        Each pause counts as long as it was meant to be: a job that was suspended (Ctrl-Z, SLURM)
        was not stuck meanwhile.
        """
        last, stuck, warned = None, 0.0, False
        while True:
            least = 0.0 if self.begun else START_SECONDS
            warn, stop = (limit and max(limit, least) for limit in (self.warn, self.stop))
            first = min(filter(None, (warn, stop)), default=math.inf)
            pause = min(LONGEST_PAUSE, first / 5)
            if self._ended.wait(pause):
                break
            now = self._progress()
            if now != last:
                last, stuck, warned = now, 0.0, False
                self._withdraw()
                continue
            stuck += pause
            if stuck >= first:
                self._write()
            if warn and not warned and stuck > warn + SETTLE:
                warned = True
                if lines := self._report(warn, everywhere=False):
                    note("\n".join(lines))
            if stop and stuck > stop + SETTLE and (lines := self._report(stop, everywhere=True)):
                self._fail(HangError(lines))
        self._withdraw()

    def _withdraw(self) -> None:
        """Remove this rank's state, which is outdated because the rank has resumed."""
        if self._written:
            self._written = False
            with contextlib.suppress(OSError):  # others' states may keep the folder
                no_links.remove(self.folder, self._name)
                (self.folder / HANG).rmdir()

    def _write(self) -> None:
        """Write this rank's state; a reader sees either all of it or the previous one."""
        if self.folder is not None:
            with contextlib.suppress(OSError):  # a full disk must not hide the hang itself
                text = json.dumps(self._describe()).encode()
                replace_file(self._name, [text], sync=False, root=self.folder)
                self._written = True

    def _report(self, limit: float, everywhere: bool) -> list[str]:
        """Return what all ranks' states mean, on the lowest rank that has written one; else [].

        everywhere: report also on a rank that knows no state but its own, whichever it is.
        """
        states, lines = {}, []
        for path in sorted(self.folder.glob(f"{HANG}/rank-*.json")) if self.folder else ():
            with contextlib.suppress(OSError, ValueError):
                text = read_text(f"{HANG}/{path.name}", root=self.folder)
                states[int(path.stem.split("-")[1])] = json.loads(text)
        if states and self.world_rank == min(states):
            lines = explain(states, self.ranks)
        elif not states and (everywhere or self.world_rank == 0):
            state = self._describe()
            said = f"rank {self.world_rank} {state['says']}"
            lines = [said, *map("  {}".format, state["stack"])]
        return lines and [f"no progress for {limit:g} s", *lines]


def marker(recorder):
    """Return a value that changes with every operation, span and wait of this rank.

    Outside a training step, for example while weights are read, it also changes with every move of
    the main thread.
    """
    moves = () if recorder.phase in STEP else position()
    # the newest, not their number, which stays the same in a full ring
    return recorder.step, recorder.phase, recorder.mb, recorder.newest(), moves


def position() -> tuple:
    """Return the main thread's position; it changes with any move, in any function on the stack."""
    return tuple((frame.f_code, frame.f_lasti) for frame, _ in main_stack())


def main_stack() -> Iterator[tuple[FrameType, int]]:
    """Return (frame, line number) of the main thread's functions, the innermost first."""
    return walk_stack(sys._current_frames().get(threading.main_thread().ident))


def state_of(recorder=None, comms=None, where: str = "") -> dict:
    """Return what this rank is doing, as JSON-able values; called from the watchdog's thread.

    where: the description of a rank without a recorder. barrier: what all ranks in the same one
    say of it, or ""; for: the ranks that this one waits for.
    """
    stack = [
        f"{source_line(frame.f_code.co_filename, line)} in {frame.f_code.co_name}"
        for frame, line in islice(main_stack(), MOST_FRAMES)
    ]
    here = next((frame for frame in stack if not frame.startswith(INSIDE)), "?")
    at, barrier, ranks, record = where or "start", "", [], None
    if recorder is not None:
        at = (
            f"step {recorder.step}, phase {recorder.phase},"
            f" stage {recorder.stage}, mb {recorder.mb}"
        )
        waiting = (one for one in reversed(recorder.records) if one.waited_ns and not one.done_ns)
        record = next(waiting, None)
    if record is None:
        says = f"is at {here} ({at})"
        if recorder is not None and recorder.phase in STEP:  # all communication has a record
            says = f"is in no communication ({at}); its main thread is at {here}"
    else:
        group, other = list(comms.groups[record.axis].ranks), ""
        if record.operation in POINT_TO_POINT:
            ranks = [group[record.peer]]
            other = f" {'to' if record.operation == 'send' else 'from'} rank {ranks[0]}"
        else:
            ranks, number = group, f"{record.operation} {record.seq}"
            barrier = f"barrier {record.name} ({number} of the {record.axis} group {group})"
        seconds = (perf_counter_ns() - record.waited_ns) * 1e-9
        says = (
            f"waits in {record.operation} {record.name}{other}"
            f" ({record.axis}, {at}) for {seconds:.1f} s at {record.source}"
        )
    return {"says": says, "barrier": barrier, "for": ranks, "stack": stack}


def explain(states: dict[int, dict], ranks: Iterable[int]) -> list[str]:
    """Return a report: incomplete barriers, the ranks missing from each, and what those are doing.

    If no rank waits for another, it says what every rank is doing. ranks: all that could have
    written a state.
    """
    says = dict.fromkeys(ranks, SILENT) | {rank: one["says"] for rank, one in states.items()}
    barriers = {rank: one["barrier"] for rank, one in states.items()}
    lines, missing = [], set()
    for rank, state in sorted(states.items()):
        barrier, line = state["barrier"], f"rank {rank} {says[rank]}"
        absent = [other for other in state["for"] if not barrier or barriers.get(other) != barrier]
        if barrier:
            arrived = [other for other in state["for"] if other not in absent]
            line = f"{barrier} is incomplete: {names(arrived)} arrived, {names(absent)} missing"
        if state["for"] and line not in lines:
            lines.append(line)
        missing.update(absent)
    late = [rank for rank in sorted(missing) if rank not in states or not states[rank]["for"]]
    lines += [f"late: rank {rank} {says.get(rank, SILENT)}" for rank in late]
    stacks = {rank: states[rank]["stack"][:6] for rank in sorted(missing & states.keys())}
    lines += [f"  rank {rank}: {frame}" for rank, stack in stacks.items() for frame in stack]
    return lines or [f"rank {rank} {said}" for rank, said in sorted(says.items())]


def names(ranks) -> str:
    """Return ranks as text."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
