"""Safetensors files: the library `safetensors` checks and reads them; their head is made here."""

from __future__ import annotations

import json
import math
import os
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from mpipar.config.text import brief
from mpipar.run.files.bounded import open_regular
from mpipar.run.files.recognize import SAFETENSORS, recognize

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


def open_tensors(path):
    """Return the library's open file; raise OSError or ValueError for what is wrong with it."""
    kind = recognize(path)
    if kind not in (None, SAFETENSORS):
        raise ValueError(f"is {kind}")
    with open_regular(path) as file:  # the library would wait for a pipe
        try:
            return safe_open(path, "np")
        except SafetensorError as error:
            size = os.fstat(file.fileno()).st_size
            text = brief(str(error).removeprefix("Error while deserializing header: "), 200)
            raise ValueError(f"is not a whole safetensors file ({size:,} bytes): {text}") from None


def entries(file) -> dict[str, Entry]:
    """Return {name: Entry} of an open file, including types that cannot be read."""
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    return {name: Entry(one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}


def safetensors_head(tensors) -> bytes:
    """Return the bytes of a safetensors file before its numbers.

    tensors: (name, dtype, shape) in the order in which their numbers follow, without gaps. The
    library writes only what is in memory as a whole.
    """
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    names = {dtype: name for name, dtype in NUMBERS.items()}
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": names[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
