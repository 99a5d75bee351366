"""Status files: what each rank is doing, in a memory-mapped file that survives its process.

An update costs a few bytes of memory, and the system writes them to disk even after the process has
been killed. A rank removes its file when it ends, so files that are left belong to a job that was
killed. The next start in the folder reports what they say, and so does `mpipar ckpt ls`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

from mpipar.errors import OutputError
from mpipar.files import no_links
from mpipar.files.bounded import parse_json, problems_as, read_bytes, read_text
from mpipar.files.text import harmless
from mpipar.job import lock

FOLDER, TOKEN = "status", "status/job"
HEAD, LIVE, LOST = 128, struct.Struct("<qd16s"), struct.Struct("<qd")
SIZE = HEAD + LIVE.size + LOST.size
MOST_TOLD = 8  # ranks whose last signs are reported
SHARED_SECONDS = 5.0  # how long a new file may take to become visible on another host


class LastSign(NamedTuple):
    """The content of one file. lost: the rank whose end was noticed, and when; or -1."""

    rank: int
    host: str
    pid: int
    step: int
    time: float
    phase: str
    lost: int
    lost_time: float


class Status:
    """This rank's file, in a folder that `open_folder` has created. Raises OutputError."""

    def __init__(self, run_folder: Path, rank: int, host: str):
        self.run_folder, self.name = run_folder, f"{FOLDER}/rank-{rank:05d}"
        self.path = run_folder / self.name
        head = json.dumps({"rank": rank, "host": host[:64], "pid": os.getpid()}).encode()
        with (
            problems_as(OutputError, f"{self.path}: can't be written"),
            no_links.create(run_folder, self.name) as file,
        ):
            file.write(head.ljust(SIZE, b"\0"))  # allocated, or writing to the map raises SIGBUS
            file.flush()
            self._map = mmap.mmap(file.fileno(), SIZE)
        LOST.pack_into(self._map, HEAD + LIVE.size, -1, 0.0)
        self.enter(0, "start")

    def enter(self, step: int, phase: str) -> None:
        """Record that this rank begins something: a single write to memory."""
        LIVE.pack_into(self._map, HEAD, step, time.time(), phase.encode())

    def close(self) -> None:
        """Remove the file: this rank ends regularly."""
        close_folder(self.run_folder, self.name)


def lost(path: str, rank: int) -> None:
    """Record in a file that this rank's process has ended without a word."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
        os.pwrite(file, LOST.pack(rank, time.time()), HEAD + LIVE.size)
        os.close(file)


def open_folder(run_folder: Path, token: str) -> list[str]:
    """Create the folder for this job; return lines about what an earlier job has left in it.

    Only world rank 0 calls it, holding the run folder's lock. Raises OutputError.
    """
    with problems_as(OutputError, f"{run_folder / FOLDER}: can't be made"):
        words = last_words(signs(run_folder))
        no_links.remove_tree(run_folder, FOLDER)
        with no_links.create(run_folder, TOKEN, make=True) as file:
            file.write(token.encode())
    return words


def check_shared(run_folder: Path, token: str, host: str) -> None:
    """Raise OutputError if this host does not see the run folder that world rank 0 created."""
    limit = time.monotonic() + SHARED_SECONDS
    while True:
        with contextlib.suppress(OSError, ValueError):
            if read_text(TOKEN, root=run_folder) == token:
                return
        if time.monotonic() > limit:
            raise OutputError(
                f"{run_folder}: host {host} does not see what world rank 0 writes there; use an"
                " --out on a file system that all hosts share, under the same path on all of them"
            )
        time.sleep(0.1)


def close_folder(run_folder: Path, name: str = TOKEN) -> None:
    """Remove a file, by default world rank 0's, and the folder if that was the last one."""
    with contextlib.suppress(OSError):
        no_links.remove(run_folder, name)
        (run_folder / FOLDER).rmdir()


def forget(run_folder: Path) -> None:
    """Remove the files of all ranks: the job ends, and the console says why."""
    with contextlib.suppress(OSError):
        no_links.remove_tree(run_folder, FOLDER)


def signs(run_folder: Path) -> list[LastSign]:
    """Return the content of all ranks' readable files, by rank."""
    found = []
    for path in sorted((run_folder / FOLDER).glob("rank-*")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, struct.error):
            content = read_bytes(f"{FOLDER}/{path.name}", most_bytes=SIZE, root=run_folder)
            head = parse_json(content[:HEAD].rstrip(b"\0").decode())
            step, moment, phase = LIVE.unpack_from(content, HEAD)
            found.append(
                LastSign(
                    int(head["rank"]),
                    str(head["host"]),
                    int(head["pid"]),
                    step,
                    moment,
                    phase.rstrip(b"\0").decode("ascii", "replace"),
                    *LOST.unpack_from(content, HEAD + LIVE.size),
                )
            )
    return found


def killed(run_folder: Path) -> list[str]:
    """Return what a killed job has left in this run folder; nothing while a job is running."""
    found = signs(run_folder)
    if not found or lock.is_held(run_folder):
        return []
    return last_words(found)


def last_words(found: list[LastSign]) -> list[str]:
    """Return which rank was killed first and what it did last, or the last signs of several ranks.

    It may have gone unseen, because MPICH's launcher kills the other ranks at once.
    """
    if not found:
        return []
    text = "an earlier job in this folder was killed (by a signal, out of memory, a lost host)"
    seen = [(sign.lost_time, sign.lost) for sign in found if sign.lost >= 0]
    by_rank = {sign.rank: sign for sign in found}
    first = by_rank.get(min(seen)[1]) if seen else None
    if first is not None:
        return [f"{text}: first {_phrase(first)}"]
    # by step, because the clock may have been set back
    last = sorted(found, key=lambda sign: (sign.step, sign.time))[-MOST_TOLD:]
    return [
        f"{text}; no rank saw which one was first; their last signs:",
        *(f"  {_phrase(sign)}" for sign in last),
    ]


def _phrase(sign: LastSign) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(sign.time))
    return (
        f"rank {sign.rank} on {harmless(sign.host)} (pid {sign.pid}), in step {sign.step},"
        f" phase {harmless(sign.phase)}, since {moment}"
    )
