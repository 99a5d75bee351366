"""The lock of a run folder: only one job at a time writes to it.

A lock is a file that names its owner. If two jobs start at the same moment, both try to create it
and only one can. A lock outlives an owner that was killed, so the next start finds out whether the
owner is gone, from the process table if it is on the same host, or from SLURM. Kernel locks (flock,
fcntl) would end with their process, but many shared file systems honour them only within a host or
not at all, so they are not used here.
"""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from mpipar.errors import OutputError, UsageError
from mpipar.files import no_links
from mpipar.files.bounded import parse_json, read_text
from mpipar.files.text import harmless
from mpipar.job.environment import host_name, started

NAME = "lock"
NAMES = re.compile(r"lock(\.next-[0-9a-f]{16})?")  # every file that this module creates
WRITE_SECONDS = 1.0  # an owner creates its lock, then writes to it
SLURM_SECONDS = 20.0  # how long a query to SLURM may take


class RunLock:
    """A lock that this process holds. `note`, for the log, names the owner it was taken from."""

    def __init__(self, folder: Path, text: str, note: str = ""):
        self.folder, self.text, self.note = folder, text, note

    def keep(self) -> None:
        """Lock the folder again if the lock is gone, as after the folder was moved and recreated.

        Raises OSError, and OutputError if another job holds the lock.
        """
        if not _create(self.folder, NAME, self.text):
            found = _text_of(self.folder, NAME)
            if found != self.text:
                raise OutputError(
                    f"{self.folder}: {_judged(found, os.environ)[0]} has the folder"
                    " now, so this job stops writing to it"
                )

    def release(self) -> None:
        """Remove the lock, unless another job has taken it over."""
        with contextlib.suppress(OSError, ValueError):
            if read_text(NAME, root=self.folder) == self.text:
                no_links.remove(self.folder, NAME)


def acquire(
    folder: Path, token: str, take_over: bool = False, environ: Mapping[str, str] = os.environ
) -> RunLock:
    """Lock the folder for the job with this token; raise UsageError, naming the owner, if locked.

    take_over: take the lock even if it is unknown whether its owner is gone.
    Raises OSError if the folder cannot be written to.
    """
    text = json.dumps(owner(token, environ))
    while not _create(folder, NAME, text):
        if found := _text_of(folder, NAME):
            return _taken_over(folder, text, found, take_over, environ)
    return RunLock(folder, text)


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
        "slurm_restarts": int(environ.get("SLURM_RESTART_COUNT") or 0),
    }


def _machine() -> list[str]:
    """Return this machine's current boot and the pid namespace seen from here."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, os.readlink("/proc/self/ns/pid")]
    return []


def why_gone(lock: dict, environ: Mapping[str, str]) -> str:
    """Return how this process knows that a lock's owner is gone; "" if it may still be running."""
    if lock["machine"] and lock["machine"] == _machine():
        return "" if started(lock["pid"]) == lock["started"] else "its process is gone"
    job = lock["slurm_job"]
    if not job or lock["slurm_cluster"] != environ.get("SLURM_CLUSTER_NAME", ""):
        return ""
    if job == environ.get("SLURM_JOB_ID"):
        restarts = int(environ.get("SLURM_RESTART_COUNT") or 0)
        return "SLURM has requeued this job" if restarts > lock["slurm_restarts"] else ""
    return f"SLURM job {job} is over" if _is_over(job) else ""


def is_held(folder: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this folder is locked by a job that may still be running."""
    try:
        found = _text_of(folder, NAME)
    except OSError:
        return True
    return bool(found) and not _judged(found, environ)[1]


def _is_over(job: str) -> bool:
    """Return whether SLURM no longer has this job; squeue lists all jobs that have not ended."""
    try:
        asked = subprocess.run(
            ["squeue", "-h", "-j", job, "-o", "%A"],
            capture_output=True,
            text=True,
            timeout=SLURM_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    if asked.returncode:
        return "Invalid job id" in asked.stderr
    return job not in asked.stdout.split()  # for an array job it lists the other tasks too


def _judged(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return (who wrote this lock, why that owner is gone or "")."""
    try:
        lock = parse_json(text)
        who = f"the job of process {lock['pid']} on {lock['host']}, started {lock['time']}" + (
            f", SLURM job {lock['slurm_job']}" if lock["slurm_job"] else ""
        )
        return harmless(who), why_gone(lock, environ)
    except (ValueError, KeyError, TypeError):
        return "an unknown job", ""


def _taken_over(
    folder: Path, text: str, found: str, take_over: bool, environ: Mapping[str, str]
) -> RunLock:
    """Take the lock from the owner `found`, or raise UsageError.

    The new lock is first written to a file beside the old one, which it then replaces. The file's
    name is derived from the old lock's text, so only one start at a time can create it and thereby
    gain the right to replace that lock. It then checks that the old lock is still the one it has
    judged. A start that is killed in between leaves its file there; whoever finds that owner gone
    too takes its place in the same way.
    """
    note, passed, last = "", [], found
    while True:
        who, reason = _judged(last, environ)
        reason = reason or ("--take-over" if take_over else "")
        if not reason:
            break
        note = note or f"took over the lock of {who} ({reason})"
        following = _following(last)
        if _create(folder, following, text):
            if _text_of(folder, NAME) == found:
                os.replace(folder / following, folder / NAME)
                for name in passed:  # only now: while the old lock was there, each had to stay
                    no_links.remove(folder, name)
                return RunLock(folder, text, note)
            no_links.remove(folder, following)
            who = "a job that started at the same time"
            break
        passed.append(following)
        if not (last := _text_of(folder, following)):  # its owner has just lost, or won the lock
            who = "a job that started at the same time"
            break
    raise UsageError(
        f"{folder}: {who} is writing to it, and only one job may: wait until it ends, choose"
        " another folder or, if you know that it is gone, add --take-over"
    )


def _following(text: str) -> str:
    """Return the name of the file of whoever takes over the lock with this text."""
    return f"{NAME}.next-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _create(folder: Path, name: str, text: str) -> bool:
    """Create the file with this text; return False if it exists."""
    try:
        with no_links.create(folder, name) as file:
            file.write(text.encode())
    except FileExistsError:
        return False
    return True


def _text_of(folder: Path, name: str) -> str:
    """Return a lock's text; "" if it was just released. Raises OSError if it is no regular file."""
    limit = time.monotonic() + WRITE_SECONDS
    while True:
        try:
            text = read_text(name, root=folder)
        except FileNotFoundError:
            return ""
        except ValueError:
            return "?"
        if text or time.monotonic() > limit:
            return text or "?"
        time.sleep(0.02)
