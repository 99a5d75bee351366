"""The lock of a run folder: only one job at a time writes to it.

A lock is a file that names its owner; of two jobs that start at the same moment, only one can
create it. A lock outlives an owner that was killed. The next start takes it over where it can be
sure: on the same host, boot and pid namespace the process table shows whether the owner is gone,
and SLURM requeues a job only after its end. Kernel locks (flock, fcntl) would end with their
process, but many shared file systems honour them only within a host or not at all.
"""

import contextlib
import json
import os
import re
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpipar.errors import OutputError, UsageError
from mpipar.files import no_links
from mpipar.files.bounded import read_text
from mpipar.job.environment import host_name, started

NAME = "lock"
NAMES = re.compile(r"lock(\.next)*")  # every file that this module creates
SHARED_SECONDS = 5.0  # how long a new file may take to become visible on another host


@dataclass(frozen=True)
class RunLock:
    """A lock that this process holds. `note`, for the log, names the owner it was taken from."""

    folder: Path
    text: str
    note: str

    def keep(self) -> None:
        """Lock the folder again if the lock is gone, as after the folder was moved and recreated.

        Raises OSError, and OutputError if another job holds the lock.
        """
        if not _create(self.folder, NAME, self.text):
            found = _text_of(self.folder, NAME)
            if found != self.text:
                who, _ = _judged(found, os.environ)
                raise OutputError(
                    f"{self.folder}: {who} has the folder now, so this job stops writing to it"
                )


def acquire(folder: Path, token: str, environ: Mapping[str, str] = os.environ) -> RunLock:
    """Lock the folder for the job with this token; raise UsageError, naming the owner, if locked.

    Raises OSError if the folder cannot be written to.
    """
    text = json.dumps(owner(token, environ))
    return RunLock(folder, text, _take(folder, NAME, text, environ))


def release(folder: Path, token: str) -> None:
    """Remove the lock of the job with this token; another job may have the folder by now."""
    with contextlib.suppress(OSError):
        if _facts(_text_of(folder, NAME)).get("token") == token:
            no_links.remove(folder, NAME)


def _take(folder: Path, name: str, text: str, environ: Mapping[str, str]) -> str:
    """Create a lock, or take it over; return a note about the owner it was taken from.

    Only who holds the lock NAME.next may replace the lock NAME, and does so by renaming the former.
    A start that is killed in between leaves NAME.next, which is taken over in the same way.
    """
    while not _create(folder, name, text):
        found = _text_of(folder, name)
        who, reason = _judged(found, environ)
        if not reason:
            if not os.path.lexists(folder / name):  # it was just released
                continue
            raise UsageError(
                f"{folder}: {who} is writing to it, and only one job may: wait until it ends,"
                " choose another folder or, if you know that it is gone, type"
                f" rm {shlex.quote(str(folder / name))}"
            )
        _take(folder, following := f"{name}.next", text, environ)
        if _text_of(folder, name) == found:
            os.replace(folder / following, folder / name)
            return f"took over the lock of {who} ({reason})"
        no_links.remove(folder, following)
    return ""


def check_seen(folder: Path, token: str) -> None:
    """Raise OutputError if this host does not see the lock that world rank 0 holds there."""
    limit = time.monotonic() + SHARED_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if _facts(_text_of(folder, NAME)).get("token") == token:
                return
        if time.monotonic() > limit:
            raise OutputError(
                f"{folder}: host {host_name(os.environ)} does not see what world rank 0 writes"
                " there; use an --out on a file system that all hosts share, under the same path on"
                " all of them"
            )
        time.sleep(0.1)


def owner(token: str, environ: Mapping[str, str]) -> dict:
    """Return what a lock records about this process."""
    return {
        "token": token,
        "host": host_name(environ),
        "machine": _machine(),
        "pid": os.getpid(),
        "started": started(os.getpid()),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "slurm_job": environ.get("SLURM_JOB_ID", ""),
        "slurm_cluster": environ.get("SLURM_CLUSTER_NAME", ""),
        "slurm_restarts": _restarts(environ),
    }


def _restarts(environ: Mapping[str, str]) -> int:
    """Return how often SLURM has requeued this job; 0 if an imitation of it gives no number."""
    text = environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def _machine() -> list[str]:
    """Return this host, its current boot, and the pid namespace seen from here."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [os.uname().nodename, boot, os.readlink("/proc/self/ns/pid")]
    return []


def _judged(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return (who wrote this lock, how it is known that this owner is gone, or "")."""
    lock, here, reason = _facts(text), owner("", environ), ""
    if lock.keys() != here.keys():
        return "an unknown job", ""
    job = lock["slurm_job"]
    if here["machine"] and lock["machine"] == here["machine"]:
        reason = "" if started(lock["pid"]) == lock["started"] else "its process is gone"
    elif job and all(lock[name] == here[name] for name in ("slurm_job", "slurm_cluster")):
        requeued = here["slurm_restarts"] > lock["slurm_restarts"]
        reason = "SLURM has requeued this job" if requeued else ""
    who = f"the job of process {lock['pid']} on {lock['host']}, started {lock['time']}"
    return who + (f", SLURM job {job}" if job else ""), reason


def _facts(text: str) -> dict:
    """Return what a lock says of its owner; {} if it was written half, or by something else."""
    with contextlib.suppress(ValueError):
        facts = json.loads(text)
        return facts if isinstance(facts, dict) else {}
    return {}


def _create(folder: Path, name: str, text: str) -> bool:
    """Create the file with this text; return False if it exists."""
    with contextlib.suppress(FileExistsError), no_links.create(folder, name) as file:
        file.write(text.encode())
        return True
    return False


def _text_of(folder: Path, name: str) -> str:
    """Return a lock's text; "" if it was just released. Raises OSError if it is no regular file."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return read_text(name, root=folder)
    return ""
