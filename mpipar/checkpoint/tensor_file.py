"""Reads user-supplied safetensors files, row by row.

The library `safetensors` checks the header. Numbers are read by ordinary reads, not from a mapping:
a page of a mapping that the file no longer has would kill the process.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import ExitStack
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from mpipar.files.bounded import open_regular
from mpipar.files.recognize import SAFETENSORS, recognize
from mpipar.files.text import brief

NUMBERS = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class Entry(NamedTuple):
    """A tensor's entry in the header: safetensors' name of its type, its shape, its first byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """An open file; every method raises OSError or ValueError for what is wrong with it.

    tensors: {name: Entry}, including those of types that cannot be read.
    """

    def __init__(self, path):
        kind = recognize(path)
        if kind not in (None, SAFETENSORS):
            raise ValueError(f"is {kind}")
        with ExitStack() as stack:
            self.file = stack.enter_context(open_regular(path))
            try:
                with safe_open(path, "np"):
                    pass
            except SafetensorError as error:
                size = os.fstat(self.file.fileno()).st_size
                text = brief(str(error).removeprefix("Error while deserializing header: "), 200)
                raise ValueError(
                    f"is not a whole safetensors file ({size:,} bytes): {text}"
                ) from None
            length = int.from_bytes(self.file.read(8), "little")
            header = json.loads(self.file.read(length))
            header.pop("__metadata__", None)
            self.tensors = {
                name: Entry(one["dtype"], tuple(one["shape"]), 8 + length + one["data_offsets"][0])
                for name, one in header.items()
            }
            self.stack = stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stack.close()

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Return the rows [first, last) of a tensor whose type is one of NUMBERS."""
        dtype, shape, start = self.tensors[name]
        found = np.empty((last - first, *shape[1:]), NUMBERS[dtype])
        place = start + first * math.prod(shape[1:]) * found.itemsize
        rest = memoryview(found.reshape(-1).view(np.uint8))
        while rest:
            size = os.preadv(self.file.fileno(), [rest], place)
            if not size:
                raise ValueError(f"has {place:,} bytes, but had more when it was opened")
            rest, place = rest[size:], place + size
        return found
