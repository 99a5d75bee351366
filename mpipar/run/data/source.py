"""Tokens from the user's files, or from the English text that comes with every CPython.

Text is read as bytes (vocabulary 256); of JSON lines, only the texts. Files ending in .bin are
tokens: of the type that the vocabulary needs and the ids show (`type_of_ids`), or with one of
llm.c's headers of 256 int32 (magic, version, number of tokens). One with `val` among the words of
its name is held out: nanoGPT's val.bin, llm.c's NAME_val_000000.bin. A folder stands for all files
in it, or only for those ending in .bin if it has any. A folder written by `mpipar data prepare` is
described by its dataset.json.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpipar.config.text import counted
from mpipar.errors import DataError
from mpipar.run.data import dataset
from mpipar.run.data.documents import is_json_lines, read_documents
from mpipar.run.data.token_file import Piece, TokenFiles, check_ids, named, pieces_of
from mpipar.run.data.tokenizer import BYTE_VOCABULARY
from mpipar.run.files.bounded import open_regular, problems_as
from mpipar.run.files.recognize import recognize

LLMC_HEADER = 256 * 4  # bytes
LLMC = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: version, dtype (GPT-2's, Llama 3's)
HELLASWAG = 20240522
MOST_TEXT = 4 << 30  # bytes
NARROW = 1 << 16  # ids that fit in 16 bits
SAMPLE = 1 << 16  # bytes at the beginning, middle and end of a file that show the type of its ids
ENOUGH = 8  # ids in a sample that are not 0, to tell their type
TYPES = [np.dtype(order + size) for size in ("u8", "u4", "u2") for order in "<>"]
# Kinds of files that begin with two bytes, as many files of ids do by chance.
OF_TWO_BYTES = (b"\x80", b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff")
TEXT = re.compile(rb"[\t\n\r\x20-\x7e]{16,}")


@dataclass(frozen=True)
class Source:
    """Tokens to train on, tokens to hold out if the data has any, and a description.

    Both are an array (uint8), TokenFiles, or None if there are none. tokenizer: the digest of the
    one that made them, "" if unknown.
    """

    tokens: object
    held_out: object
    what: str
    tokenizer: str = ""

    def validation(self) -> "Source | None":
        """Return the tokens that the data itself holds out, as a source; None if there are none."""
        held_out = Source(self.held_out, None, self.what, self.tokenizer)
        return None if self.held_out is None else held_out


def load_source(paths: tuple[str, ...], vocab_size: int, thorough: bool = True) -> Source:
    """Return all tokens of `paths`.

    thorough: read token files once from end to end; otherwise each read checks its part.
    Raises DataError with every problem found: missing, empty, not text, wrong size, ids outside the
    vocabulary.
    """
    if not paths:
        return _language_reference(vocab_size)
    if prepared := [path for path in paths if dataset.is_dataset(path)]:
        if len(paths) > 1:
            raise DataError(
                f"--data {prepared[0]}: a prepared folder is given alone; leave out"
                f" {' '.join(path for path in paths if path != prepared[0])}"
            )
        train, held_out, found = dataset.open_dataset(Path(paths[0]), vocab_size, thorough)
        return Source(
            train,
            held_out,
            f"{len(train) + len(held_out):,} tokens ({found.dtype}) of"
            f" {sum(file.documents for file in found.files):,} documents from {paths[0]}",
            found.tokenizer,
        )
    files, problems = text_files(paths, "--data ", only=".bin")
    if len({path.suffix == ".bin" for path in files}) > 1:
        problems.append("--data mixes token files (.bin) and text: give one kind")
    parts: list[list] = [[], []]
    for path in files:
        try:
            parts[is_held_out(path)].append(_read(path, vocab_size, thorough))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    found, unit = [_joined(part, vocab_size) for part in parts], "bytes"
    if files[0].suffix == ".bin":
        unit = f"tokens ({', '.join(dict.fromkeys(named(one.dtype) for one in pieces_of(found)))})"
    count = sum(len(tokens) for tokens in found if tokens is not None)
    return Source(*found, f"{count:,} {unit} from {counted(len(files), 'file')}")


def character_table(paths: Iterable[str]) -> Path | None:
    """Return nanoGPT's meta.pkl beside token files: it says that their ids are characters."""
    beside = (
        one for path in map(Path, paths) for one in (path / "meta.pkl", path.parent / "meta.pkl")
    )
    return next((one for one in beside if os.path.exists(one)), None)


def is_held_out(path: Path) -> bool:
    """Return whether a token file has `val` among the words of its name."""
    return path.suffix == ".bin" and "val" in re.split("[-_.]", path.stem)


def _joined(parts: list, vocab_size: int):
    """Return the tokens of several files of one kind, one after the other; None for no files."""
    if not parts:
        return None
    if isinstance(parts[0], np.ndarray):
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    return TokenFiles([piece for one in parts for piece in one.pieces], vocab_size)


def _language_reference(vocab_size):
    """Return the language reference, as pydoc carries it."""
    if vocab_size > BYTE_VOCABULARY:
        raise DataError(_not_bytes("the built-in text", vocab_size))
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(
            "this Python has no pydoc_data.topics, the built-in text: give your own text with"
            " --data FILE_OR_FOLDER"
        ) from None
    text = "\n".join(topics[name] for name in sorted(topics))
    tokens = np.frombuffer(text.encode(), np.uint8)
    check_ids("the built-in text", tokens, vocab_size)
    what = f"{len(tokens):,} bytes of Python's language reference (pydoc_data.topics)"
    return Source(tokens, None, what)


def text_files(paths: Iterable[str], flag: str, only: str = "") -> tuple[list[Path], list[str]]:
    """Return every file that the paths stand for, sorted within each folder, and the problems.

    flag: the beginning of a problem. only: a suffix; folders with such files stand for these only.
    """
    files, problems = [], []
    for name in paths:
        path = Path(name)
        if os.path.isdir(path):
            # Without what is hidden, or in a folder that is, such as .git.
            inside = [
                one
                for one in sorted(path.rglob("[!.]*"))
                if os.path.isfile(one) and not re.search(r"(^|/)\.", str(one.relative_to(path)))
            ]
            files += [one for one in inside if only and one.suffix == only] or inside
            if not inside:
                problems.append(f"{flag}{name}: this folder has no files")
        elif os.path.exists(path):  # if it is not a regular file, reading it reports what it is
            files.append(path)
        else:
            problems.append(f"{flag}{name}: no such file or folder (looked in {Path.cwd()})")
    return files, problems


def _read(path: Path, vocab_size: int, thorough: bool):
    """Return the tokens of one file. Raises DataError."""
    with problems_as(DataError, f"--data {path}"), open_regular(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes == 0:
            raise ValueError("the file is empty")
        if path.suffix == ".bin":
            tokens = _read_bin(file, nbytes, vocab_size)
            if thorough:
                tokens.check()
            return tokens
        if vocab_size > BYTE_VOCABULARY:
            raise DataError(_not_bytes(str(path), vocab_size))
        if nbytes > MOST_TEXT:
            raise ValueError(
                f"has {nbytes:,} bytes, but text is held in memory, at most"
                f" {MOST_TEXT:,}; give token files (.bin)"
            )
    tokens = _read_text(path)
    check_ids(path, tokens, vocab_size)
    return tokens


def _read_text(path: Path) -> np.ndarray:
    """Return the bytes of a text, or of the texts of JSON lines, each with a line end after it."""
    content, after = bytearray(), b"\n" if is_json_lines(path) else b""
    try:
        for text, ends in read_documents(path):
            content += text.encode() + (after if ends else b"")
    except DataError as error:
        raise DataError([f"--data {text}" for text in error.problems]) from None
    if not content:
        raise DataError(f"--data {path}: has no text")
    return np.frombuffer(content, np.uint8)


def _read_bin(file, nbytes, vocab_size) -> TokenFiles:
    """Return the tokens of an open file; ValueError says why it has none."""
    start, sample = 0, _sample(file, nbytes)
    head = np.frombuffer(sample[: min(12, nbytes // 4 * 4)], "<i4")
    magic = int(head[0]) if len(head) else None
    if magic == HELLASWAG:
        raise ValueError("this is llm.c's HellaSwag format, not a file of tokens")
    if len(head) == 3 and magic in LLMC:
        start, version, dtype = LLMC_HEADER, LLMC[magic][0], np.dtype(LLMC[magic][1])
        due = start + dtype.itemsize * int(head[2])
        if head[1] != version or nbytes != due:
            raise ValueError(
                f"the header says version {head[1]} and {head[2]:,} tokens"
                f" ({due:,} bytes), but the file has {nbytes:,} bytes"
            )
    else:
        kind, dtype = recognize(file.name), type_of_ids(sample, nbytes, vocab_size)
        if kind and (dtype is None or not sample.startswith(OF_TWO_BYTES)):
            raise ValueError(f"is {kind}")
        if TEXT.fullmatch(sample):
            raise ValueError("is text, not a file of ids; give it a name that does not end in .bin")
        dtype = usual_type(vocab_size) if dtype is None else dtype
        if nbytes % dtype.itemsize:
            raise ValueError(f"{nbytes:,} bytes are not a whole number of {dtype.name} tokens")
    if nbytes == start:
        raise ValueError("the file has a header but no tokens")
    count = (nbytes - start) // dtype.itemsize
    return TokenFiles([Piece(open_regular(file.name), start, 0, count, dtype)], vocab_size)


def _sample(file, nbytes: int) -> bytes:
    """Return the beginning, middle and end of a file, or all of a small one."""
    if nbytes <= 3 * SAMPLE:
        return os.pread(file.fileno(), nbytes, 0)
    places = (0, nbytes // 16 * 8, (nbytes - SAMPLE) // 8 * 8)
    return b"".join(os.pread(file.fileno(), SAMPLE, place) for place in places)


def usual_type(vocab_size: int) -> np.dtype:
    """Return the smaller usual type that can hold all ids of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= NARROW else "<u4")


def type_of_ids(sample: bytes, nbytes: int, vocab_size: int) -> np.dtype | None:
    """Return the type of the ids in a file without a header: 16, 32 or 64 bits, either byte order.

    It is the widest in which all ids of the sample are below the size of the vocabulary: a file of
    32-bit ids read as 16 bits has a 0 for every second token. Ids of 0 show nothing. Above 65,536
    ids, 16 bits are too few. None if no type fits.
    """
    usual = usual_type(vocab_size)
    for dtype in TYPES:
        if nbytes % dtype.itemsize or dtype.itemsize < usual.itemsize:
            continue
        ids = np.frombuffer(sample[: len(sample) // dtype.itemsize * dtype.itemsize], dtype)
        if ids.max() < vocab_size and (np.count_nonzero(ids) >= ENOUGH or dtype == usual):
            return dtype
    return None


def _not_bytes(what, vocab_size):
    return (
        f"--data: {what} would be read as bytes, but a vocabulary of {vocab_size:,} is not"
        " one of bytes; give token files (.bin), a folder of mpipar data prepare, or"
        " --vocab-size 256"
    )
