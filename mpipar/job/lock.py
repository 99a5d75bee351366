"""The lock of a run folder: one job at a time writes into it.

A lock is a file that names its owner. Two starts at the same moment both try to create it, and only
one can. A lock outlives an owner that was killed, so the next start decides whether the owner is
gone. It asks the process table of the same host, or SLURM. The locks of the kernel (flock, fcntl)
would end with their process. But many shared disks keep them for one host only, or not at all. So
nothing here asks for one.
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
NAMES = re.compile(r"lock(\.next-[0-9a-f]{16})?")  # of all files that this module makes
WRITE_SECONDS = 1.0  # an owner creates its lock and then writes into it
SLURM_SECONDS = 20.0  # how long a question to SLURM may take


class RunLock:
    """A lock that this process holds. `note` says whose lock it has taken over, for the log."""

    def __init__(self, folder: Path, text: str, note: str = ""):
        self.folder, self.text, self.note = folder, text, note

    def keep(self) -> None:
        """Lock the folder again if it has lost the lock, as when it was moved and made anew.

        Raises OSError, and OutputError if another job has it.
        """
        if not _create(self.folder, NAME, self.text):
            found = _text_of(self.folder, NAME)
            if found != self.text:
                raise OutputError(f"{self.folder}: {_judged(found, os.environ)[0]} has the folder"
                                  " now, so this job writes no more into it")

    def release(self) -> None:
        """Remove the lock, unless another job has taken it over."""
        with contextlib.suppress(OSError, ValueError):
            if read_text(NAME, root=self.folder) == self.text:
                no_links.remove(self.folder, NAME)


def acquire(folder: Path, token: str, take_over: bool = False,
            environ: Mapping[str, str] = os.environ) -> RunLock:
    """Lock the folder for the job with this token, or raise UsageError and name the owner.

    take_over: take the lock also of an owner of which nobody knows whether it is gone.
    Raises OSError if the folder cannot be written to.
    """
    text = json.dumps(owner(token, environ))
    while not _create(folder, NAME, text):
        if found := _text_of(folder, NAME):
            return _taken_over(folder, text, found, take_over, environ)
    return RunLock(folder, text)


def owner(token: str, environ: Mapping[str, str]) -> dict:
    """Return what a lock says of this process."""
    return {
        "token": token, "host": host_name(environ), "machine": _machine(), "pid": os.getpid(),
        "started": started(os.getpid()), "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "slurm_job": environ.get("SLURM_JOB_ID", ""),
        "slurm_cluster": environ.get("SLURM_CLUSTER_NAME", ""),
        "slurm_restarts": int(environ.get("SLURM_RESTART_COUNT") or 0),
    }


def _machine() -> list[str]:
    """This boot of this machine, and the numbering of its processes that is seen from here."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return [boot, os.readlink("/proc/self/ns/pid")]
    return []


def why_gone(lock: dict, environ: Mapping[str, str]) -> str:
    """Return how this process knows that the owner of a lock is gone; "" if it may still be there.
    """
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
    """Return whether a job has this folder's lock, and may still be there."""
    try:
        found = _text_of(folder, NAME)
    except OSError:
        return True
    return bool(found) and not _judged(found, environ)[1]


def _is_over(job: str) -> bool:
    """Whether SLURM says that it no longer has this job. squeue lists all that have not ended."""
    try:
        asked = subprocess.run(["squeue", "-h", "-j", job, "-o", "%A"], capture_output=True,
                               text=True, timeout=SLURM_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    if asked.returncode:
        return "Invalid job id" in asked.stderr
    return job not in asked.stdout.split()  # of an array it lists the other tasks too


def _judged(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """(who has written this lock, why that owner is gone or "")."""
    try:
        lock = parse_json(text)
        who = (f"the job of process {lock['pid']} on {lock['host']}, started {lock['time']}"
               + (f", SLURM job {lock['slurm_job']}" if lock["slurm_job"] else ""))
        return harmless(who), why_gone(lock, environ)
    except (ValueError, KeyError, TypeError):
        return "an unknown job", ""


def _taken_over(folder: Path, text: str, found: str, take_over: bool,
                environ: Mapping[str, str]) -> RunLock:
    """The lock, taken from the owner `found`, or UsageError.

    The new lock waits in a file beside the old one and then replaces it. The file's name follows
    from the old lock's text. Only one start at a time can create it, and has the right to replace
    that lock. It looks again whether the old lock is still the one that it has judged. A start that
    was killed meanwhile leaves its file. Who finds that owner gone, too, takes its place in the
    same way.
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
                for name in passed:  # nobody may find them gone while the old lock is there
                    no_links.remove(folder, name)
                return RunLock(folder, text, note)
            no_links.remove(folder, following)
            who = "a job that started at the same time"
            break
        passed.append(following)
        if not (last := _text_of(folder, following)):  # its owner has just lost, or got the lock
            who = "a job that started at the same time"
            break
    raise UsageError(
        f"{folder}: {who} writes into it, and one job at a time may: wait for its end, give"
        " another folder or, if you know that it is gone, add --take-over")


def _following(text: str) -> str:
    """The name of the file of whoever takes over the lock with this text."""
    return f"{NAME}.next-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _create(folder: Path, name: str, text: str) -> bool:
    """Create the file with this text; False if there is one."""
    try:
        with no_links.create(folder, name) as file:
            file.write(text.encode())
    except FileExistsError:
        return False
    return True


def _text_of(folder: Path, name: str) -> str:
    """The text of a lock; "" if it has just been released. Raises OSError if it is no file."""
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
