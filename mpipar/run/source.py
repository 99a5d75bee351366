"""Sources of weights for every command: a run, a folder of weights, or one checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from mpipar.errors import DataError
from mpipar.run.checkpoint.formats import is_step
from mpipar.run.checkpoint.manifest import NAME, committed_steps
from mpipar.run.checkpoint.weight_files import instead_of_weights, weight_paths
from mpipar.run.files.bounded import recognize
from mpipar.run.folder import CHECKPOINTS, WEIGHTS


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


def tokenizer_folder(folder: str) -> Path:
    """Return the folder with the tokenizer of these weights or of this checkpoint."""
    return Path(folder).parent.parent / WEIGHTS if is_step(folder) else Path(folder)


def source_files(folder: str) -> list[Path]:
    """Return the files that identify these weights; for a checkpoint, its manifest.

    A manifest holds the digests of all other files, which are compared when they are loaded.
    """
    if is_step(folder):
        return [Path(folder) / NAME]
    return [Path(folder) / "config.json", *weight_paths(Path(folder))]
