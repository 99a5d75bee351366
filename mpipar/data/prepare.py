"""Writes a prepared folder: the tokens of all documents, in files that `mpipar.data.dataset` reads.

Text is read from its files three times: to survey it, to train a tokenizer if that is requested,
and to encode it. Only a few parts of the text are therefore in memory at a time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpipar.data.dataset import FORMAT, NAME, PARTS, Dataset, File
from mpipar.data.documents import End, cut_at, encoded_documents, read_documents, survey
from mpipar.data.tokenizer import (
    END,
    SETTINGS,
    TOKENIZER,
    Tokenizer,
    byte_tokenizer,
    library_of,
    load_tokenizer,
    settings_file,
)
from mpipar.errors import DataError

SHARD = 100_000_000  # tokens per file, as in llm.c
WIDE = 1 << 16  # ids that fit in 16 bits
LEAST_NEW, MOST_NEW = 258, 1 << 20  # ids of a new tokenizer: bytes, end of text, at least one merge
BYTES, TRAIN = "bytes", "train:"  # what may name a tokenizer besides a path


@dataclass(frozen=True)
class Texts:
    """Text files, and the separator of documents in them (None: each file is a document).

    progress(work, done bytes, all bytes): reports how far each pass over them is.
    """

    files: list[Path]
    separator: str | None
    progress: Callable[[str, int, int], None]

    def documents(self, work: str) -> Iterator[tuple[str, End]]:
        """Yield as `read_documents` does. work: what they are read for, in a word."""
        done, total = 0, sum(path.stat().st_size for path in self.files)

        def more(count):
            nonlocal done
            done += count
            self.progress(work, done, total)

        yield from read_documents(self.files, self.separator, more)
        self.progress(work, total, total)


class Part:
    """The files of one part, `train` or `val`, written one after the other."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype):
        self.folder, self.name, self.dtype = folder, name, dtype
        self.files: list[File] = []
        self.file = None

    def write(self, ids: np.ndarray) -> None:
        """Add ids; when a file is full, it is closed and the next one begins. Raises OSError."""
        while len(ids):
            if self.file is None:
                path = self.folder / f"{self.name}-{len(self.files):05d}.bin"
                self.file = open(path, "xb")  # noqa: SIM115 (close() does)
                self.tokens, self.documents, self.digest = 0, 0, hashlib.sha256()
            some = ids[: SHARD - self.tokens].astype(self.dtype)
            self.file.write(some.data)
            self.digest.update(some.data)
            self.tokens += len(some)
            ids = ids[len(some) :]
            if self.tokens == SHARD and len(ids):
                self.close()

    def end_document(self, end_of_text: int) -> None:
        """Add the id that ends a document."""
        self.write(np.array([end_of_text]))
        self.documents += 1

    def close(self) -> None:
        """Sync the open file to disk, and record its content. Raises OSError."""
        if self.file is None:
            return
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.files.append(
            File(Path(self.file.name).name, self.tokens, self.documents, self.digest.hexdigest())
        )
        self.file = None


def prepare(texts: Texts, name: str, folder: Path) -> tuple[Dataset, Tokenizer]:
    """Write tokens, tokenizer and dataset.json into an empty folder.

    name: of the tokenizer: `bytes`, `train:VOCAB` or a path. Raises DataError, EnvironmentProblem
    without the library for tokenizers, and OSError if the disk is full.
    """
    tokenizer = None if name.startswith(TRAIN) else _tokenizer(name)
    found = survey(texts.documents("reading"))
    if tokenizer is None:
        pieces = (text for text, _ in texts.documents("training the tokenizer"))
        train_tokenizer(pieces, int(name.removeprefix(TRAIN)), folder)
        tokenizer = load_tokenizer(folder)
    else:
        tokenizer.copy(folder)
    dtype = np.dtype("<u2" if tokenizer.size <= WIDE else "<u4")
    parts = [Part(folder, name, dtype) for name in PARTS]
    _encode(texts, tokenizer, found, parts)
    empty = [part.name for part in parts if not part.files]
    if empty:
        raise DataError(f"there is too little text: the part {empty[0]} has no tokens; give more")
    dataset = Dataset(
        FORMAT,
        dtype.name,
        tokenizer.size,
        tokenizer.end,
        tokenizer.digest,
        tuple(file for part in parts for file in part.files),
    )
    with open(folder / NAME, "x", encoding="utf-8") as file:
        file.write(dataset.text())
        file.flush()
        os.fsync(file.fileno())
    return dataset, tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Train a tokenizer on these texts, and write its files into an existing folder.

    It is a byte-level byte pair encoding with GPT-2's word splitting. The end of text is id 0; the
    bytes follow, then the merges in order. A short text may yield fewer than vocab_size ids. Raises
    EnvironmentProblem without the library `tokenizers`, and OSError.
    """
    tokenizers = library_of("--tokenizer train")
    level = tokenizers.pre_tokenizers.ByteLevel
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = level(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=level.alphabet(),
            show_progress=False,
        ),
    )
    (folder / TOKENIZER).write_text(made.to_str(pretty=True), encoding="utf-8")
    (folder / SETTINGS).write_bytes(settings_file(end=True))


def _tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of this name; DataError if it has no id that ends a text."""
    if name == BYTES:
        return byte_tokenizer(end=True)
    found = load_tokenizer(name)
    if found.end is None:
        raise DataError(
            f"--tokenizer {name}: no file says which id ends a text; name the token in"
            ' tokenizer_config.json beside tokenizer.json, as in {"eos_token":'
            ' "</s>"}, and give the folder'
        )
    return found


def _encode(texts: Texts, tokenizer: Tokenizer, found, parts: list[Part]) -> None:
    """Write the ids of all documents to their parts. found: the `Survey` of the same texts."""
    train, held_out = parts
    pieces = texts.documents("encoding")
    if found.cut is not None:
        pieces = cut_at(pieces, found.cut)
    part = train
    for ids, text in encoded_documents(tokenizer, pieces):
        if found.cut is None:
            part = held_out if found.is_held_out(text.head) else train
        part.write(ids)
        if text.end is End.DOCUMENT:
            part.end_document(tokenizer.end)
        elif text.end is End.CUT:
            part = held_out
    for one in parts:
        one.close()
    if sum(file.documents for one in parts for file in one.files) != found.documents:
        raise DataError("the text changed while it was being read; start again")
