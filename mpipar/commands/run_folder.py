"""Where a run's files go: a new or an empty folder, or with `--resume` the folder of a run."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from contextlib import contextmanager
from pathlib import Path

from mpipar.checkpoint.manifest import committed_steps
from mpipar.config.reading import to_toml
from mpipar.config.run import RUNS, named_folder
from mpipar.errors import OutputError, UsageError
from mpipar.files.bounded import parse_json, read_text
from mpipar.files.replace import replace_file
from mpipar.job import lock
from mpipar.job.failure import DISK_ERRORS

CHECKPOINTS = "checkpoints"
METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"  # a line for each step they tell of
CSV, REPORT = "metrics.csv", "report.html"  # made from the other files when the run ends
RESULT = "result.json"  # exists once a run has done all that it had to do


def is_run(folder: Path) -> bool:
    """Whether a run has begun in this folder."""
    return os.path.isfile(folder / "config.toml") or os.path.isdir(folder / CHECKPOINTS)


def folder_problems(config) -> list[str]:
    """Why the folder that the user named cannot be a new run's; empty if it can."""
    folder = named_folder(config.run)
    try:
        if folder is None or not folder.exists() or (folder.is_dir() and not _content(folder)):
            return []
    except OSError as error:
        return [f"{folder}: {error.strerror}; give another folder"]
    other = "--run-name" if config.run.out is None else "--out"
    if not folder.is_dir():
        return [f"{folder} is a file, and a run writes several: give a new {other}"]
    cure = f", or go on in it with --resume auto {other} {config.run.out or config.run.run_name}"
    return [(f"{folder} exists and is not empty; a run never overwrites another: give a new"
             f" {other}{cure if is_run(folder) else ''}")]


def make_run_folder(config, session) -> Path:
    """Create and lock the run folder, and write config.toml. Raises OutputError and UsageError.

    Only world rank 0 calls it. Another start may take the folder that the user named at the same
    moment. So it looks again, under the lock, whether the folder is empty.
    """
    folder = named_folder(config.run)
    with said(folder or RUNS, "the run folder can't be made"):
        if folder is None:
            folder = _make_numbered_folder()
        folder.mkdir(parents=True, exist_ok=True)
        session.lock(folder)
        if _content(folder):
            raise UsageError(folder_problems(config))
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    return folder


def _content(folder: Path) -> list[str]:
    """The names in a folder, but for a lock: a run that had just begun may have left it."""
    return [path.name for path in folder.iterdir() if path.name not in (lock.NAME, lock.NEXT)]


def go_on_in(start, config, session) -> Path:
    """Lock the folder of a run and make it ready to go on. Raises OutputError and UsageError.

    start: where the run begins, found before the folder was locked. What an earlier start has left
    of its end is set aside: errors, and a trace that is written anew. Only world rank 0 calls it.
    """
    folder = Path(start.folder)
    with said(folder, "the run can't go on here"):
        session.lock(folder)
        if newest_step(folder) != start.newest:
            raise UsageError(f"{folder}: another job has just gone on in it; start again")
        set_aside(folder / "errors")
        if config.run.trace:
            set_aside(folder / "trace")
        replace_file(folder / "config.toml", [to_toml(config).encode()])
    return folder


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint in a run folder, or 0."""
    return max((step for step, _ in committed_steps(folder / CHECKPOINTS)), default=0)


def cut_behind(folder: Path, step: int) -> list[Path]:
    """Let the run folder end with `step`; return where later checkpoints are now.

    The lines of later steps go, and a line that is not whole, and what was made from them. Raises
    OutputError. Only world rank 0 calls it.
    """
    with said(folder, "the run can't go on here"):
        for path in filter(os.path.exists, (folder / METRICS, folder / EVALUATIONS)):
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            replace_file(path, (line.encode() for line in itertools.takewhile(
                lambda line: 0 < _step_of(line) <= step, lines)))
        for name in (CSV, REPORT):
            (folder / name).unlink(missing_ok=True)
        return [set_aside(path) for number, path in committed_steps(folder / CHECKPOINTS)
                if number > step]


def _step_of(line: str) -> int:
    """The step of a line of either file; 0 if it is not whole."""
    try:
        return json.loads(line)["step"] if line.endswith("\n") else 0
    except (ValueError, KeyError, TypeError):
        return 0


def finished_step(folder: Path) -> int:
    """The step with which the run in this folder has ended; 0 if it has not."""
    try:
        step = parse_json(read_text(folder / RESULT))["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return step if type(step) is int else 0


def write_result(folder: Path, found: dict) -> None:
    """Write result.json, which says that the run has ended, and how. Raises OutputError."""
    with said(folder, "the result can't be written"):
        replace_file(folder / RESULT, [(json.dumps(found, indent=1) + "\n").encode()])


def set_aside(path: Path) -> Path | None:
    """Give a file or folder the first free name of `path.aside-1` and so on, if it exists."""
    if not path.exists():
        return None
    for number in itertools.count(1):
        other = path.with_name(f"{path.name}.aside-{number}")
        if not other.exists():
            return path.rename(other)
    raise AssertionError("some number is free")


@contextmanager
def said(what: Path, problem: str):
    """Raise OutputError for an OSError inside."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{what}: {problem}: {error.strerror}") from None


def _make_numbered_folder() -> Path:
    """Make the next number in runs/; two runs that start at the same time get two folders."""
    RUNS.mkdir(exist_ok=True)
    number = max((int(p.name) for p in RUNS.iterdir() if p.name.isdecimal()), default=0)
    while True:
        number += 1
        folder = RUNS / f"{number:04d}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
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
