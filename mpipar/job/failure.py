"""One error block for one failed job: what went wrong, where, why, and what to do.

If several ranks fail at the same time, a Claim decides which one speaks. It is the first to create
one file. The file is a hard link to a record that is already complete, so whoever finds it can read
it. Ranks that come after the file has gone find its exit code in a byte that their host shares.
"""

import contextlib
import errno
import fcntl
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mpipar import errors
from mpipar.errors import EXIT_CODES, UserError
from mpipar.files.text import brief, printable
from mpipar.job.environment import started

MOST_TEXT = 4000  # characters of a sentence of the block: a file's name or value may be long
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


@dataclass(frozen=True)
class Report:
    """The content of the block and of errors/rank-N.json."""

    exit_code: int
    what: tuple[str, ...]
    where: str
    why: str
    do: str
    trace: str


def error_report(error: BaseException, where: str, saved: str = "") -> Report:
    """The report of an exception; with a traceback unless the user caused it.

    saved: the folder of the weights if the run has written its last ones.
    """
    if isinstance(error, UserError):
        return Report(error.exit_code, tuple(error.problems), where, "", "", "")
    if isinstance(error, KeyboardInterrupt):
        what = str(error) or "interrupted (SIGINT)"
        if saved:
            do = f"the weights are in {saved}"
            return Report(errors.EXIT_STOPPED, (what,), where, "", do, "")
        return Report(errors.EXIT_INTERRUPTED, (what,), where, "", "", "")
    if isinstance(error, BrokenPipeError):
        what = "the program that read the output ended before all of it was written"
        return Report(errors.EXIT_OUTPUT, (what,), where, "", "", "")
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        done = "read or written" if error.errno == errno.EIO else "written"
        what = f"{error.filename or 'the output'} can't be {done}: {error.strerror}"
        return Report(errors.EXIT_OUTPUT, (what,), where, "", "", "")
    what = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SystemExit):
        what = f"sys.exit({error.code!r}) on this rank, while the others go on"
    frames = traceback.extract_tb(error.__traceback__)
    why = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return Report(errors.EXIT_INTERNAL, (what,), where, why,
                  "report this with the command line and the traceback",
                  "".join(traceback.format_exception(error)))


def show(found: Report, record: Path | None = None) -> None:
    """Print the block on stderr, after everything printed so far; an interrupt gets one line."""
    lines = [f"mpipar: stopped, exit code {found.exit_code} ({EXIT_CODES[found.exit_code]})"]
    if found.exit_code == errors.EXIT_INTERRUPTED:
        lines[0] += f": {found.what[0]}, {found.where}"
        found, record = replace(found, what=(), where=""), None
    for title, texts in (("what", found.what), ("where", (found.where,)), ("why", (found.why,)),
                         ("do", (found.do,)), ("record", (str(record or ""),))):
        label = f"{title}:"
        for text in filter(None, texts):
            shown = printable(brief(text, MOST_TEXT), sys.stderr)
            lines.append(f"  {label:<8}" + shown.replace("\n", "\n" + " " * 10))
            label = ""
    with contextlib.suppress(OSError, ValueError):  # a closed stdout must not hide the block
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write("\n".join(lines) + "\n" + found.trace)
        sys.stderr.flush()


def claim(folders: list[Path], world_rank: int, found: Report) -> tuple[int, bool, Path | None]:
    """Write the rank's record; return (exit code of the job, whether this rank speaks, record).

    folders: where records go; the first that can be written is taken. Without any, every rank
    speaks.
    """
    text = json.dumps(asdict(found) | {"world_rank": world_rank, "time": time.time()}, indent=1)
    for folder in folders:
        record, first = folder / f"rank-{world_rank}.json", folder / "first.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            record.write_text(text + "\n")
            os.link(record, first)
        except FileExistsError:
            return json.loads(first.read_text())["exit_code"], False, record
        except OSError as problem:
            if problem.errno in (errno.EPERM, errno.EOPNOTSUPP):  # no hard links here
                return found.exit_code, True, record
            with contextlib.suppress(OSError):  # on a full disk it is empty, or cut
                record.unlink(missing_ok=True)
            continue
        return found.exit_code, True, record
    return found.exit_code, True, None


class Claim:
    """Which rank ends the job, by files and by a byte that the ranks of a host share.

    The temporary files go before the launcher has killed all ranks: nobody else would remove them.
    The byte is memory without a name, which stays until its last rank has gone. It holds the job's
    exit code, and 0 while nobody ends the job.
    """

    def __init__(self):
        self._byte: int | None = None

    def open(self) -> int:
        """Make a byte; return the number of its file, or -1 where the system knows no such file."""
        with contextlib.suppress(OSError, AttributeError):
            self._byte = os.memfd_create("mpipar-claim")
            os.write(self._byte, bytes(1))
            return self._byte
        return -1

    def share(self, pid: int, start: int, number: int) -> None:
        """From now on use the byte that a process of this host has made.

        start: see `started`. A process in another container cannot be reached; then files decide.
        """
        with contextlib.suppress(OSError):
            if started(pid) == start:
                self._byte = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)

    def _code(self) -> int:
        return 0 if self._byte is None else os.pread(self._byte, 1, 0)[0]

    def is_taken(self, folders: list[Path]) -> bool:
        """Whether a rank is already ending the job. It writes the byte before it removes a file."""
        return any((folder / "first.json").exists() for folder in folders) or self._code() > 0

    def take(self, folders: list[Path], world_rank: int,
             found: Report) -> tuple[int, bool, Path | None]:
        """claim(), if no rank of this host was first. The last folder is the temporary one."""
        if self._byte is None:
            return claim(folders, world_rank, found)
        fcntl.lockf(self._byte, fcntl.LOCK_EX)  # the end of a process frees it, too
        earlier = self._code()
        code, speaks, record = claim(folders[:-1] if earlier else folders, world_rank, found)
        if earlier:
            code, speaks = earlier, False
        os.pwrite(self._byte, bytes([code]), 0)
        fcntl.lockf(self._byte, fcntl.LOCK_UN)
        return code, speaks, record
