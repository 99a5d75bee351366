"""Reads user-supplied safetensors files: header within bounds, rows by ordinary reads.

The file is 8 bytes with the length of a header, the header as JSON, and the numbers. If it were
mapped, truncating it while it is read would kill the process. Duplicate keys in the header are
refused, since either tensor could be meant.
"""

from __future__ import annotations

import math
import os
from typing import BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from mpipar.files.bounded import open_regular, parse_json
from mpipar.files.text import shown

MOST_HEADER = 32 << 20  # bytes; a tensor takes about 150
NUMBERS = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class Entry(NamedTuple):
    """A tensor's entry in the header: name of its type, shape, and bytes [first, last)."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


class TensorFile:
    """An open file; every method raises OSError or ValueError for what is wrong with it.

    tensors: {name: Entry}, including those of types that cannot be read.
    """

    def __init__(self, path):
        self.file: BinaryIO = open_regular(path)
        try:
            size = os.fstat(self.file.fileno()).st_size
            length = int.from_bytes(self._read(0, 8), "little")
            if length > MOST_HEADER:
                raise ValueError(
                    f"its header of {length:,} bytes is too long; the limit is {MOST_HEADER:,}"
                )
            self.start = 8 + length
            header = parse_json(self._read(8, self.start).decode())
            if not isinstance(header, dict):
                raise ValueError(f"its header is {shown(header)}, not an object")
            self.tensors = {
                name: _entry(name, facts)
                for name, facts in header.items()
                if name != "__metadata__"
            }
            end = 0
            for entry in sorted(self.tensors.values(), key=lambda one: (one.first, one.last)):
                if entry.first != end:
                    raise ValueError("its tensors overlap, or leave a gap")
                end = entry.last
            if self.start + end != size:
                raise ValueError(f"has {size:,} bytes, but its header says {self.start + end:,}")
        except BaseException:
            self.file.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Return the rows [first, last) of a tensor whose type is one of NUMBERS."""
        entry, dtype = self.tensors[name], NUMBERS[self.tensors[name].dtype]
        width = math.prod(entry.shape[1:]) * dtype.itemsize
        start = self.start + entry.first
        content = self._read(start + first * width, start + last * width)
        return np.frombuffer(content, dtype).reshape(last - first, *entry.shape[1:])

    def _read(self, first: int, last: int) -> bytearray:
        content = bytearray(last - first)
        view, done = memoryview(content), 0
        while done < len(view):  # one call reads at most 2 GiB
            read = os.preadv(self.file.fileno(), [view[done:]], first + done)
            if not read:
                raise ValueError(f"ends at byte {first + done:,}, before byte {last:,}")
            done += read
        return content


def _entry(name: str, facts) -> Entry:
    """Return an entry of the header if it is consistent."""
    try:
        dtype, shape, (first, last) = facts["dtype"], tuple(facts["shape"]), facts["data_offsets"]
        fits = (
            type(dtype) is str
            and all(type(one) is int and one >= 0 for one in (*shape, first, last))
            and first <= last
        )
        if fits and dtype in NUMBERS:
            fits = math.prod(shape) * NUMBERS[dtype].itemsize == last - first
    except (TypeError, KeyError, ValueError):
        fits = False
    if not fits:
        raise ValueError(f"tensor {shown(name)}: its header is {shown(facts)}")
    return Entry(dtype, shape, first, last)
