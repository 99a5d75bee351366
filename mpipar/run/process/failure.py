"""One error block for a failed job: what went wrong, where, why, and what to do.

If several ranks fail at the same time, one reports and the others wait until its abort ends them.
Within a host the first one reports: it has taken a name that only one process can have. Hosts share
no names, nor do ranks that have not started MPI; there the lower number reports sooner.
"""

import contextlib
import errno
import socket
import sys
import traceback
from collections.abc import Mapping

from mpipar import errors
from mpipar.config.text import cut, printable
from mpipar.errors import EXIT_CODES, UserError
from mpipar.run.process.streams import above

MOST_TEXT = 4000  # characters of a sentence in the block: a file's name or a value may be long
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
REPORT_IT = "report this with the command line and the traceback"


def report(error: BaseException, where: str, saved: str = "") -> tuple[int, str]:
    """Return (exit code, block) of an exception, with a traceback unless the user caused it.

    An interrupt takes a single line. saved: the folder of the final weights, once the run has
    written them.
    """
    code, why, do, trace = errors.EXIT_INTERNAL, "", "", ""
    match error:
        case UserError():
            code, what = error.exit_code, error.problems
        case KeyboardInterrupt():
            code, what = errors.EXIT_INTERRUPTED, [str(error) or "interrupted (SIGINT)"]
            if saved:
                code, do = errors.EXIT_STOPPED, f"the weights are in {saved}"
        case BrokenPipeError():
            what = ["the program reading the output exited before all of it was written"]
            code = errors.EXIT_NO_READER
        case OSError() if error.errno in DISK_ERRORS:
            done = "read or written" if error.errno == errno.EIO else "written"
            what = [f"{error.filename or 'the output'} can't be {done}: {error.strerror}"]
            code = errors.EXIT_OUTPUT
        case _ if isinstance(error, BlockingIOError) or NO_THREAD in str(error):
            code, what = errors.EXIT_ENVIRONMENT, [NO_PROCESS]
        case _ if type(error).__module__ == "mpi4py.MPI" and str(error).startswith(TOO_LONG):
            code, what = errors.EXIT_ENVIRONMENT, [f"{error}: {LONG}"]
        case _:
            what, do = ["".join(traceback.format_exception_only(error)).strip()], REPORT_IT
            if isinstance(error, SystemExit):
                what = [f"sys.exit({error.code!r}) on this rank, while the others continue"]
            for frame in traceback.extract_tb(error.__traceback__)[-1:]:
                why = f"{frame.filename}:{frame.lineno} in {frame.name}"
            trace = "".join(traceback.format_exception(error))
    text = f"mpipar: stopped, exit code {code} ({EXIT_CODES[code]})"
    if code == errors.EXIT_INTERRUPTED:
        return code, f"{text}: {what[0]}, {where}\n"
    said = "\n".join(cut(problem, MOST_TEXT) for problem in what)
    for title, words in {"what": said, "where": where, "why": why, "do": do}.items():
        if words:
            shown = printable(words, sys.stderr).replace("\n", "\n" + " " * 10)
            text += f"\n  {title + ':':<8}{shown}"
    return code, f"{text}\n{trace}"


def show(block: str) -> None:
    """Print the block on stderr, after all earlier output."""
    with contextlib.suppress(OSError, ValueError):  # a closed stdout must not hide the block
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError), above(sys.stderr):
        sys.stderr.write(block)
        sys.stderr.flush()


def is_first(token: str) -> bool:
    """Return whether this rank is the first of its host to fail. token: the same on all ranks.

    Only one process can bind an abstract name of Linux. No file belongs to it, and it is free again
    when the process, which never closes this socket, has ended.
    """
    try:
        with socket.socket(socket.AF_UNIX) as claim:
            claim.bind(f"\0mpipar-{token}")
            claim.detach()
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def leave_code(environ: Mapping[str, str], code: int) -> None:
    """Write the job's exit code to the file that MPIPAR_EXIT_FILE names; the first rank wins.

    srun itself returns the highest code of all ranks, 128 + signal for those that it killed.
    slurm/train.sbatch reads the file so that it can end with the code of the failure instead.
    """
    if path := environ.get("MPIPAR_EXIT_FILE"):
        with contextlib.suppress(OSError), open(path, "x") as file:
            file.write(f"{code}\n")
