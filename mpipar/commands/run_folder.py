"""Where a run's files go: a new folder, or an empty one; nothing that exists is written over."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

from mpipar.config.reading import to_toml
from mpipar.errors import OutputError
from mpipar.job.failure import DISK_ERRORS

RUNS = Path("runs")  # of the folders that --out does not name


def named_folder(run) -> Path | None:
    """The folder that the user named; None stands for the next number in runs/."""
    if run.out is not None:
        return Path(run.out)
    return RUNS / run.run_name if run.run_name is not None else None


def folder_problems(config) -> list[str]:
    """Why the folder that the user named can't be written to, if so."""
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


def make_run_folder(config) -> Path:
    """Create the run folder and write config.toml; world rank 0 alone calls it. Raises
    OutputError.
    """
    folder = named_folder(config.run)
    try:
        if folder is None:
            folder = _make_numbered_folder()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"{folder or RUNS}: the run folder can't be made: {error.strerror}") from None
    return folder


def _make_numbered_folder() -> Path:
    """The next number in runs/; two runs that start at the same time get two folders."""
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
    """A disk that is full, over quota or broken is no defect of the program."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise OutputError(f"{folder}: can't be written to: {error.strerror}") from None
        raise
