"""The run folder: a new or empty one, with `--resume` that of an earlier run, or one to read from.

Every command finds weights by `find_source`: those of a run, a folder of weights, or a checkpoint.
"""

import json
import os
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

from mpipar.config.run import RUNS, named_folder, traced_steps
from mpipar.config.text import counted
from mpipar.errors import DataError, OutputError, UsageError
from mpipar.run.checkpoint.formats import is_step
from mpipar.run.checkpoint.manifest import NAME, committed_steps
from mpipar.run.checkpoint.weight_files import instead_of_weights, weight_paths
from mpipar.run.checkpoint.weights import write_tokenizer_files
from mpipar.run.console.metrics import lines_of
from mpipar.run.files import no_links
from mpipar.run.files.bounded import built, parse_json, problems_as, read_text, recognize
from mpipar.run.files.no_links import replace_file, set_aside
from mpipar.run.files.settings import to_toml
from mpipar.run.process import lock
from mpipar.run.process.watchdog import HANG

CHECKPOINTS, WEIGHTS = "checkpoints", "weights"
CONFIG, SOURCES = "config.toml", "sources.json"  # the settings; what the run began with
LOG = "log.txt"
METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"  # a line per reported step
CSV, REPORT = "metrics.csv", "report.html"  # made from the other files when the run ends
RESULT = "result.json"  # exists once a run is complete


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
        if folder is None or not folder.exists() or not _content(folder):
            return []
    except OSError as error:
        return [f"{folder}: {error.strerror}; give another folder"]
    there = f", or resume the run that is there: --resume auto --out {folder}"
    cure = f"give a new --out{there if is_run(folder) else ''}"
    return [f"{folder} exists and is not empty; a run never overwrites another: {cure}"]


def open_run_folder(start, config, session, sources: Sources, beside: Mapping[str, bytes]) -> Path:
    """Create or reopen the run folder, and lock it; return it.

    start: where the run starts, found before the folder was locked: another job may have claimed it
    since. beside: files to be placed beside the weights. A trace that is to be written again is
    set aside. Only world rank 0 calls it. Raises OutputError and UsageError.
    """
    folder = Path(start.folder) if start.folder else named_folder(config.run)
    with said(folder or RUNS, "the run can't be written here"):
        if folder is None:
            folder = _make_numbered_folder()
        no_links.make_root(folder)
        session.lock(folder)
        if start.folder is None:
            if _content(folder):
                raise UsageError(folder_problems(config))
            text = json.dumps(asdict(sources), indent=1) + "\n"
            replace_file(SOURCES, [text.encode()], root=folder)
        elif newest_step(folder) != start.newest:
            raise UsageError(f"{folder}: another job has just resumed in it; start again")
        elif traced_steps(config.run.trace, start.step + 1, config.train.steps):
            set_aside(folder / "trace")
        no_links.remove_tree(folder, HANG)  # left by a job that was killed
        replace_file(CONFIG, [to_toml(config).encode()], root=folder)  # makes it a run folder
        write_tokenizer_files(beside, folder / WEIGHTS)
        return folder


def _content(folder: Path) -> list[str]:
    """Return the names in a folder, except those of a start that ended before config.toml."""
    begun = (SOURCES, f"{SOURCES}.partial", f"{CONFIG}.partial", lock.NAME, lock.NEXT)
    return [path.name for path in folder.iterdir() if path.name not in begun]


def read_sources(folder: Path) -> Sources:
    """Return what the run in a folder started from. Raises DataError if sources.json is damaged.

    A folder of a version that wrote no such file has nothing to compare with.
    """
    path = folder / SOURCES
    if not os.path.lexists(path):
        return Sources()
    with problems_as(DataError, str(path), "give a new --out"):
        return built(Sources, parse_json(read_text(SOURCES, root=folder)), "it")


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in a run folder, or 0."""
    return max((step for step, _ in committed_steps(folder / CHECKPOINTS)), default=0)


def truncate_after(folder: Path, step: int) -> list[str]:
    """Cut the run folder back to `step`; return notes for the user.

    Lines of later steps, damaged lines, and files made from them are removed; later checkpoints are
    kept aside. The checkpoint decides how far the run is. Raises OutputError. Only world rank 0
    calls it.
    """
    notes = []
    with said(folder, "the run can't resume here"):
        for name in filter(lambda name: os.path.lexists(folder / name), (METRICS, EVALUATIONS)):
            lines = [*lines_of(folder, name)]
            whole = [line for line, value in lines if value and value["step"] <= step]
            replace_file(name, whole, root=folder)
            if damaged := sum(value is None for _, value in lines):
                notes.append(
                    f"WARNING: {folder / name}: {counted(damaged, 'damaged line')} removed; the run"
                    " continues"
                )
        for name in (CSV, REPORT):
            no_links.remove(folder, name)
        for number, path in committed_steps(folder / CHECKPOINTS):
            if number > step:
                notes.append(f"a checkpoint of a later step is kept aside as {set_aside(path)}")
    return notes


def finished_step(folder: Path) -> int:
    """Return the step with which the run in this folder has ended; 0 if it has not."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return built(int, parse_json(read_text(RESULT, root=folder))["step"], "step")
    return 0


def keep(folder: Path, held: lock.RunLock, files) -> list[str]:
    """Check that the folder is still this run's, and sync its files to disk; return notes.

    files: `GrowingFile`s. One that was moved or removed is replaced by a new one.
    Raises OSError, and OutputError if another job now writes here. Only world rank 0 calls it.
    """
    notes = []
    if not os.path.lexists(folder):
        notes.append(
            f"WARNING: {folder} is gone (moved or removed?); the run continues in a new folder of"
            " this name; earlier checkpoints and traces are wherever the old one is"
        )
        no_links.make_root(folder)
    held.keep()
    return notes + [note for note in (file.sync() for file in files) if note]


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
    newest = max((int(p.name) for p in RUNS.iterdir() if p.name.isdecimal()), default=0)
    for folder in (RUNS / f"{number:04d}" for number in count(newest + 1)):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return folder
    raise AssertionError("some number is free")


def find_source(path: str, where: str) -> str:
    """Return the folder with config.json, or of a checkpoint, that a path refers to.

    A run refers to the weights that it wrote when it ended or stopped, or else to its newest
    checkpoint. Raises DataError, which begins with `where`, if there is neither.
    """
    folder = Path(path)
    if is_step(folder) and os.path.isdir(folder):
        return path
    options = [folder / WEIGHTS, folder]
    found = next((one for one in options if os.path.exists(one / "config.json")), None)
    steps = [] if found else committed_steps(folder / CHECKPOINTS)
    if found or steps:
        return str(found or steps[-1][1])
    cure = "give the run folder of mpipar train, a folder of weights, or a checkpoint"
    if kind := recognize(folder):
        raise DataError(f"{where}: is {kind}; give a folder with config.json and safetensors")
    if not os.path.exists(folder):
        raise DataError(f"{where}: there is no such folder, and nothing is downloaded; {cure}")
    raise DataError(
        f"{where}: no weights here (looked for config.json in {options[0]} and {options[1]}, and"
        f" for checkpoints in {folder / CHECKPOINTS}); {instead_of_weights(folder) or cure}"
    )


def tokenizer_folder(folder: str | None) -> Path | None:
    """Return the folder with the tokenizer of these weights or this checkpoint, None without."""
    if folder and is_step(folder):
        return Path(folder).parent.parent / WEIGHTS
    return Path(folder) if folder else None


def source_files(folder: str) -> list[Path]:
    """Return the files that identify these weights; for a checkpoint, its manifest.

    A manifest holds the digests of all other files, which are compared when they are loaded.
    """
    if is_step(folder):
        return [Path(folder) / NAME]
    return [Path(folder) / "config.json", *weight_paths(Path(folder))]
