"""Safetensors files, and a folder of weights: one file, or several with an index of their names.

The library `safetensors` checks and reads files; their head is made here. Names and index are
Hugging Face's: `model.safetensors`, or `model-00001-of-00003.safetensors` and so on beside
`model.safetensors.index.json`. mpipar writes one file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from mpipar.config.text import brief, shown
from mpipar.errors import DataError
from mpipar.run.checkpoint.manifest import Tensor
from mpipar.run.files.bounded import (
    HEAD,
    SAFETENSORS,
    built,
    open_regular,
    problems_as,
    read_json,
    recognized,
)
from mpipar.run.files.no_links import replaced_files

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
BESIDE = re.compile(r"[^./\\\0][^/\\\0]*\.safetensors")  # a name in the same folder
MOST_INDEX = 16 << 20  # bytes; a tensor takes about 120
DIGESTS = "digests.json"  # SHA-256 of each file of weights, as it was written
OTHERS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".npz", ".safetensors", ".gz", ".zip")
NUMBERS = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def open_tensors(path):
    """Return the library's open file; raise OSError or ValueError for what is wrong with it."""
    with open_regular(path) as file:  # the library would wait for a pipe
        size = os.fstat(file.fileno()).st_size
        kind = recognized(file.read(HEAD), size)
        if kind not in (None, SAFETENSORS):
            raise ValueError(f"is {kind}")
        try:
            return safe_open(path, "np")
        except SafetensorError as error:
            text = brief(str(error).removeprefix("Error while deserializing header: "), 200)
            raise ValueError(f"is not a whole safetensors file ({size:,} bytes): {text}") from None


def safetensors_head(tensors) -> bytes:
    """Return the bytes of a safetensors file before its numbers.

    tensors: (name, dtype, shape) in the order in which their numbers follow, without gaps. The
    library writes only what is in memory as a whole.
    """
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    names = {dtype: name for name, dtype in NUMBERS.items()}
    for name, dtype, shape in tensors:
        start, offset = offset, offset + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": names[dtype],
            "shape": list(shape),
            "data_offsets": [start, offset],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class WeightFiles(ExitStack):
    """The open files of a folder of weights.

    tensors: {name: Tensor} of all files, where dtype is safetensors' name of the type. slices:
    {name: what an index of rows reads, for types among NUMBERS}. where: the folder, which begins
    each message. Raises DataError that names the file.
    """

    def __init__(self, folder):
        super().__init__()
        self.folder, self.where = Path(folder), str(folder)
        self.slices, names = {}, index_of(self.folder)
        other = "" if names else instead_of_weights(self.folder)
        for name in names or [WEIGHTS]:
            with problems_as(DataError, f"{self.where}: {name}", other):
                file = self.enter_context(open_tensors(self.folder / name))
            found = {one: file.get_slice(one) for one in file.keys()}  # noqa: SIM118 (no mapping)
            if twice := found.keys() & self.slices.keys():
                raise DataError(f"{self.where}: tensor {shown(min(twice))} is in two files")
            self.slices |= found
        self.tensors = {
            name: Tensor(tuple(one.get_shape()), one.get_dtype())
            for name, one in self.slices.items()
        }


def instead_of_weights(folder: Path) -> str:
    """Return what to do if a folder has no model.safetensors, naming what it has instead, or ""."""
    if os.path.exists(folder / WEIGHTS) or not os.path.isdir(folder):
        return ""
    found = [name for name in sorted(os.listdir(folder)) if name.endswith(OTHERS)]
    here = f", and here is {brief(', '.join(found), 200)}" if found else ""
    cure = "let transformers save the whole model, with a LoRA adapter merged into it"
    return f"weights are read from {WEIGHTS} or {INDEX}{here}: {cure}"


def index_of(folder: Path) -> list[str]:
    """Return the names of the files in a folder's index; [] for one file without an index."""
    if os.path.exists(folder / WEIGHTS) or not os.path.exists(folder / INDEX):
        return []
    where = f"{folder}: {INDEX}"
    content = read_json(folder / INDEX, where=where, most_bytes=MOST_INDEX)
    with problems_as(DataError, where):
        found = built(dict[str, str], built(dict, content, "it").get("weight_map"), "weight_map")
    names = sorted({*found.values()})
    if not names or not all(map(BESIDE.fullmatch, names)):
        raise DataError(f"{where}: does not name files in this folder ending in .safetensors")
    return names


def weight_paths(folder: Path) -> list[Path]:
    """Return the files of a folder of weights, including the index. Raises DataError."""
    index = index_of(folder)
    return [folder / name for name in ([INDEX, *index] if index else [WEIGHTS])]


def write_weights(
    folder: Path, texts: dict[str, str], tensors, blocks: Iterator[np.ndarray]
) -> None:
    """Write tensors block by block; all files get their names at the end, the old ones stay before.

    The folder is created if necessary, and a link is refused. texts: {name: text} of files to write
    beside the weights. tensors: (name, dtype, shape) in order. blocks: contiguous arrays of the
    tensors' type, with all their numbers in order. Raises OSError.
    """
    digest, head = hashlib.sha256(), safetensors_head(tensors)
    # New weights must never be compared with the digests of old ones, or read by their index.
    with replaced_files(folder.parent, folder.name, gone=[INDEX, DIGESTS]) as create:
        files = {name: create(name) for name in [*texts, WEIGHTS, DIGESTS]}
        for name, text in texts.items():
            files[name].write(text.encode())
        for block in itertools.chain([np.frombuffer(head, np.uint8)], blocks):
            piece = block.reshape(-1).view(np.uint8)
            files[WEIGHTS].write(piece)
            digest.update(piece)
        numbers = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in tensors)
        assert files[WEIGHTS].tell() == len(head) + numbers, "blocks are not the tensors"
        files[DIGESTS].write(json.dumps({WEIGHTS: digest.hexdigest()}, indent=2).encode() + b"\n")


def written_digests(folder: Path) -> dict[str, str]:
    """Return {file: SHA-256} of a folder's weights as they were written; {} if nothing is known.

    Raises DataError.
    """
    path = folder / DIGESTS
    with problems_as(DataError, str(path)):
        content = read_json(path) if path.exists() else {}
        found = built(dict[str, str], content, "its content")
    return {name: digest for name, digest in found.items() if BESIDE.fullmatch(name)}


def check_digests(folder: Path, found: Mapping[str, str]) -> None:
    """Raise DataError that names the files of weights that are not what was written.

    found: {name: SHA-256} of the files that are read.
    """
    written = written_digests(folder)
    wrong = [name for name, digest in found.items() if written.get(name, digest) != digest]
    if wrong:
        raise DataError(
            f"{folder / wrong[0]}: is damaged, or was changed: another SHA-256 was written; if you"
            f" changed it, remove {folder / DIGESTS}"
        )
