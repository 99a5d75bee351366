"""A prepared folder: token files, the tokenizer that made them, and dataset.json about both.

`mpipar data prepare` writes it (see `mpipar.data.prepare`), `mpipar train --data FOLDER` reads it.
Everything in dataset.json is checked here before any file is opened because of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mpipar.data.token_file import Piece, TokenFiles
from mpipar.data.tokenizer import MOST_IDS, files_digest, read_files
from mpipar.errors import DataError
from mpipar.files.bounded import open_regular, parse_json, problems_as, read_bytes
from mpipar.files.typed import built

NAME = "dataset.json"
FORMAT = 1  # newer formats are refused
PARTS = ("train", "val")
FILE = re.compile(r"(train|val)(-\d{5})?\.bin")  # earlier versions wrote several for each part
DTYPES = ("uint16", "uint32")
MOST_BYTES = 64 << 20  # of dataset.json; each file takes about 200


@dataclass(frozen=True)
class File:
    """A token file without a header. documents: how many end in it."""

    name: str
    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class Dataset:
    """The content of dataset.json. end_of_text: id after each document. tokenizer: its digest."""

    format: int
    dtype: str
    vocab_size: int
    end_of_text: int
    tokenizer: str
    files: tuple[File, ...]

    def part(self, name: str) -> list[File]:
        """Return the files of `train` or `val`, in order."""
        return [file for file in self.files if file.name.startswith(name)]

    def text(self) -> str:
        """Return the text of dataset.json."""
        return json.dumps(asdict(self), indent=1) + "\n"


def is_dataset(path) -> bool:
    """Return whether a path is a prepared folder."""
    return os.path.lexists(os.path.join(path, NAME))


def read_dataset(folder: Path) -> tuple[Dataset, str]:
    """Return the content of dataset.json and the SHA-256 of its text; DataError if invalid."""
    path = folder / NAME
    with problems_as(DataError, str(path)):
        content = read_bytes(path, most_bytes=MOST_BYTES)
        found = parse_json(content.decode())
        if (
            isinstance(found, dict)
            and type(found.get("format")) is int
            and found["format"] > FORMAT
        ):
            raise ValueError(f"has format {found['format']}, but this version reads {FORMAT}")
        found = built(Dataset, found, "dataset")
        if wrong := _problems(found):
            raise ValueError(wrong[0])
    return found, hashlib.sha256(content).hexdigest()


def _problems(found: Dataset) -> list[str]:
    """Return what is wrong with values that have the right types."""
    size, names = found.vocab_size, [file.name for file in found.files]
    checks = {
        f"has format {found.format}; {FORMAT} is supported": found.format == FORMAT,
        f"names the dtype {found.dtype!r}; {' and '.join(DTYPES)} are supported": found.dtype
        in DTYPES,
        f"names a vocabulary of {size:,}; 2 to {MOST_IDS:,} are supported": 1 < size <= MOST_IDS,
        "has files without tokens": all(file.tokens > 0 for file in found.files),
        "does not name train.bin and val.bin, each once": names == sorted(set(names))
        and all(map(FILE.fullmatch, names))
        and all(map(found.part, PARTS)),
    }
    return [wrong for wrong, is_right in checks.items() if not is_right]


def open_dataset(folder: Path, vocab_size: int, thorough: bool):
    """Return (training tokens, held-out tokens, Dataset) of a prepared folder, sizes checked.

    vocab_size: of the model. thorough: also read everything once, and compare all digests.
    Raises DataError with all problems of the files.
    """
    found, digest = read_dataset(folder)
    # The table of a model may lack tokens that were added to its tokenizer: each id is compared.
    wrong, least = [], min(found.vocab_size, vocab_size)
    try:
        if files_digest(read_files(folder)) != found.tokenizer:
            wrong.append(
                f"--data {folder}: the tokenizer is not the one that made the tokens;"
                f" prepare the data again"
            )
    except DataError as error:
        wrong += error.problems
    parts = []
    for part in PARTS:
        pieces = [
            _open(folder, file, np.dtype(found.dtype).newbyteorder("<"), wrong)
            for file in found.part(part)
        ]
        parts.append(None if wrong else TokenFiles(pieces, least, digest))
    if wrong:
        raise DataError(wrong)
    if thorough:
        for part, tokens in zip(PARTS, parts, strict=True):
            tokens.check([file.sha256 for file in found.part(part)])
            if least < found.vocab_size:
                tokens.check()
    return *parts, found


def _open(folder: Path, stated: File, dtype, wrong: list[str]) -> Piece | None:
    """Return the tokens of one file; a file of another size is a problem."""
    path = folder / stated.name
    try:
        with problems_as(DataError, f"--data {path}"):
            file = open_regular(path)
    except DataError as error:
        wrong += error.problems
        return None
    size, due = os.fstat(file.fileno()).st_size, stated.tokens * dtype.itemsize
    if size != due:
        wrong.append(
            f"--data {path}: has {size:,} bytes; {NAME} says {stated.tokens:,} tokens"
            f" ({due:,} bytes of {dtype.name})"
        )
    return Piece(file, 0, 0, stated.tokens, dtype)
