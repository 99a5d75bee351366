"""Sources of weights for every command: a run, a folder of weights, or one checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from mpipar.checkpoint.formats import is_step
from mpipar.checkpoint.manifest import NAME, committed_steps
from mpipar.checkpoint.weight_files import instead_of_weights, weight_paths
from mpipar.errors import DataError
from mpipar.files.bounded import problems_as
from mpipar.files.recognize import recognize
from mpipar.run.folder import CHECKPOINTS, WEIGHTS


def find_source(path: str, where: str) -> str:
    """Return the folder with config.json, or of a checkpoint, that a path refers to.

    A run refers to the weights that it wrote when it ended or stopped, or else to its newest
    checkpoint. Raises DataError, which begins with `where`, if there is neither.
    """
    folder = Path(path)
    if is_step(folder) and os.path.isdir(folder):
        return path
    options = [own_weights(folder), folder]
    found = next((one for one in options if os.path.exists(one / "config.json")), None)
    steps = committed_steps(folder / CHECKPOINTS)
    if found is None and not steps:
        kind = recognize(folder)
        if kind:
            raise DataError(f"{where}: is {kind}; give a folder with config.json and safetensors")
        if not os.path.exists(folder):
            raise DataError(
                f"{where}: there is no such folder, and nothing is downloaded; give the"
                " run folder of mpipar train, a folder of weights, or a checkpoint"
            )
        raise DataError(
            f"{where}: no weights here (looked for config.json in {options[0]} and"
            f" {options[1]}, and for checkpoints in {folder / CHECKPOINTS}); "
            + (
                instead_of_weights(folder)
                or "give the run folder of mpipar train, a folder of weights, or a checkpoint"
            )
        )
    return str(found or steps[-1][1])


def tokenizer_folder(folder: str) -> Path:
    """Return the folder with the tokenizer of these weights or of this checkpoint."""
    return own_weights(Path(folder).parent.parent) if is_step(folder) else Path(folder)


def own_weights(run_folder: Path) -> Path:
    """Return the folder of weights in a run folder; DataError if it, or a file in it, is a link.

    Other folders of weights may contain links, as Hugging Face's cache does.
    """
    folder = run_folder / WEIGHTS
    inside = ()
    if os.path.isdir(folder) and not os.path.islink(folder):
        with problems_as(DataError, str(folder)):
            inside = [*folder.iterdir()]
    for path in (folder, *inside):
        if os.path.islink(path):
            raise DataError(
                f"{path}: is a symbolic link, but the weights of a run must be in its"
                " own folder; replace the link by its target, or give the target"
            )
    return folder


def source_files(folder: str) -> list[Path]:
    """Return the files that identify these weights; for a checkpoint, its manifest.

    A manifest holds the digests of all other files, which are compared when they are loaded.
    """
    if is_step(folder):
        return [Path(folder) / NAME]
    return [Path(folder) / "config.json", *weight_paths(Path(folder), folder)]
