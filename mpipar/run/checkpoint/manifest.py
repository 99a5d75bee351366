"""The manifest of a checkpoint: what was saved, in which files, and which box each piece is.

A checkpoint is a folder `step-00001000` with `manifest.json` and one safetensors file per rank. It
gets its name by a single rename after everything is on disk, so a folder of that name is complete
unless it was damaged or changed afterwards. A manifest whose digest fits is what a save wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mpipar.comm.grid import AXES
from mpipar.config.text import shown
from mpipar.errors import DataError
from mpipar.layers.param import Box
from mpipar.run.files import no_links
from mpipar.run.files.bounded import built, open_regular, problems_as, read_json

FORMAT = 1  # newer formats are refused
NAME = "manifest.json"
SCALE = {"value", "good", "skipped"}  # what `LossScale.state` returns
STEP_FOLDER = re.compile(r"step-(\d{8,15})")
PIECES_FILE = re.compile(r"pieces-\d{5,9}\.safetensors")
MOST_BYTES = 128 << 20  # of a manifest; a piece takes about 170


# Buffer -> kind of what islands have in common, so that saved weights are the outer ones.
COMMON = {"outer": "master", "velocity": "outer_momentum"}


def saved_as(buffer: str, island: int | None) -> str:
    """Return the kind of a buffer of an island, each of which has its own; None: none exist."""
    return buffer if island is None else COMMON.get(buffer, f"{buffer}.island{island}")


def saved_kinds(buffers: Iterable[str], islands: int | None) -> tuple[str, ...]:
    """Return all kinds of a checkpoint, sorted. buffers: those of a run without islands."""
    if islands is None:
        return tuple(sorted(buffers))
    own = (saved_as(buffer, island) for buffer in buffers for island in range(islands))
    return tuple(sorted([*COMMON.values(), *own]))


class Tensor(NamedTuple):
    """A full tensor: its logical shape, and the type of its masters and moments."""

    shape: tuple[int, ...]
    dtype: str


class File(NamedTuple):
    """A file of pieces: its size, and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


class Piece(NamedTuple):
    """A box of one kind (see `saved_as`) of a tensor, stored in `file` under the name `key`."""

    file: str
    key: str
    tensor: str
    kind: str
    box: Box


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    config: the run's configuration as TOML. layout: {axis: ranks}, and schedule: its name, of the
    run that wrote it; a reader needs neither. loss_scale: that of the first island;
    further_scales: those of the others. data: the fingerprint of the data. tensors, files:
    by name. pieces: they cover each kind of each tensor exactly once.
    """

    step: int
    config: str
    layout: dict[str, int]
    schedule: str
    loss_scale: dict[str, float]
    data: dict
    tensors: dict[str, Tensor]
    files: dict[str, File]
    pieces: tuple[Piece, ...]
    format: int = FORMAT
    further_scales: tuple[dict[str, float], ...] = ()

    @property
    def scales(self) -> tuple[dict[str, float], ...]:
        """The loss scale of each island."""
        return (self.loss_scale, *self.further_scales)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of state, sorted: master, and all moments; a tensor may lack some of them."""
        return tuple(sorted({piece.kind for piece in self.pieces}))

    def text(self) -> str:
        """Return the content of manifest.json; its last entry is a digest of all the others."""
        content = vars(self) | {
            "tensors": {name: one._asdict() for name, one in self.tensors.items()},
            "files": {name: one._asdict() for name, one in self.files.items()},
            "pieces": [piece._asdict() for piece in self.pieces],
        }
        content["sha256"] = _digest(content)
        lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
        return "{\n" + ",\n".join(lines) + "\n}\n"


def _digest(content: dict) -> str:
    """Return the SHA-256 of a manifest's entries, however they are formatted."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def step_folder_name(step: int) -> str:
    """Return the name of a step's checkpoint folder."""
    return f"step-{step:08d}"


def pieces_file(world_rank: int) -> str:
    """Return the name of a rank's file of pieces."""
    return f"pieces-{world_rank:05d}.safetensors"


def committed_steps(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every committed checkpoint in `folder`, ascending; [] without it.

    They were complete when they were written; `read_manifest` and `damage` tell if they still are.
    Raises DataError if the folder cannot be read, or is a link; links in it are no checkpoints.
    """
    with problems_as(DataError, str(folder)), suppress(FileNotFoundError, NotADirectoryError):
        found = map(STEP_FOLDER.fullmatch, os.listdir(no_links.folder(folder.parent, folder.name)))
        steps = [(int(match[1]), folder / match[0]) for match in found if match]
        return sorted((step, path) for step, path in steps if stat.S_ISDIR(path.lstat().st_mode))
    return []


def read_manifest(step_folder: Path) -> Manifest:
    """Return the manifest of a checkpoint whose files all exist with their sizes.

    Digests are checked when a file is read. Raises DataError that names what is wrong.
    """
    path = Path(step_folder) / NAME
    content = read_json(NAME, most_bytes=MOST_BYTES, root=path.parent)
    with problems_as(DataError, f"{path}: is not the manifest of a checkpoint"):
        manifest = _manifest(content)
        wrong = file_problems(path.parent, manifest.files)
    if wrong:
        raise DataError(wrong)
    return manifest


def _manifest(content) -> Manifest:
    """Return a Manifest of what a save has written; ValueError if it is anything else."""
    if not isinstance(content, dict) or content.pop("sha256", "") != _digest(content):
        raise ValueError("its content does not match its digest")
    if content.get("format") != FORMAT:
        raise ValueError(
            f"its format is {shown(content.get('format'))}, this mpipar reads {FORMAT}"
        )
    found = built(Manifest, content | {"config": ""}, "it")  # every other text has one line
    if not found.tensors or any({*one} != SCALE for one in found.scales):
        raise ValueError("it lacks tensors, or values of a loss scale")
    return replace(
        found,
        config=str(content.get("config")),
        layout={axis: found.layout.get(axis, 1) for axis in AXES},
    )


def file_problems(folder: Path, files: dict[str, File]) -> list[str]:
    """Return files that are missing in a folder, or have another size there. Raises OSError."""
    sizes = {path.name: path.lstat().st_size for path in folder.iterdir()}
    return [
        f"{folder / name}: has {sizes.get(name, 'no')} bytes, {file.bytes} were written"
        for name, file in files.items()
        if sizes.get(name) != file.bytes
    ]


def digest_problem(path: Path, expected: str) -> str:
    """Return why a file, which must not be a link, does not have the expected SHA-256, or ""."""
    try:
        with open_regular(path.name, path.parent) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{path}: {error.strerror}"
    return (
        ""
        if found == expected
        else f"{path}: is damaged: its SHA-256 is {found}, {expected} was written"
    )


def damage(step_folder: Path) -> list[str]:
    """Return everything wrong with a checkpoint, reading every byte; [] if it can be loaded."""
    folder = Path(step_folder)
    try:
        files = read_manifest(folder).files
    except DataError as error:
        return error.problems
    return [
        text for name, file in files.items() if (text := digest_problem(folder / name, file.sha256))
    ]
