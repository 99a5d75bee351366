"""Where weights come from: a run, a folder of weights, or one checkpoint; for every command."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from mpipar.checkpoint.formats import is_step
from mpipar.checkpoint.manifest import NAME, committed_steps
from mpipar.checkpoint.weight_files import weight_paths
from mpipar.commands.run_folder import CHECKPOINTS
from mpipar.data.fingerprint import EDGE
from mpipar.errors import DataError
from mpipar.files.bounded import open_regular, problems_as

WEIGHTS = "weights"  # the folder in a run folder


def find_source(path: str, where: str) -> str:
    """The folder with config.json, or of a checkpoint, that a path stands for.

    A run stands for the weights that it wrote when it ended or stopped, and without those for its
    newest checkpoint. Raises DataError, which begins with `where`, if there is neither.
    """
    folder = Path(path)
    if is_step(folder):
        return path
    options = [folder / WEIGHTS, folder]
    found = next((one for one in options if os.path.exists(one / "config.json")), None)
    steps = committed_steps(folder / CHECKPOINTS)
    if found is None and not steps:
        if not os.path.exists(folder):
            raise DataError(f"{where}: there is no such folder, and nothing is downloaded; give the"
                            " run folder of mpipar train, a folder of weights, or a checkpoint")
        raise DataError(f"{where}: no weights here (looked for config.json in {options[0]} and"
                        f" {options[1]}, and for checkpoints in {folder / CHECKPOINTS}); give the"
                        " run folder of mpipar train, a folder of weights, or a checkpoint")
    return str(found or steps[-1][1])


def companions_of(folder: str) -> Path:
    """The folder in which the tokenizer of these weights or of this checkpoint lies."""
    return Path(folder).parent.parent / WEIGHTS if is_step(folder) else Path(folder)


def source_facts(folder: str | None) -> dict[str, str]:
    """What ranks compare of the files that they start from: their sizes and their two ends."""
    if folder is None:
        return {}
    paths = [Path(folder) / NAME] if is_step(folder) else weight_paths(Path(folder), folder)
    sizes, digest = 0, hashlib.sha256()
    for path in paths:
        with problems_as(DataError, str(path)), open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(file.read(EDGE))
            file.seek(max(0, size - EDGE))
            digest.update(file.read(EDGE))
            sizes += size
    return {"weights": f"{sizes} bytes, {digest.hexdigest()}"}
