"""One error block for a failed job: what went wrong, where, why, and what to do.

If several ranks fail at the same time, one reports and the others wait until its abort ends them.
Within a host the first one reports, found through one shared word of memory per rank. Hosts share
no memory, nor do ranks that have not started MPI; there the lower number reports sooner.
"""

import contextlib
import errno
import json
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mpipar import errors
from mpipar.errors import EXIT_CODES, UserError
from mpipar.files.replace import replace_file
from mpipar.files.text import cut, printable
from mpipar.job.streams import above

MOST_TEXT = 4000  # characters of a sentence in the block: a file's name or a value may be long
SETTLE_SECONDS = 0.05  # for a rank that failed at the same moment and has not yet written its word
TURN_SECONDS = 1.2  # enough to forward a block and for the abort after it to end the other ranks
MOST_TURNS = 5  # a failure is reported within six seconds
FORWARD_SECONDS = 0.3  # on abort the launcher drops output that it has not forwarded yet
NO_THREAD = "can't start new thread"
NO_PROCESS = (
    "no further process or thread can be started: the limit of this user's processes is reached"
    " (ulimit -u), or that of a container"
)
TOO_LONG = ("MPI_ERR_ARG", "MPI_ERR_COUNT")
LONG = (
    "the MPI library refuses a call. Libraries of MPI 3, such as Open MPI 4, take at most 2^31 - 1"
    " numbers at a time: use Open MPI 5 or MPICH 4, or a layout with smaller parts"
    " (`mpipar doctor --deep` tries a long message)"
)
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


@dataclass(frozen=True)
class Report:
    """The content of the block and of errors/rank-N.json."""

    exit_code: int
    what: tuple[str, ...]
    where: str
    why: str = ""
    do: str = ""
    trace: str = ""


def error_report(error: BaseException, where: str, saved: str = "") -> Report:
    """Return the report of an exception, with a traceback unless the user caused it.

    saved: the folder of the final weights, once the run has written them.
    """
    if isinstance(error, UserError):
        return Report(error.exit_code, tuple(error.problems), where)
    if isinstance(error, KeyboardInterrupt):
        code = errors.EXIT_STOPPED if saved else errors.EXIT_INTERRUPTED
        return Report(
            code,
            (str(error) or "interrupted (SIGINT)",),
            where,
            do=saved and f"the weights are in {saved}",
        )
    if isinstance(error, BrokenPipeError):
        what = "the program reading the output exited before all of it was written"
        return Report(errors.EXIT_NO_READER, (what,), where)
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        done = "read or written" if error.errno == errno.EIO else "written"
        what = f"{error.filename or 'the output'} can't be {done}: {error.strerror}"
        return Report(errors.EXIT_OUTPUT, (what,), where)
    if isinstance(error, BlockingIOError) or NO_THREAD in str(error):
        return Report(errors.EXIT_ENVIRONMENT, (NO_PROCESS,), where)
    if type(error).__module__ == "mpi4py.MPI" and str(error).startswith(TOO_LONG):
        frames = traceback.extract_tb(error.__traceback__)
        why = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        return Report(errors.EXIT_ENVIRONMENT, (f"{error}: {LONG}",), where, why)
    what = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SystemExit):
        what = f"sys.exit({error.code!r}) on this rank, while the others continue"
    frames = traceback.extract_tb(error.__traceback__)
    why = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return Report(
        errors.EXIT_INTERNAL,
        (what,),
        where,
        why,
        "report this with the command line and the traceback",
        "".join(traceback.format_exception(error)),
    )


def show(found: Report, record: Path | None = None) -> None:
    """Print the block on stderr, after all earlier output; an interrupt takes a single line."""
    lines = [f"mpipar: stopped, exit code {found.exit_code} ({EXIT_CODES[found.exit_code]})"]
    if found.exit_code == errors.EXIT_INTERRUPTED:
        lines[0] += f": {found.what[0]}, {found.where}"
        found, record = replace(found, what=(), where=""), None
    for title, texts in (
        ("what", found.what),
        ("where", (found.where,)),
        ("why", (found.why,)),
        ("do", (found.do,)),
        ("record", (str(record or ""),)),
    ):
        label = f"{title}:"
        for text in filter(None, texts):
            shown = printable(cut(text, MOST_TEXT), sys.stderr)
            lines.append(f"  {label:<8}" + shown.replace("\n", "\n" + " " * 10))
            label = ""
    with contextlib.suppress(OSError, ValueError):  # a closed stdout must not hide the block
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError), above(sys.stderr):
        sys.stderr.write("\n".join(lines) + "\n" + found.trace)
        sys.stderr.flush()


def is_first(words, own: int, code: int) -> tuple[bool, int]:
    """Return whether this rank was the first of its host to fail, and the first one's exit code.

    words: 64-bit integers shared by the ranks of a host, initially zero. A failing rank writes into
    its own word the time in microseconds, and the exit code in the lowest byte.
    """
    if not any(words):
        words[own] = time.monotonic_ns() // 1000 << 8 | code
        time.sleep(SETTLE_SECONDS)
    first = min((word, place) for place, word in enumerate(words) if word)[1]
    return first == own, words[first] & 255


def wait_for_turn(number: int) -> None:
    """Give ranks with lower numbers, which may fail for the same reason, time to end the job."""
    time.sleep(TURN_SECONDS * min(number, MOST_TURNS))


def write_record(run_folder: Path | None, world_rank: int, found: Report) -> Path | None:
    """Write the report to a file in the run folder if possible; return its path."""
    name = f"errors/rank-{world_rank}.json"
    text = json.dumps(asdict(found) | {"world_rank": world_rank}, indent=1) + "\n"
    with contextlib.suppress(OSError):
        if run_folder is not None:
            replace_file(name, [text.encode()], sync=False, root=run_folder)
            return run_folder / name
    return None


def leave_code(environ: Mapping[str, str], code: int) -> None:
    """Write the job's exit code to the file that MPIPAR_EXIT_FILE names; the first rank wins.

    srun itself returns the highest code of all ranks, 128 + signal for those that it killed.
    slurm/train.sbatch reads the file so that it can end with the code of the failure instead.
    """
    if path := environ.get("MPIPAR_EXIT_FILE"):
        with contextlib.suppress(OSError), open(path, "x") as file:
            file.write(f"{code}\n")
