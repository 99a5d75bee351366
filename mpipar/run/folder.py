"""The run folder: a new or empty one, or with `--resume` that of an earlier run."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mpipar.checkpoint.manifest import committed_steps
from mpipar.config.reading import to_toml, values_of
from mpipar.config.run import RUNS, named_folder
from mpipar.console import series
from mpipar.errors import DataError, OutputError, UsageError
from mpipar.files import no_links
from mpipar.files.bounded import parse_json, problems_as, read_text
from mpipar.files.replace import replace_file, replaced_files, set_aside
from mpipar.files.text import counted
from mpipar.job import lock
from mpipar.job.failure import DISK_ERRORS
from mpipar.job.watchdog import HANG

CHECKPOINTS, WEIGHTS = "checkpoints", "weights"
CONFIG, SOURCES = "config.toml", "sources.json"  # the settings; what the run began with
LOG = "log.txt"
METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"  # a line per reported step
CSV, REPORT = "metrics.csv", "report.html"  # made from the other files when the run ends
RESULT = "result.json"  # exists once a run is complete
GROWING = (LOG, METRICS, EVALUATIONS)
FOLDERS = (CHECKPOINTS, WEIGHTS, "trace", HANG, "tensorboard")


@dataclass(frozen=True)
class Sources:
    """What a run started from, which every later start in its folder uses too.

    init_from: the folder of its first weights; resumed: the checkpoint of another run; "" if none.
    digest: of whichever is given, see `digest_of_weights`. data: the fingerprint of the data.
    """

    init_from: str = ""
    digest: str = ""
    resumed: str = ""
    data: dict = field(default_factory=dict)


def is_run(folder: Path) -> bool:
    """Return whether a run has started in this folder."""
    return os.path.isfile(folder / CONFIG) or os.path.isdir(folder / CHECKPOINTS)


def folder_problems(config) -> list[str]:
    """Return why the folder that the user named cannot hold a new run; empty if it can."""
    folder = named_folder(config.run)
    try:
        if folder is None or not folder.exists() or (folder.is_dir() and not _content(folder)):
            return []
    except OSError as error:
        return [f"{folder}: {error.strerror}; give another folder"]
    if not folder.is_dir():
        return [f"{folder} is a file, but a run needs a folder: give a new --out"]
    cure = f", or resume it with --resume auto --out {config.run.out}"
    return [
        (
            f"{folder} exists and is not empty; a run never overwrites another: give a new"
            f" --out{cure if is_run(folder) else ''}"
        )
    ]


def make_run_folder(
    config, session, sources: Sources, beside: Mapping[str, bytes]
) -> tuple[Path, dict[str, bytes]]:
    """Create and lock the run folder; return it and what was written, for `keep`.

    beside: files to be placed beside the weights. Raises OutputError and UsageError.

    Only world rank 0 calls it. Another job may claim the folder that the user named at the same
    moment, so it checks once more, holding the lock, that the folder is empty.
    """
    folder = named_folder(config.run)
    with said(folder or RUNS, "the run folder can't be made"):
        if folder is None:
            folder = _make_numbered_folder()
        no_links.make_root(folder)
        session.lock(folder)
        if _content(folder):
            raise UsageError(folder_problems(config))
        first = (json.dumps(asdict(sources), indent=1) + "\n").encode()
        return folder, _write({SOURCES: first}, config, beside, folder)


def _write(first: dict[str, bytes], config, beside, folder: Path) -> dict[str, bytes]:
    """Write what a start leaves in its folder, and return it; config.toml makes it a run folder."""
    files = (
        first
        | {CONFIG: to_toml(config).encode()}
        | {f"{WEIGHTS}/{name}": content for name, content in beside.items()}
    )
    for name, content in files.items():
        replace_file(name, [content], root=folder)
    return files


def _content(folder: Path) -> list[str]:
    """Return the names in a folder, except those of a start that ended before config.toml."""
    begun = (SOURCES, f"{SOURCES}.partial", f"{CONFIG}.partial")
    return [
        path.name
        for path in folder.iterdir()
        if path.name not in begun and not lock.NAMES.fullmatch(path.name)
    ]


def read_sources(folder: Path) -> Sources:
    """Return what the run in a folder started from. Raises DataError if sources.json is damaged."""
    path = folder / SOURCES
    if not os.path.lexists(path):  # written by an older version
        with contextlib.suppress(OSError, ValueError):
            return Sources(values_of(read_text(CONFIG, root=folder)).get("init_from", ""))
        return Sources()
    with problems_as(DataError, str(path), "give a new --out"):
        found, due = parse_json(read_text(SOURCES, root=folder)), asdict(Sources())
        if not isinstance(found, dict) or {name: type(value) for name, value in found.items()} != {
            name: type(value) for name, value in due.items()
        }:
            raise ValueError(f"must be an object of {', '.join(due)}")
        return Sources(**found)


def resume_in(start, config, session, beside: Mapping[str, bytes]) -> tuple[Path, dict[str, bytes]]:
    """Lock a run folder and prepare it for resuming; return as `make_run_folder` does.

    start: where the run starts, found before the folder was locked. What an earlier start left at
    its end is set aside: errors, and a trace that will be written again. Only world rank 0 calls
    it. Raises OutputError and UsageError.
    """
    folder = Path(start.folder)
    with said(folder, "the run can't resume here"):
        session.lock(folder)
        check_own(folder)
        if newest_step(folder) != start.newest:
            raise UsageError(f"{folder}: another job has just resumed in it; start again")
        set_aside(folder / "errors")
        if config.run.trace:
            set_aside(folder / "trace")
        no_links.remove_tree(folder, HANG)  # left by a job that was killed
        first = {}
        with contextlib.suppress(FileNotFoundError, ValueError):  # an older version's, or damaged
            first[SOURCES] = read_text(SOURCES, root=folder).encode()
        return folder, _write(first, config, beside, folder)


def check_own(folder: Path) -> None:
    """Raise OutputError if files that the run writes to are links, pipes or other users' files."""
    wrong = []
    for name in filter(lambda name: os.path.lexists(folder / name), (*GROWING, *FOLDERS)):
        try:
            if name in GROWING:
                os.close(no_links.opened(folder, name, os.O_RDWR))
            else:
                with no_links.folder(folder, name, make=True):
                    pass
        except OSError as error:
            wrong.append(f"{folder}: the run can't resume here: {error.strerror}")
    if wrong:
        raise OutputError(wrong)


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in a run folder, or 0."""
    return max((step for step, _ in committed_steps(folder / CHECKPOINTS)), default=0)


def truncate_after(folder: Path, step: int) -> list[Path]:
    """Cut the run folder back to `step`; return notes for the user.

    Lines of later steps, an incomplete last line, and files made from them are removed; later
    checkpoints and a file with damaged lines are kept aside. The checkpoint decides how far the
    run is. Raises OutputError. Only world rank 0 calls it.
    """
    notes = []
    with said(folder, "the run can't resume here"):
        for name in (METRICS, EVALUATIONS):
            if os.path.lexists(folder / name):
                notes += _cut_lines(folder, name, step)
        for name in (CSV, REPORT):
            no_links.remove(folder, name)
        for number, path in committed_steps(folder / CHECKPOINTS):
            if number > step:
                notes.append(f"a checkpoint of a later step is kept aside as {set_aside(path)}")
    return notes


def _cut_lines(folder: Path, name: str, step: int) -> list[str]:
    """Keep a file's whole lines up to `step`; return a warning if lines were damaged."""
    damaged = []

    def kept():
        for number, (line, value) in enumerate(series.lines_of(folder, name), 1):
            if value is None:
                damaged.append(number)
            elif value["step"] <= step:
                yield line

    with replaced_files(folder) as create:
        create(name).writelines(kept())
        if not damaged:
            return []
        aside = set_aside(folder / name)
    return [
        (
            f"WARNING: {folder / name}: {counted(len(damaged), 'line')} damaged, the first is line"
            f" {damaged[0]:,}; the run continues without, and the original file is {aside}"
        )
    ]


def finished_step(folder: Path) -> int:
    """Return the step with which the run in this folder has ended; 0 if it has not."""
    try:
        step = parse_json(read_text(RESULT, root=folder))["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return step if type(step) is int else 0


def keep(folder: Path, written: Mapping[str, bytes], held: lock.RunLock, files) -> list[str]:
    """Check that the folder is still this run's, and restore what it has lost; return notes.

    written: what the start left in it. files: `GrowingFile`s, all of which are synced to disk.
    Raises OSError, and OutputError if another job now writes here. Only world rank 0 calls it.
    """
    notes = []
    if not os.path.lexists(folder):
        notes.append(
            f"WARNING: {folder} is gone (moved or removed?); the run continues in a new"
            " folder of this name; earlier checkpoints and traces are wherever the old one"
            " is"
        )
        no_links.make_root(folder)
    held.keep()
    gone = [name for name in written if not os.path.lexists(folder / name)]
    for name in gone:
        replace_file(name, [written[name]], root=folder)
    if gone and not notes:
        notes.append(f"WARNING: missing in {folder}, and restored: {', '.join(gone)}")
    return notes + [note for note in (file.sync() for file in files) if note]


def whereabouts(folder: Path, trained: bool = True) -> str:
    """Return which files a run that has ended has in its folder, and which are missing.

    trained: whether it took any step; otherwise it wrote no weights.
    """
    parts = ({"weights": WEIGHTS, "checkpoints": CHECKPOINTS} if trained else {}) | {
        "metrics": METRICS,
        REPORT: REPORT,
        CONFIG: CONFIG,
        LOG: LOG,
    }
    there = [part for part, name in parts.items() if os.path.lexists(folder / name)]
    text = f"{', '.join(there[:-1])} and {there[-1]} are in {folder}" if len(there) > 1 else ""
    missing = [part for part in parts if part not in there]
    return text + (f"\nWARNING: not in {folder}: {', '.join(missing)}" if missing else "")


def write_result(folder: Path, found: dict) -> None:
    """Write result.json, which says that the run has ended, and how. Raises OutputError."""
    with said(folder, "the result can't be written"):
        replace_file(RESULT, [(json.dumps(found, indent=1) + "\n").encode()], root=folder)


@contextmanager
def said(what: Path, problem: str):
    """Turn an OSError inside into an OutputError."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{what}: {problem}: {error.strerror}") from None


def _make_numbered_folder() -> Path:
    """Create the next number in runs/; two runs that start at the same time get two folders."""
    RUNS.mkdir(exist_ok=True)
    number = max((int(p.name) for p in RUNS.iterdir() if p.name.isdecimal()), default=0)
    while True:
        number += 1
        folder = RUNS / f"{number:04d}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return folder


@contextmanager
def full_disk_is_an_output_error(folder: Path):
    """Raise OutputError for a full, broken or read-only disk, which is no defect of the program."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_ERRORS or isinstance(error, PermissionError):
            raise OutputError(f"{folder}: can't be written to: {error.strerror}") from None
        raise
