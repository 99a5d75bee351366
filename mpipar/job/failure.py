"""One error block for one failed job: what went wrong, where, why, and what to do.

If several ranks fail at the same time, claim() decides which one speaks. It is the first to create
one file. The file is a hard link to a record that is already complete, so whoever finds it can read
it.
"""

import contextlib
import errno
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


def is_claimed(folders: list[Path]) -> bool:
    """Whether a rank is already ending the job."""
    return any((folder / "first.json").exists() for folder in folders)
