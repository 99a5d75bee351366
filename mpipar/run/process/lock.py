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
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpipar.errors import OutputError, UsageError
from mpipar.run.files import no_links
from mpipar.run.files.bounded import read_text
from mpipar.run.process.environment import host_name, started

SLURM = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID")
NAME, NEXT = "lock", "lock.next"  # only who has created NEXT may replace a lock, by renaming it
SHARED_SECONDS = 5.0  # how long a new file may take to become visible on another host


@dataclass(frozen=True)
class RunLock:
    """A lock that this process holds. `note`, for the log, names the owner it was taken from."""

    folder: Path
    own: dict
    note: str = ""

    def keep(self) -> None:
        """Lock the folder again if the lock is gone, as after the folder was moved and recreated.

        Raises OSError, and OutputError if another job holds the lock.
        """
        if not _create(self.folder, NAME, self.own) and _read(self.folder, NAME) != self.own:
            who, _ = _judged(_read(self.folder, NAME), os.environ)
            raise OutputError(f"{self.folder}: {who} has the folder now, so this job ends")


def acquire(folder: Path, token: str, environ: Mapping[str, str] = os.environ) -> RunLock:
    """Lock the folder for the job with this token; raise UsageError, naming the owner, if locked.

    Raises OSError if the folder cannot be written to.
    """
    own = owner(token, environ)
    if _create(folder, NAME, own):
        return RunLock(folder, own)
    may_replace = _create(folder, NEXT, own)
    name = NAME if may_replace else NEXT
    who, reason = _judged(_read(folder, name), environ)
    if may_replace and reason:
        os.replace(folder / NEXT, folder / NAME)
        return RunLock(folder, own, f"took over the lock of {who} ({reason})")
    if may_replace:
        no_links.remove(folder, NEXT)
    raise UsageError(
        f"{folder}: {who} is writing to it, and only one job may: wait until it ends, choose"
        " another folder or, if you know that it is gone, type rm"
        f" {shlex.quote(f'{folder}/{name}')}"
    )


def release(folder: Path, token: str) -> None:
    """Remove the lock of the job with this token; another job may have the folder by now."""
    with contextlib.suppress(OSError):
        if _read(folder, NAME).get("token") == token:
            no_links.remove(folder, NAME)


def check_seen(folder: Path, token: str) -> None:
    """Raise OutputError if this host does not see the lock that world rank 0 holds there."""
    limit = time.monotonic() + SHARED_SECONDS
    while time.monotonic() < limit:
        with contextlib.suppress(OSError):
            if _read(folder, NAME).get("token") == token:
                return
        time.sleep(0.1)
    raise OutputError(
        f"{folder}: host {host_name(os.environ)} does not see what world rank 0 writes there; use"
        " an --out on a file system that all hosts share, under the same path on all of them"
    )


def owner(token: str, environ: Mapping[str, str]) -> dict:
    """Return what a lock records about this process. machine: host, its boot, pid namespace."""
    machine: list[str] = []
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = [os.uname().nodename, boot, os.readlink("/proc/self/ns/pid")]
    restarts = environ.get("SLURM_RESTART_COUNT", "")  # an imitation may give no number
    return {
        "token": token,
        "host": host_name(environ),
        "machine": machine,
        "pid": os.getpid(),
        "started": started(os.getpid()),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "slurm_job": " ".join(environ.get(name, "") for name in SLURM).strip(),
        "slurm_restarts": int(restarts) if restarts.isdecimal() else 0,
    }


def _judged(lock: dict, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return (who wrote this lock, how it is known that this owner is gone, or "")."""
    here, reason = owner("", environ), ""
    if lock.keys() != here.keys():
        return "an unknown job", ""
    if here["machine"] and lock["machine"] == here["machine"]:
        reason = "" if started(lock["pid"]) == lock["started"] else "its process is gone"
    elif lock["slurm_job"] and lock["slurm_job"] == here["slurm_job"]:
        requeued = here["slurm_restarts"] > lock["slurm_restarts"]
        reason = "SLURM has requeued this job" if requeued else ""
    return f"the job of process {lock['pid']} on {lock['host']}, started {lock['time']}", reason


def _create(folder: Path, name: str, own: dict) -> bool:
    """Create the file; return False if it exists."""
    with contextlib.suppress(FileExistsError), no_links.create(folder, name) as file:
        file.write(json.dumps(own).encode())
        return True
    return False


def _read(folder: Path, name: str) -> dict:
    """Return what a lock says of its owner; {} if it is gone, was written half, or is none.

    Raises OSError if it is no regular file.
    """
    with contextlib.suppress(FileNotFoundError, ValueError):
        found = json.loads(read_text(name, root=folder))
        return found if isinstance(found, dict) else {}
    return {}
