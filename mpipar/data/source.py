"""Tokens from the user's files, or from the English text that every CPython carries.

Text is read as bytes (vocabulary 256). Files ending in .bin are tokens: uint16, bare or with
llm.c's header of 256 int32 (magic 20240520, version 1, number of tokens). A folder stands for all
files in it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from mpipar.data.token_file import BLOCK, TokenFile, outside
from mpipar.data.tokenizer import BYTE_VOCABULARY
from mpipar.errors import DataError
from mpipar.files.bounded import open_regular, problems_as

LLMC_MAGIC, LLMC_HEADER = 20240520, 256 * 4
OTHER_MAGICS = {20240801: "llm.c's Llama 3 format (uint32)", 20240522: "llm.c's HellaSwag format"}
MOST_TEXT = 4 << 30  # bytes


def load_tokens(paths: tuple[str, ...], vocab_size: int):
    """All tokens of `paths`, and a line that says what they are.

    They are an array (uint8 or uint16), or a TokenFile if there is one file of tokens.
    Raises DataError with every problem found: missing, empty, wrong size, ids outside the
    vocabulary.
    """
    if not paths:
        return _language_reference(vocab_size)
    files, problems = _files(paths)
    kinds = {path.suffix == ".bin" for path in files}
    if len(kinds) > 1:
        problems.append("--data mixes token files (.bin) and text: give one kind")
    pieces = [_read(path, vocab_size, problems) for path in files]
    if problems:
        raise DataError(problems)
    tokens = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    unit = "tokens" if tokens.dtype == np.uint16 else "bytes"
    return tokens, f"{len(tokens):,} {unit} from {len(files)} file{'s' * (len(files) > 1)}"


def _language_reference(vocab_size):
    """The language reference as pydoc carries it."""
    if vocab_size > BYTE_VOCABULARY:
        raise DataError(_not_bytes("the built-in text", vocab_size))
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(
            "this Python has no pydoc_data.topics, the built-in text: give your own text with"
            " --data FILE_OR_FOLDER") from None
    text = "\n".join(topics[name] for name in sorted(topics))
    tokens, problems = np.frombuffer(text.encode(), np.uint8), []
    _check_ids("the built-in text", tokens, vocab_size, problems)
    if problems:
        raise DataError(problems)
    return tokens, f"{len(tokens):,} bytes of Python's language reference (pydoc_data.topics)"


def _files(paths):
    """Every file that the paths stand for, sorted inside each folder, and what is wrong with the
    rest.
    """
    files, problems = [], []
    for name in paths:
        path = Path(name)
        if os.path.isdir(path):
            inside = sorted(p for p in path.rglob("*")
                            if os.path.isfile(p) and not _hidden(p, path))
            files += inside
            if not inside:
                problems.append(f"--data {name}: this folder holds no file")
        elif os.path.exists(path):  # if it is no regular file, reading it says what it is
            files.append(path)
        else:
            problems.append(f"--data {name}: no such file or folder (looked in {Path.cwd()})")
    return files, problems


def _hidden(path, folder):
    """Whether the file, or a folder on the way to it, has a name that begins with a dot (.git)."""
    return any(name.startswith(".") for name in path.relative_to(folder).parts)


def _read(path, vocab_size, problems):
    """The tokens of one file; problems are appended and an empty array is returned."""
    nothing = np.zeros(0, np.uint8)
    try:
        with problems_as(DataError, f"--data {path}"), open_regular(path) as file:
            nbytes = os.fstat(file.fileno()).st_size
            if nbytes == 0:
                problems.append(f"--data {path}: the file is empty")
                return nothing
            if path.suffix == ".bin":
                return _read_bin(file, nbytes, vocab_size, problems)
            if vocab_size > BYTE_VOCABULARY:
                problems.append(_not_bytes(str(path), vocab_size))
                return nothing
            if nbytes > MOST_TEXT:
                problems.append(f"--data {path}: has {nbytes:,} bytes, and text is held in memory,"
                                f" at most {MOST_TEXT:,}; give token files (.bin)")
                return nothing
            tokens = np.frombuffer(file.read(nbytes), np.uint8)
    except DataError as error:
        problems += error.problems
        return nothing
    _check_ids(path, tokens, vocab_size, problems)
    return tokens


def _read_bin(file, nbytes, vocab_size, problems):
    path, start = file.name, 0
    head = np.frombuffer(file.read(12)[:nbytes // 4 * 4], "<i4")
    if len(head) == 3 and head[0] == LLMC_MAGIC:
        start = LLMC_HEADER
        stated = int(head[2])
        if head[1] != 1 or nbytes != start + 2 * stated:
            problems.append(
                f"--data {path}: the header says version {head[1]} and {stated:,} tokens"
                f" ({start + 2 * stated:,} bytes), the file has {nbytes:,} bytes")
            return np.zeros(0, np.uint16)
    elif len(head) and int(head[0]) in OTHER_MAGICS:
        problems.append(
            f"--data {path}: this is {OTHER_MAGICS[int(head[0])]}; uint16 tokens are read")
        return np.zeros(0, np.uint16)
    elif nbytes % 2:
        problems.append(f"--data {path}: {nbytes:,} bytes are not a whole number of uint16 tokens")
        return np.zeros(0, np.uint16)
    if nbytes == start:
        problems.append(f"--data {path}: the file has a header but no tokens")
        return np.zeros(0, np.uint16)
    tokens = TokenFile(open_regular(path), start, 0, (nbytes - start) // 2, vocab_size)
    tokens.check()
    return tokens


def _check_ids(path, tokens, vocab_size, problems):
    """Append a problem if an id has no row in the table.

    The check is here, block by block, and not inside a kernel.
    """
    for first in range(0, len(tokens), BLOCK):
        piece = tokens[first:first + BLOCK]
        if piece.max() >= vocab_size:
            problems.append(f"--data: {outside(path, piece, first, vocab_size)}")
            return


def _not_bytes(what, vocab_size):
    return (f"--data: {what} would be read as bytes, but a vocabulary of {vocab_size:,} is not"
            " one of bytes; give token files (.bin, uint16), or --vocab-size 256")
