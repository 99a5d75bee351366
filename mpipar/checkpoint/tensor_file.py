"""Reads user-supplied safetensors files, row by row, with the library `safetensors`.

The library checks the header and maps the file. Reading a page of a mapping that the file no
longer has would kill the process, so the size is compared before each read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    """A tensor's entry in the header: safetensors' name of its type, and its shape."""

    dtype: str
    shape: tuple[int, ...]


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
            self.size = os.fstat(self.file.fileno()).st_size
            with self._problems():
                self.library = stack.enter_context(safe_open(path, "np"))
                names = self.library.keys()
                found = {name: self.library.get_slice(name) for name in names}
            self.tensors = {
                name: Entry(one.get_dtype(), tuple(one.get_shape())) for name, one in found.items()
            }
            self.stack = stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stack.close()

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Return the rows [first, last) of a tensor whose type is one of NUMBERS."""
        size = os.fstat(self.file.fileno()).st_size
        if size != self.size:
            raise ValueError(f"has {size:,} bytes, but had {self.size:,} when it was opened")
        with self._problems():
            return self.library.get_slice(name)[first:last]

    @contextmanager
    def _problems(self) -> Iterator[None]:
        """Turn the library's error inside into ValueError."""
        try:
            yield
        except SafetensorError as error:
            text = brief(str(error).removeprefix("Error while deserializing header: "), 200)
            raise ValueError(
                f"is not a whole safetensors file ({self.size:,} bytes): {text}"
            ) from None
