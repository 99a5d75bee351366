"""A prepared folder: token files, the tokenizer that made them, and dataset.json about both.

`mpipar data prepare` writes it (see `mpipar.run.data.prepare`), `mpipar train --data FOLDER` reads
it. Everything in dataset.json is checked here before any file is opened because of it.
"""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mpipar.errors import DataError, broken
from mpipar.run.data.token_file import Piece, TokenFiles
from mpipar.run.data.tokenizer import MOST_IDS, files_digest, read_files
from mpipar.run.files.bounded import open_regular, parse_json, problems_as, read_bytes
from mpipar.run.files.typed import built

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
    with problems_as(DataError, str(folder / NAME)):
        content = read_bytes(folder / NAME, most_bytes=MOST_BYTES)
        found = parse_json(content.decode())
        if isinstance(found, dict) and found.get("format") != FORMAT:
            raise ValueError(f"has format {found.get('format')!r}; this version reads {FORMAT}")
        found = built(Dataset, found, "dataset")
        size, names = found.vocab_size, [file.name for file in found.files]
        wrong = broken(
            (
                found.dtype not in DTYPES,
                f"names the dtype {found.dtype!r}; {' and '.join(DTYPES)} are supported",
            ),
            (
                not 1 < size <= MOST_IDS,
                f"names a vocabulary of {size:,}; 2 to {MOST_IDS:,} are supported",
            ),
            (any(file.tokens <= 0 for file in found.files), "has files without tokens"),
            (
                names != sorted(set(names))
                or not all(map(FILE.fullmatch, names))
                or not all(map(found.part, PARTS)),
                "does not name train.bin and val.bin, each once",
            ),
        )
        if wrong:
            raise ValueError(wrong[0])
    return found, hashlib.sha256(content).hexdigest()


def open_dataset(folder: Path, vocab_size: int, thorough: bool):
    """Return (training tokens, held-out tokens, Dataset) of a prepared folder, sizes checked.

    vocab_size: of the model. thorough: also read everything once, and compare all digests.
    Raises DataError with all problems of the files.
    """
    found, digest = read_dataset(folder)
    # The table of a model may lack tokens that were added to its tokenizer: each id is compared.
    least, wrong = min(found.vocab_size, vocab_size), []
    pieces = {file.name: _open(folder, file, np.dtype(found.dtype), wrong) for file in found.files}
    try:
        if files_digest(read_files(folder)) != found.tokenizer:
            wrong.append(
                f"--data {folder}: the tokenizer is not the one that made the tokens;"
                " prepare the data again"
            )
    except DataError as error:
        wrong += error.problems
    if wrong:
        raise DataError(wrong)
    parts = []
    for name in PARTS:
        files = found.part(name)
        tokens = TokenFiles([pieces[file.name] for file in files], least, digest)
        if thorough:
            tokens.check([file.sha256 for file in files])
            if least < found.vocab_size:
                tokens.check()
        parts.append(tokens)
    return *parts, found


def _open(folder: Path, stated: File, dtype: np.dtype, wrong: list[str]) -> Piece | None:
    """Return the tokens of one file; one that is missing or of another size is a problem."""
    path, due = folder / stated.name, stated.tokens * dtype.itemsize
    try:
        with problems_as(DataError, f"--data {path}"):
            file = open_regular(path)
            size = os.fstat(file.fileno()).st_size
            if size != due:
                raise ValueError(
                    f"has {size:,} bytes; {NAME} says {stated.tokens:,} tokens"
                    f" ({due:,} bytes of {dtype.name})"
                )
    except DataError as error:
        wrong += error.problems
        return None
    return Piece(file, 0, 0, stated.tokens, dtype.newbyteorder("<"))
