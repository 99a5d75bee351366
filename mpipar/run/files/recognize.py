"""Names a file that is not what its reader expects, by its first bytes.

A reader asks before it parses: a pointer of Git LFS, a saved web page or a pickle would otherwise
be reported as a damaged file of the format that was expected.
"""

from __future__ import annotations

import os
import re

HEAD = 4096  # bytes that are looked at
SAFETENSORS = "a safetensors file"
BYTE_ORDER_MARK = "text that begins with a byte order mark (UTF-8); save it without one"
JSON_LINES = "JSON lines"
# What a file begins with, and what it is then. A pattern is matched at the first byte.
KINDS: tuple[tuple[bytes, str], ...] = (
    (
        rb"version https://git-lfs\.github\.com/",
        "a pointer of Git LFS, not the file itself; fetch that with `git lfs pull`",
    ),
    (rb"GGUF|ggml|ggjt|lmgg|tjgg", "a GGUF or GGML file of llama.cpp; convert it to safetensors"),
    (
        rb"PK\x03\x04.{26}[^\0]{1,200}?(data\.pkl|/version|\.format_version)",
        "a PyTorch checkpoint; save it as safetensors",
    ),
    (rb"PK\x03\x04|PK\x05\x06", "a zip archive; unpack it"),
    (rb"\x80[\x02-\x05]", "a Python pickle, such as a PyTorch checkpoint, which is never read"),
    (rb"\x1f\x8b", "compressed by gzip; unpack it"),
    (rb"\x28\xb5\x2f\xfd", "compressed by zstd; unpack it"),
    (rb"\xfd7zXZ\0", "compressed by xz; unpack it"),
    (rb"BZh[1-9]1AY&SY", "compressed by bzip2; unpack it"),
    (rb".{257}ustar", "a tar archive; unpack it"),
    (rb"PAR1", "a Parquet file; write its texts to a plain file"),
    (rb"ARROW1", "an Arrow file; write its texts to a plain file"),
    (rb"\x93NUMPY", "a NumPy array (.npy)"),
    (rb"\x89HDF\r\n", "an HDF5 file"),
    (rb"%PDF-", "a PDF"),
    (rb"\xff\xfe|\xfe\xff", "text in UTF-16; save it in UTF-8"),
    (rb"\xef\xbb\xbf", BYTE_ORDER_MARK),
    (rb"(?i)\s*(<!doctype html|<html[\s>])", "a web page (HTML), not the file itself"),
    (rb'\s*\{[^\r\n]*\}[ \t\r]*\n\s*\{\s*"', JSON_LINES),
)


def recognize(path: str | os.PathLike) -> str | None:
    """Return what a file is, as "a pointer of Git LFS, ...", or None if nothing is known.

    It fits after "PATH: is ", and may end with what to do instead. Whoever reads the file reports
    one that is not regular or cannot be opened.
    """
    if not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as file:
            return recognized(file.read(HEAD), os.fstat(file.fileno()).st_size)
    except OSError:
        return None


def recognized(head: bytes, size: int) -> str | None:
    """Return what a file of so many bytes is that begins with `head`. See `recognize`."""
    if not size:
        return "empty"
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= size - 8:
        return SAFETENSORS
    return next((kind for start, kind in KINDS if re.match(start, head, re.DOTALL)), None)
