"""Writes a prepared folder: the tokens of all documents, in files that `mpipar.data.dataset` reads.

Text is read once to encode it, and once more before if a tokenizer is trained on it. Only a few
parts of the text are in memory at a time.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from mpipar.data.dataset import FORMAT, NAME, PARTS, Dataset, File
from mpipar.data.documents import (
    HEAD,
    HELD_OUT,
    LONGEST,
    is_held_out,
    is_json_lines,
    read_documents,
)
from mpipar.data.tokenizer import (
    END,
    ENDS,
    SETTINGS,
    TOKENIZER,
    Tokenizer,
    byte_tokenizer,
    library_of,
    load_tokenizer,
    settings_file,
)
from mpipar.errors import DataError
from mpipar.files.text import shown

BATCH = 4 * LONGEST  # characters of several parts, for the library's threads
WIDE = 1 << 16  # ids that fit in 16 bits
LEAST_NEW, MOST_NEW = 258, 1 << 20  # ids of a new tokenizer: bytes, end of text, at least one merge
BYTES, TRAIN = "bytes", "train:"  # what may name a tokenizer besides a path


class Texts:
    """Text files, and the separator of documents in them (None: each file is a document).

    progress(work, done bytes, all bytes): reports how far each pass over them is. seen: how often
    each separator occurs in the text; unsplit: the files in which the one that was given does not;
    nbytes: of the text.
    """

    def __init__(self, files: list[Path], separator: str | None, progress: Callable):
        self.files, self.separator, self.progress = files, separator, progress
        self.seen: Counter = Counter()
        self.unsplit: list[Path] = []
        self.nbytes = 0

    def documents(self, work: str) -> Iterator[tuple[str, bool]]:
        """Yield (text, whether a document ends with it). work: why they are read, in a word."""
        done, total = 0, sum(path.stat().st_size for path in self.files)
        self.seen, self.unsplit, self.nbytes = Counter(), [], 0

        def more(count):
            nonlocal done
            done += count
            self.progress(work, done, total)

        for path in self.files:
            before = self.seen[self.separator]
            for text, ends in read_documents(path, self.separator, more, self.seen):
                for word in (*ENDS, "\r\n"):
                    self.seen[word] += text.count(word) if word != self.separator else 0
                self.nbytes += len(text.encode())
                yield text, ends
            if self.separator and self.seen[self.separator] == before and not is_json_lines(path):
                self.unsplit.append(path)

    def notes(self) -> list[str]:
        """Return what the last pass saw of separators that were not given or do not occur."""
        found = [
            f"the text contains {word} {self.seen[word]:,} times, as ordinary text; to end a"
            f" document there, type --separator '{word}'"
            for word in ENDS
            if self.seen[word] and word != self.separator
        ]
        if self.unsplit:
            wide = (self.separator or "").replace("\n", "\r\n")
            crlf = self.seen["\r\n"] and wide != self.separator
            found.append(
                f"the separator {shown(self.separator)} does not occur in {self.unsplit[0]}"
                + (f" and {len(self.unsplit) - 1:,} other files" if self.unsplit[1:] else "")
                + (f"; its lines end with CRLF: type --separator ${wide!r}" if crlf else "")
            )
        return found


class Part:
    """The file of one part, `train` or `val`, in an existing folder."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype):
        self.path, self.dtype, self.documents = folder / f"{name}.bin", dtype, 0
        self.file = open(self.path, "x+b")  # noqa: SIM115 (`described` closes it)

    def write(self, ids: np.ndarray) -> None:
        """Add ids. Raises OSError."""
        self.file.write(np.ascontiguousarray(ids, self.dtype).data)

    def tokens(self) -> int:
        """Return how many ids have been written."""
        return self.file.tell() // self.dtype.itemsize

    def described(self) -> File:
        """Sync the file to disk, close it, and return its description. Raises OSError."""
        with self.file as file:
            tokens = self.tokens()
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return File(self.path.name, tokens, self.documents, digest)


def prepare(texts: Texts, name: str, folder: Path) -> tuple[Dataset, Tokenizer]:
    """Write tokens, tokenizer and dataset.json into an empty folder.

    name: of the tokenizer: `bytes`, `train:VOCAB` or a path. Raises DataError, EnvironmentProblem
    without the library for tokenizers, and OSError if the disk is full.
    """
    if name.startswith(TRAIN):
        pieces = (text for text, _ in texts.documents("training the tokenizer"))
        train_tokenizer(pieces, int(name.removeprefix(TRAIN)), folder)
        tokenizer = load_tokenizer(folder)
    else:
        tokenizer = _tokenizer(name)
        tokenizer.copy(folder)
    dtype = np.dtype("<u2" if tokenizer.size <= WIDE else "<u4")
    train, held_out = (Part(folder, part, dtype) for part in PARTS)
    part, first = None, None
    for ids, text, ends in _encoded(tokenizer, texts.documents("encoding")):
        first = text[:HEAD] if first is None else first
        if part is None:  # the first document is trained on, so that there is something to train on
            part = held_out if is_held_out(text) and text[:HEAD] != first else train
        part.write(ids)
        if ends:
            part.write(np.array([tokenizer.end]))
            part.documents += 1
            part = None
    if not held_out.tokens():
        _hold_out_last_tenth(train, held_out, tokenizer.end)
    dataset = Dataset(
        FORMAT,
        dtype.name,
        tokenizer.size,
        tokenizer.end,
        tokenizer.digest,
        (train.described(), held_out.described()),
    )
    with open(folder / NAME, "x", encoding="utf-8") as file:
        file.write(dataset.text())
        file.flush()
        os.fsync(file.fileno())
    return dataset, tokenizer


def _hold_out_last_tenth(train: Part, held_out: Part, end: int) -> None:
    """Move the last tenth of the tokens to the part that has none."""
    tokens, size = train.tokens(), train.dtype.itemsize
    if tokens < HELD_OUT:
        raise DataError(f"there is too little text: {tokens} tokens; give more")
    left = (tokens - tokens // HELD_OUT) * size
    train.file.seek(left)
    while block := train.file.read(LONGEST * size):
        held_out.write(ids := np.frombuffer(block, train.dtype))
        held_out.documents += int((ids == end).sum())
    train.documents -= held_out.documents
    train.file.truncate(left)
    train.file.seek(left)


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


def _encoded(
    tokenizer: Tokenizer, texts: Iterable[tuple[str, bool]]
) -> Iterator[tuple[np.ndarray, str, bool]]:
    """Yield (ids, text, whether a document ends with it), in order; many are encoded at a time."""
    batch, characters = [], 0
    for one in texts:
        batch.append(one)
        characters += len(one[0])
        if characters >= BATCH:
            yield from _of_batch(tokenizer, batch)
            batch, characters = [], 0
    yield from _of_batch(tokenizer, batch)


def _of_batch(tokenizer, batch):
    found = tokenizer.encode_all([text for text, _ in batch])
    return ((ids, *one) for ids, one in zip(found, batch, strict=True))
