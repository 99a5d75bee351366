"""Writes a prepared folder: the tokens of all documents, in files that `data.dataset` reads.

Text is read once to encode it, and once more before if a tokenizer is trained on it. Only a few
parts of the text are in memory at a time.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from mpipar.config.text import shown
from mpipar.errors import DataError
from mpipar.run.data.dataset import FORMAT, NAME, PARTS, Dataset, File
from mpipar.run.data.documents import (
    HEAD,
    HELD_OUT,
    LONGEST,
    is_held_out,
    is_json_lines,
    read_documents,
)
from mpipar.run.data.tokenizer import (
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
from mpipar.run.files.replace import replace_file

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
    """The file of one part, `train` or `val`, in an existing folder. Methods raise OSError."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype):
        self.path, self.dtype, self.documents = folder / f"{name}.bin", dtype, 0
        self.file = open(self.path, "x+b")  # noqa: SIM115 (`described` closes it)

    def write(self, ids: np.ndarray) -> None:
        """Add ids."""
        self.file.write(np.ascontiguousarray(ids, self.dtype).data)

    def tokens(self) -> int:
        """Return how many ids have been written."""
        return self.file.tell() // self.dtype.itemsize

    def hold_out_last_tenth(self, held_out: "Part", end: int) -> None:
        """Move the last tenth of the tokens to a part that has none. end: the id of a text's end.

        Raises DataError if there are too few.
        """
        tokens, size = self.tokens(), self.dtype.itemsize
        if tokens < HELD_OUT:
            raise DataError(f"there is too little text: {tokens} tokens; give more")
        left = (tokens - tokens // HELD_OUT) * size
        self.file.seek(left)
        while block := self.file.read(LONGEST * size):
            held_out.write(ids := np.frombuffer(block, self.dtype))
            held_out.documents += int((ids == end).sum())
        self.documents -= held_out.documents
        self.file.truncate(left)
        self.file.seek(left)

    def described(self) -> File:
        """Sync the file to disk, close it, and return its description."""
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
    tokenizer = (
        byte_tokenizer(end=True)
        if name == BYTES
        else load_tokenizer(folder if name.startswith(TRAIN) else name)
    )
    if tokenizer.end is None:
        raise DataError(
            f"--tokenizer {name}: no file says which id ends a text; name the token in"
            ' tokenizer_config.json beside tokenizer.json, as in {"eos_token":'
            ' "</s>"}, and give the folder'
        )
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
        train.hold_out_last_tenth(held_out, tokenizer.end)
    files = train.described(), held_out.described()
    kind = (FORMAT, dtype.name, tokenizer.size, tokenizer.end, tokenizer.digest)
    dataset = Dataset(*kind, files)
    replace_file(folder / NAME, [dataset.text().encode()])
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
