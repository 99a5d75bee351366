"""Where a run's files go: a new or an empty folder, so that no existing file is overwritten."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

from mpipar.config.reading import to_toml
from mpipar.errors import OutputError, UsageError
from mpipar.job import lock
from mpipar.job.failure import DISK_ERRORS

RUNS = Path("runs")  # parent of the folders that --out does not name


def named_folder(run) -> Path | None:
    """The folder that the user named, or None for the next number in runs/."""
    if run.out is not None:
        return Path(run.out)
    return RUNS / run.run_name if run.run_name is not None else None


def folder_problems(config) -> list[str]:
    """Why the folder that the user named cannot be written to; empty if it can."""
    folder = named_folder(config.run)
    try:
        if folder is None or not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return []
    except OSError as error:
        return [f"{folder}: {error.strerror}; give another folder"]
    other = "--run-name" if config.run.out is None else "--out"
    found = "exists and is not empty; a run never overwrites another"
    if not folder.is_dir():
        found = "is a file, and a run writes several"
    return [f"{folder} {found}: give a new {other}"]


def make_run_folder(config, session) -> Path:
    """Create and lock the run folder, and write config.toml. Raises OutputError and UsageError.

    Only world rank 0 calls it. Another start may take the folder that the user named at the same
    moment. So it looks again, under the lock, whether the folder is empty.
    """
    folder = named_folder(config.run)
    try:
        if folder is None:
            folder = _make_numbered_folder()
        folder.mkdir(parents=True, exist_ok=True)
        session.lock(folder)
        if [path.name for path in folder.iterdir()] != [lock.NAME]:
            raise UsageError(folder_problems(config))
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"{folder or RUNS}: the run folder can't be made: {error.strerror}") from None
    return folder


def _make_numbered_folder() -> Path:
    """Make the next number in runs/; two runs that start at the same time get two folders."""
    RUNS.mkdir(exist_ok=True)
    number = max((int(p.name) for p in RUNS.iterdir() if p.name.isdecimal()), default=0)
    while True:
        number += 1
        folder = RUNS / f"{number:04d}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder


@contextmanager
def full_disk_is_an_output_error(folder: Path):
    """Raise OutputError for a full, broken or over-quota disk: it is not the program's defect."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise OutputError(f"{folder}: can't be written to: {error.strerror}") from None
        raise
