"""A prepared folder: the tokens of documents, the tokenizer that made them, and dataset.json.

`mpipar data prepare` writes it and `mpipar train --data FOLDER` reads it. Text is read once to
encode it, and once more before if a tokenizer is trained on it. Only a few parts of the text are in
memory at a time.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mpipar.config.text import shown
from mpipar.errors import DataError
from mpipar.run.data.documents import HEAD, LONGEST, is_held_out, read_documents
from mpipar.run.data.tokenizer import (
    END,
    ENDS,
    MOST_IDS,
    SETTINGS,
    TOKENIZER,
    Tokenizer,
    byte_level,
    byte_tokenizer,
    files_digest,
    library_of,
    load_tokenizer,
    settings_file,
)
from mpipar.run.files.bounded import built, parse_json, problems_as, read_bytes
from mpipar.run.files.no_links import replace_file

NAME, FORMAT = "dataset.json", 1
PARTS = ("train.bin", "val.bin")
DTYPES = ("uint16", "uint32")
WIDE = 1 << 16  # ids that fit in 16 bits
BATCH = 4 * LONGEST  # characters of several parts, for the library's threads
BYTES, TRAIN = "bytes", "train:"  # what may name a tokenizer besides a path


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


def is_dataset(path) -> bool:
    """Return whether a path is a prepared folder."""
    return os.path.lexists(os.path.join(path, NAME))


def read_dataset(folder: Path) -> tuple[Dataset, str]:
    """Return the content of dataset.json and the SHA-256 of its text; DataError if invalid."""
    with problems_as(DataError, str(folder / NAME)):
        content = read_bytes(folder / NAME)
        found = built(Dataset, parse_json(content.decode()), "dataset")
        kind = (found.format, tuple(file.name for file in found.files), found.dtype in DTYPES)
        if kind != (FORMAT, PARTS, True) or not 1 < found.vocab_size <= MOST_IDS:
            raise ValueError(
                f"describes other data than {' and '.join(PARTS)} of {' or '.join(DTYPES)}, as this"
                " version writes them; prepare the data again"
            )
    return found, hashlib.sha256(content).hexdigest()


class Texts:
    """Text files, and the separator of documents in them (None: each file is a document).

    progress(work, bytes, unit): a progress line. seen: how often each separator occurs in the text.
    """

    def __init__(self, files: list[Path], separator: str | None, progress: Callable):
        self.files, self.separator, self.progress = files, separator, progress

    def documents(self, work: str) -> Iterator[tuple[str, bool]]:
        """Yield (text, whether a document ends with it). work: why they are read, in a word."""
        self.seen: Counter = Counter()
        total = sum(path.stat().st_size for path in self.files)
        with self.progress(work, total, "B") as line:
            for path in self.files:
                for text, ends in read_documents(path, self.separator, self.seen, line.update):
                    self.seen.update({word: text.count(word) for word in ENDS})
                    yield text, ends

    def notes(self) -> list[str]:
        """Return what the last pass saw of separators that were not given or do not occur."""
        found = [
            f"the text contains {word} {self.seen[word]:,} times, as ordinary text; to end a"
            f" document there, type --separator '{word}'"
            for word in ENDS
            if self.seen[word] and word != self.separator
        ]
        if self.separator and not self.seen[self.separator]:
            crlf = r"; do its lines end with CRLF, in the shell $'\r\n'?" * ("\n" in self.separator)
            found.append(f"the separator {shown(self.separator)} does not occur in the text{crlf}")
        return found


def prepare(texts: Texts, name: str, folder: Path) -> Dataset:
    """Write tokens, tokenizer and dataset.json into an empty folder.

    name: of the tokenizer: `bytes`, `train:VOCAB` or a path. Raises DataError, EnvironmentProblem
    without the library for tokenizers, and OSError if the disk is full.
    """
    if name.startswith(TRAIN):
        pieces = (text for text, _ in texts.documents("training the tokenizer"))
        train_tokenizer(pieces, int(name.removeprefix(TRAIN)), folder)
        name = str(folder)
    tokenizer = byte_tokenizer(end=True) if name == BYTES else load_tokenizer(name)
    if tokenizer.end is None:
        raise DataError(
            f"--tokenizer {name}: no file says which id ends a text; name the token in"
            ' tokenizer_config.json beside tokenizer.json, as in {"eos_token":'
            ' "</s>"}, and give the folder'
        )
    for file, content in tokenizer.files.items():
        replace_file(folder / file, [content])
    dtype = np.dtype("<u2" if tokenizer.size <= WIDE else "<u4")
    documents = _write(tokenizer, texts.documents("encoding"), folder, dtype)
    if not documents[0]:
        raise DataError("these files have no text")
    files = tuple(
        _described(folder / part, count, dtype)
        for part, count in zip(PARTS, documents, strict=True)
    )
    dataset = Dataset(
        FORMAT,
        dtype.name,
        tokenizer.size,
        tokenizer.end,
        files_digest(tokenizer.files),
        files,
    )
    replace_file(folder / NAME, [json.dumps(asdict(dataset), indent=1).encode(), b"\n"])
    return dataset


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Train a tokenizer on these texts, and write its files into an existing folder.

    It is a byte-level byte pair encoding with GPT-2's word splitting. The end of text is id 0; the
    bytes follow, then the merges in order. A short text may yield fewer than vocab_size ids. Raises
    EnvironmentProblem without the library `tokenizers`, and OSError.
    """
    tokenizers = library_of("--tokenizer train")
    made = byte_level(tokenizers)
    made.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    (folder / TOKENIZER).write_text(made.to_str(pretty=True), encoding="utf-8")
    (folder / SETTINGS).write_bytes(settings_file(end=True))


def _write(
    tokenizer: Tokenizer, texts: Iterator[tuple[str, bool]], folder: Path, dtype: np.dtype
) -> list[int]:
    """Write the tokens of both parts; return how many documents each has."""
    documents, begins, first = [0, 0], True, None
    end = np.array([tokenizer.end], dtype)
    with open(folder / PARTS[0], "xb") as train, open(folder / PARTS[1], "xb") as held_out:
        for ids, text, ends in _encoded(tokenizer, texts):
            if begins:  # the first document is trained on, so that there is something to train on
                first = first or text[:HEAD]
                part = is_held_out(text) and text[:HEAD] != first
            file = held_out if part else train
            file.write(np.concatenate([ids.astype(dtype), end[: int(ends)]]).data)
            documents[part] += ends
            begins = ends
    return documents


def _encoded(
    tokenizer: Tokenizer, texts: Iterator[tuple[str, bool]]
) -> Iterator[tuple[np.ndarray, str, bool]]:
    """Yield (ids, text, whether a document ends with it), in order; many are encoded at a time."""
    while batch := list(_some(texts)):
        found = tokenizer.encode_all([text for text, _ in batch])
        yield from ((ids, *one) for ids, one in zip(found, batch, strict=True))


def _some(texts: Iterator[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Yield the next texts, until they have BATCH characters together."""
    characters = 0
    while characters < BATCH and (one := next(texts, None)):
        characters += len(one[0])
        yield one


def _described(path: Path, documents: int, dtype: np.dtype) -> File:
    """Sync a file of tokens to disk, and return its description."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return File(path.name, file.tell() // dtype.itemsize, documents, digest)
