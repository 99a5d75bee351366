"""The manifest of a checkpoint: what was saved, in which files, and which box each piece is.

A checkpoint is a folder `step-00001000` with `manifest.json` and one safetensors file per rank. It
gets its name by a single rename after everything is on disk, so a folder of that name is complete
unless it was damaged or changed afterwards. Everything in a manifest is checked here before
anything is allocated or opened because of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mpipar.checkpoint.boxes import Box, shape_of, tiling_problem
from mpipar.checkpoint.disk import DTYPES, digest_of
from mpipar.checkpoint.tensor_file import TensorFile
from mpipar.comm.grid import AXES
from mpipar.errors import DataError
from mpipar.files.bounded import read_json
from mpipar.files.text import shown
from mpipar.files.typed import built

FORMAT = 1  # newer formats are refused
NAME = "manifest.json"
GONE = "a checkpoint can't be read without its manifest: was it removed meanwhile?"
STEP_FOLDER = re.compile(r"step-(\d{8,15})")
PIECES_FILE = re.compile(r"pieces-\d{5,9}\.safetensors")
MASTERS = ("float32", "float64")  # types of master weights and moments
MOST_BYTES = 128 << 20  # of a manifest; a piece takes about 170
MOST_TENSORS = 100_000
MOST_ELEMENTS = 1 << 56  # of a tensor: its bytes still fit in 64 bits
MOST_AXES = MOST_KINDS = 16
COUNTER = 1 << 53


class Tensor(NamedTuple):
    """A full tensor: its logical shape, and the type of its masters and moments."""

    shape: tuple[int, ...]
    dtype: str


class File(NamedTuple):
    """A file of pieces: its size, and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


class Scale(NamedTuple):
    """The state of the loss scale."""

    value: float
    good: int
    skipped: int


class Piece(NamedTuple):
    """A box of one kind (master, m, v) of a tensor, stored in `file` under the name `key`."""

    file: str
    key: str
    tensor: str
    kind: str
    box: Box


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    config: the run's configuration as TOML. layout: {axis: ranks}, and schedule: its name, of the
    run that wrote it; a reader needs neither. loss_scale: the entries of a Scale. data: the
    fingerprint of the data. tensors, files: by name. pieces: they cover each kind of each tensor
    exactly once.
    """

    step: int
    config: str
    layout: dict[str, int]
    schedule: str
    loss_scale: dict
    data: dict
    tensors: dict[str, Tensor]
    files: dict[str, File]
    pieces: tuple[Piece, ...]
    format: int = FORMAT

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of state, sorted: master, and the moments that the optimizer has."""
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
    Raises DataError if the folder cannot be read, or if it or one of them is a link.
    """
    try:
        found = [(STEP_FOLDER.fullmatch(path.name), path) for path in folder.iterdir()]
        links = [
            path
            for path in (folder, *(path for match, path in found if match))
            if path.is_symlink()
        ]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}") from None
    if links:
        raise DataError(
            f"{links[0]}: is a symbolic link, but a run's checkpoints must be in its"
            " own folder; replace the link by its target"
        )
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())


def read_manifest(step_folder: Path) -> Manifest:
    """Return the manifest of a checkpoint whose files all exist with their sizes.

    Digests are checked when a file is read. Raises DataError that names what is wrong.
    """
    path = Path(step_folder) / NAME
    cure = "" if os.path.lexists(path) else GONE
    content = read_json(NAME, cure=cure, most_bytes=MOST_BYTES, root=path.parent)
    try:
        _check_format(path, content)
        manifest = _manifest(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = error if type(error) is ValueError else repr(error)
        raise DataError(f"{path}: is not the manifest of a checkpoint: {why}") from None
    match = STEP_FOLDER.fullmatch(path.parent.resolve().name)
    wrong = (
        [f"{path}: is of step {manifest.step}, but its folder is of another"]
        if (match and int(match[1]) != manifest.step)
        else []
    )
    wrong += file_problems(path.parent, manifest.files)
    if wrong:
        raise DataError(wrong)
    return manifest


def _check_format(path: Path, content: dict) -> None:
    """Raise DataError for a newer format, ValueError for another one or a wrong digest."""
    found = content["format"]
    if type(found) is int and found > FORMAT:
        raise DataError(
            f"{path}: has format {found}, but this version of mpipar reads {FORMAT}:"
            " it was written by a newer mpipar; use that one"
        )
    if found != FORMAT:
        raise ValueError(f"its format is {shown(found)}, not {FORMAT}")
    if content.pop("sha256") != _digest(content):
        raise ValueError("its content does not match its digest")


def _manifest(content: dict) -> Manifest:
    """Return a Manifest of entries that are all of the right type, in range, and consistent."""
    config = content["config"]
    if type(config) is not str:
        raise ValueError(f"config is {shown(config)}")
    found = built(Manifest, content | {"config": ""}, "it")  # every other text has one line
    if unknown := sorted(found.layout.keys() - {*AXES}):
        raise ValueError(
            f"its layout has the axis {shown(unknown[0])}, which this version of"
            f" mpipar does not know; it knows {', '.join(AXES)}"
        )
    found = replace(found, config=config, layout={axis: found.layout.get(axis, 1) for axis in AXES})
    if len(found.tensors) > MOST_TENSORS or len(found.kinds) > MOST_KINDS:
        raise ValueError(
            f"{len(found.tensors)} tensors or {len(found.kinds)} kinds of state are"
            f" more than {MOST_TENSORS} or {MOST_KINDS}"
        )
    scale = built(Scale, found.loss_scale, "loss_scale")
    if not scale.value > 0:
        raise ValueError(f"loss_scale is {scale.value}")
    for number in (found.step, *found.layout.values(), scale.good, scale.skipped):
        if not 0 <= number < COUNTER:
            raise ValueError(f"{number} is not a whole number from 0 to 2**53")
    for name, (shape, dtype) in found.tensors.items():
        if (
            dtype not in MASTERS
            or not 0 < len(shape) <= MOST_AXES
            or min(shape) < 1
            or (math.prod(shape) > MOST_ELEMENTS)
        ):
            raise ValueError(
                f"tensor {shown(name)} has the type {shown(dtype)} and the shape {shown(shape)}"
            )
    for name in found.files:
        if not PIECES_FILE.fullmatch(name):  # a match is a file in this folder
            raise ValueError(f"{shown(name)} is not the name of a file of pieces")
    for problem in piece_problems(found.tensors, found.files, found.pieces):
        raise ValueError(problem)
    return found


def piece_problems(tensors, files, pieces) -> list[str]:
    """Return what is wrong with the pieces: unknown files or tensors, or no tiling."""
    kinds = {piece.kind for piece in pieces}
    boxes = {(name, kind): [] for name in tensors for kind in kinds}
    for piece in pieces:
        if piece.file not in files or (piece.tensor, piece.kind) not in boxes:
            return [
                (
                    f"{shown(piece.key)} is a piece of {shown(piece.tensor)} in"
                    f" {shown(piece.file)}, but one of them is unknown"
                )
            ]
        boxes[piece.tensor, piece.kind].append(piece.box)
    if not boxes:
        return ["it has no pieces"]
    found = (
        (name, kind, tiling_problem(tensors[name].shape, own))
        for (name, kind), own in boxes.items()
    )
    return [
        f"tensor {shown(name)} ({shown(kind)}): {problem}"
        for name, kind, problem in found
        if problem
    ]


def file_problems(folder: Path, files: dict[str, File]) -> list[str]:
    """Return files that are missing, not regular files in this folder, or of another size."""
    wrong = []
    for name, expected in files.items():
        path = folder / name
        try:
            status = path.lstat()
        except OSError as error:
            wrong.append(f"{path}: {error.strerror}")
            continue
        if not stat.S_ISREG(status.st_mode):
            wrong.append(f"{path}: is not a regular file")
        elif status.st_size != expected.bytes:
            wrong.append(f"{path}: has {status.st_size:,} bytes, {expected.bytes:,} were written")
    return wrong


def digest_problem(path: Path, expected: str) -> str:
    """Return why a file does not have the expected SHA-256, or ""."""
    try:
        found = digest_of(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return (
        ""
        if found == expected
        else (f"{path}: is damaged: its SHA-256 is {found}, {expected} was written")
    )


def tensor_problems(path: Path, pieces, tensors) -> list[str]:
    """Return pieces that a file lacks, or has with another shape or type than in the manifest."""
    wrong = []
    try:
        with TensorFile(path) as file:
            for piece in pieces:
                expected = [*shape_of(piece.box)], DTYPES[tensors[piece.tensor].dtype]
                entry = file.tensors.get(piece.key)
                found = entry and ([*entry.shape], entry.dtype)
                if found != expected:
                    wrong.append(
                        f"{path}: tensor {piece.tensor} ({piece.kind}): the piece"
                        f" {piece.key} is {found or 'missing'}, not {expected}"
                    )
    except (OSError, ValueError) as error:
        return [f"{path}: {error}"]
    return wrong


def damage(step_folder: Path) -> list[str]:
    """Return everything wrong with a checkpoint, reading every byte; [] if it can be loaded."""
    try:
        manifest = read_manifest(step_folder)
    except DataError as error:
        return error.problems
    folder, wrong = Path(step_folder), []
    for name, expected in manifest.files.items():
        own = [piece for piece in manifest.pieces if piece.file == name]
        problem = digest_problem(folder / name, expected.sha256)
        wrong += [problem] if problem else tensor_problems(folder / name, own, manifest.tensors)
    strangers = {path.name for path in folder.iterdir()} - {NAME, *manifest.files}
    return wrong + [
        f"{folder / name}: does not belong to the checkpoint" for name in sorted(strangers)
    ]
