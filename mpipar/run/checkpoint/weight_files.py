"""The files of a folder of weights: one, or several with an index that says where each tensor is.

Names and index are Hugging Face's: `model.safetensors`, or `model-00001-of-00003.safetensors` and
so on beside `model.safetensors.index.json`. mpipar writes one file.
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

import numpy as np
from safetensors import safe_open

from mpipar.config.text import brief, shown
from mpipar.errors import DataError
from mpipar.run.checkpoint.tensor_file import Entry, entries, open_tensors, safetensors_head
from mpipar.run.files.bounded import problems_as, read_json
from mpipar.run.files.recognize import SAFETENSORS, recognize
from mpipar.run.files.replace import replaced_files
from mpipar.run.files.typed import built

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
BESIDE = re.compile(r"[^./\\\0][^/\\\0]*\.safetensors")  # a name in the same folder
MOST_INDEX = 16 << 20  # bytes; a tensor takes about 120
MOST_TOLD = 10  # problems reported for one index
DIGESTS = "digests.json"  # SHA-256 of each file of weights, as it was written
OTHERS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".npz", ".safetensors", ".gz", ".zip")
ADAPTER = "adapter_config.json"
ADAPTER_CURE = "this is a LoRA adapter; merge it into its model (merge_and_unload of peft)"


class WeightFiles(ExitStack):
    """The open files of a folder of weights.

    tensors: {name: Entry} of all files. where: the folder, which begins each message. Every method
    raises DataError that names the file.
    """

    def __init__(self, folder):
        super().__init__()
        self.folder, self.where = Path(folder), str(folder)
        self.files: dict[str, safe_open] = {}
        self.tensors: dict[str, Entry] = {}
        self.file_of: dict[str, str] = {}
        where, wrong, expected = self.where, [], index_of(self.folder)
        other = "" if expected else instead_of_weights(self.folder)
        with ExitStack() as opened:  # all are closed at once if one is refused
            for name in dict.fromkeys(expected.values()) or [WEIGHTS]:
                with problems_as(DataError, f"{where}: {name}", other):
                    file = opened.enter_context(open_tensors(self.folder / name))
                self.files[name], found = file, entries(file)
                wrong += [
                    f"{where}: tensor {shown(one)} is in {self.file_of[one]} and in {name}"
                    for one in found.keys() & self.tensors.keys()
                ]
                self.tensors |= found
                self.file_of |= dict.fromkeys(found, name)
            wrong += [
                f"{where}: {INDEX}: says that tensor {shown(one)} is in {name}, which lacks it"
                for one, name in expected.items()
                if not wrong and self.file_of.get(one) != name
            ]
            if wrong:
                raise DataError(wrong[:MOST_TOLD])
            self.push(opened.pop_all())

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Return the rows [first, last) of a tensor whose type is one of NUMBERS."""
        return self.files[self.file_of[name]].get_slice(name)[first:last]


def instead_of_weights(folder: Path) -> str:
    """Return what to do if a folder has no model.safetensors, by what it has instead, or ""."""
    if os.path.exists(folder / WEIGHTS) or not os.path.isdir(folder):
        return ""
    if os.path.exists(folder / ADAPTER):
        return f"{ADAPTER} is there: {ADAPTER_CURE}"
    for name in sorted(os.listdir(folder)):
        kind = recognize(folder / name) if name.endswith(OTHERS) else None
        if kind == SAFETENSORS:
            return f"there is {brief(name)}: give it the name {WEIGHTS}, or add {INDEX}"
        if kind:
            return f"{brief(name)} is {kind}"
    return "only safetensors can be read: let transformers save the weights in that format"


def index_of(folder: Path) -> dict[str, str]:
    """Return {tensor: name of its file} of a folder's index; {} for one file without an index."""
    if os.path.exists(folder / WEIGHTS) or not os.path.exists(folder / INDEX):
        return {}
    where = f"{folder}: {INDEX}"
    content = read_json(folder / INDEX, where=where, most_bytes=MOST_INDEX)
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found:
        raise DataError(f"{where}: has no object 'weight_map' with the file of each tensor")
    wrong = [
        f"{where}: {shown(name)} does not name a file in this folder ending in .safetensors"
        for name in dict.fromkeys(map(str, found.values()))
        if not BESIDE.fullmatch(name)
    ]
    if wrong:
        raise DataError(wrong[:MOST_TOLD])
    return found


def weight_paths(folder: Path) -> list[Path]:
    """Return the files of a folder of weights, including the index. Raises DataError."""
    index = index_of(folder)
    return [
        folder / name for name in ([INDEX, *sorted(set(index.values()))] if index else [WEIGHTS])
    ]


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
    if not os.path.exists(path):
        return {}
    content = read_json(path)
    with problems_as(DataError, str(path)):
        found = built(dict[str, str], content, "its content")
    return {
        name: digest for name, digest in found.items() if name == INDEX or BESIDE.fullmatch(name)
    }


def check_digests(folder: Path, found: Mapping[str, str]) -> None:
    """Raise DataError that names the files of weights that are not what was written.

    found: {name: SHA-256} of the files that are read.
    """
    written = written_digests(folder)
    wrong = [
        f"{folder / name}: is damaged, or was changed: its SHA-256 is {found[name]},"
        f" {written[name]} was written; if you changed it, remove {folder / DIGESTS}"
        for name in sorted(written.keys() & found.keys())
        if written[name] != found[name]
    ]
    if wrong:
        raise DataError(wrong[:MOST_TOLD])
