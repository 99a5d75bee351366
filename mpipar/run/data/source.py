"""Tokens from the user's files, or from the English text that comes with every CPython.

Text is read as bytes (vocabulary 256); of JSON lines, only the texts. Files ending in .bin are
tokens, of the type that the vocabulary needs: uint16, or uint32 above 65,536 ids; or with one of
llm.c's headers of 256 int32 (magic, version, number of tokens). One with `val` among the words of
its name is held out: nanoGPT's val.bin, llm.c's NAME_val_000000.bin. A folder stands for all files
in it, or only for those ending in .bin if it has any. A folder written by `mpipar data prepare` is
described by its dataset.json.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpipar.config.text import counted
from mpipar.errors import DataError
from mpipar.run.data.documents import is_json_lines, read_documents
from mpipar.run.data.prepared import NAME, WIDE, is_dataset, read_dataset
from mpipar.run.data.token_file import Piece, TokenFiles, check_ids, pieces_of
from mpipar.run.data.tokenizer import BYTE_VOCABULARY, files_digest, read_files
from mpipar.run.files.bounded import open_regular, problems_as, recognize

LLMC_HEADER = 256 * 4  # bytes
LLMC = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # (magic, version): of GPT-2's, Llama 3's ids
LLMC_MAGICS = (*(magic for magic, _ in LLMC), 20240522)  # the last one's is HellaSwag
MOST_TEXT = 4 << 30  # bytes
SAMPLE = 1 << 20  # bytes at the beginning of a file that show what it holds
ENOUGH = 8  # ids of a sample that are not 0, to see that every second one is
MANY = 1 << 12  # ids of a sample whose lower bytes have all values
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


def load_source(paths: tuple[str, ...], vocab_size: int, thorough: bool = True) -> Source:
    """Return all tokens of `paths`.

    thorough: read token files once from end to end; otherwise each read checks its part.
    Raises DataError with every problem found: missing, empty, not text, wrong size, ids outside the
    vocabulary.
    """
    if not paths:
        return _language_reference(vocab_size)
    if any(map(is_dataset, paths)):
        if len(paths) > 1:
            raise DataError(f"{' '.join(paths)}: a prepared folder is given alone")
        return _of_prepared(Path(paths[0]), vocab_size, thorough)
    files, problems = text_files(paths, only=".bin")
    if len({path.suffix == ".bin" for path in files}) > 1:
        problems.append("--data mixes token files (.bin) and text: give one kind")
    parts: tuple[list, list] = ([], [])
    for path in files:
        is_held_out = path.suffix == ".bin" and "val" in re.split("[-_.]", path.stem)
        try:
            parts[is_held_out].append(_read(path, vocab_size, thorough))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    found = [_joined(part, vocab_size) for part in parts]
    kinds = dict.fromkeys(piece.dtype.name for piece in pieces_of(found))
    unit = f"tokens ({', '.join(kinds)})" if kinds else "bytes"
    count = sum(len(tokens) for tokens in found if tokens is not None)
    return Source(*found, f"{count:,} {unit} from {counted(len(files), 'file')}")


def _joined(parts: list, vocab_size: int):
    """Return the tokens of several files of one kind, one after the other; None for no files."""
    if parts and isinstance(parts[0], np.ndarray):
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    return TokenFiles(pieces_of(parts), vocab_size) if parts else None


def _of_prepared(folder: Path, vocab_size: int, thorough: bool) -> Source:
    """Return the tokens of a folder of `mpipar data prepare`; all digests are compared if thorough.

    Raises DataError, also for files of other sizes and for another tokenizer.
    """
    found, digest = read_dataset(folder)
    if files_digest(read_files(folder)) != found.tokenizer:
        raise DataError(
            f"{folder}: the tokenizer is not the one that made the tokens; prepare the data again"
        )
    # The table of a model may lack tokens that were added to its tokenizer: each id is compared.
    least, parts = min(found.vocab_size, vocab_size), []
    dtype = np.dtype(found.dtype).newbyteorder("<")
    for stated in found.files:
        with problems_as(DataError, str(folder / stated.name)):
            file = open_regular(folder / stated.name)
            size, due = os.fstat(file.fileno()).st_size, stated.tokens * dtype.itemsize
            if size != due:
                raise ValueError(f"has {size:,} bytes, but {due:,} according to {NAME}")
        parts.append(TokenFiles([Piece(file, 0, 0, stated.tokens, dtype)], least, digest))
        if thorough:
            parts[-1].check([stated.sha256])
    return Source(
        parts[0],
        parts[1] or None,
        f"{sum(map(len, parts)):,} tokens ({found.dtype}) from {folder}",
        found.tokenizer,
    )


def _language_reference(vocab_size):
    """Return the language reference, as pydoc carries it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(
            "this Python has no pydoc_data.topics, the built-in text: give your own text with"
            " --data FILE_OR_FOLDER"
        ) from None
    text = "\n".join(topics[name] for name in sorted(topics))
    tokens = _of_bytes("the built-in text", text.encode(), vocab_size)
    return Source(
        tokens, None, f"{len(tokens):,} bytes of Python's language reference (pydoc_data.topics)"
    )


def text_files(paths: Iterable[str], only: str = "") -> tuple[list[Path], list[str]]:
    """Return every file that the paths stand for, sorted within each folder, and the problems.

    only: a suffix; folders with such files stand for these only.
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
                problems.append(f"{name}: this folder has no files")
        elif os.path.exists(path):  # if it is not a regular file, reading it reports what it is
            files.append(path)
        else:
            problems.append(f"{name}: no such file or folder (looked in {Path.cwd()})")
    return files, problems


def _read(path: Path, vocab_size: int, thorough: bool):
    """Return the tokens of one file. Raises DataError."""
    with problems_as(DataError, str(path)), open_regular(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes == 0:
            raise ValueError("the file is empty")
        if path.suffix == ".bin":
            tokens = TokenFiles([_piece(file, nbytes, vocab_size)], vocab_size)
            if thorough:
                tokens.check()
            return tokens
        if nbytes > MOST_TEXT:
            raise ValueError(
                f"has {nbytes:,} bytes, but text is held in memory, at most {MOST_TEXT:,}; give"
                " token files (.bin)"
            )
        after, texts = "\n" * is_json_lines(path), read_documents(path, None, Counter())
        content = b"".join((text + after * ends).encode() for text, ends in texts)
        if not content:
            raise ValueError("has no text")
    return _of_bytes(path, content, vocab_size)


def _of_bytes(what, content: bytes, vocab_size: int) -> np.ndarray:
    """Return bytes as tokens. what: their name in the DataError for another vocabulary."""
    if vocab_size > BYTE_VOCABULARY:
        raise DataError(
            f"{what} would be read as bytes, but a vocabulary of {vocab_size:,} is not one of"
            " bytes; give token files (.bin), a folder of mpipar data prepare, or --vocab-size 256"
        )
    tokens = np.frombuffer(content, np.uint8)
    check_ids(what, int(tokens.max()), vocab_size)
    return tokens


def _piece(file, nbytes: int, vocab_size: int) -> Piece:
    """Return where the tokens of an open file are; ValueError says why it has none."""
    start, dtype = 0, np.dtype("<u2" if vocab_size <= WIDE else "<u4")
    sample = os.pread(file.fileno(), SAMPLE, 0)
    head = np.frombuffer(sample[:12].ljust(12, b"\0"), "<i4").tolist()
    if kind := LLMC.get((head[0], head[1])):
        start, dtype = LLMC_HEADER, np.dtype(kind)
        due = start + dtype.itemsize * head[2]
        if nbytes != due or not head[2]:
            raise ValueError(
                f"the header says {head[2]:,} tokens ({due:,} bytes), but the file has"
                f" {nbytes:,} bytes"
            )
    elif head[0] in LLMC_MAGICS:
        raise ValueError(f"is llm.c's format {head[0]}, version {head[1]}, which is not read here")
    else:
        ids = np.frombuffer(sample[: len(sample) // dtype.itemsize * dtype.itemsize], dtype)
        kind = recognize(file.name) or ("text, not ids" if TEXT.fullmatch(sample) else None)
        if kind and (ids.max() >= vocab_size or not sample.startswith(OF_TWO_BYTES)):
            raise ValueError(f"is {kind}")
        if nbytes % dtype.itemsize:
            raise ValueError(f"{nbytes:,} bytes are not a whole number of {dtype.name} tokens")
        if np.count_nonzero(ids) >= ENOUGH and not (ids[::2].any() and ids[1::2].any()):
            raise ValueError(
                f"every second id is 0, so they are wider than {dtype.name}, which the vocabulary"
                " needs; write them as that"
            )
        if len(ids) >= MANY and (ids & 255).max() < 255 and (ids >> 8).max() == 255:
            raise ValueError("its ids are big-endian; write them as little-endian uint16")
    return Piece(open_regular(file.name), start, 0, (nbytes - start) // dtype.itemsize, dtype)
