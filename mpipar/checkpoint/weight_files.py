"""The files of a folder of weights: one, or several with an index that says where each tensor is.

Names and index are Hugging Face's: `model.safetensors`, or `model-00001-of-00003.safetensors` and
so on beside `model.safetensors.index.json`. Each of these files is called a shard there.
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

from mpipar.checkpoint.disk import safetensors_head
from mpipar.checkpoint.tensor_file import Entry, TensorFile
from mpipar.errors import DataError
from mpipar.files import no_links
from mpipar.files.bounded import problems_as, read_json
from mpipar.files.recognize import SAFETENSORS, recognize
from mpipar.files.replace import replaced_files
from mpipar.files.text import brief, shown
from mpipar.files.typed import built

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")  # as they are written
BESIDE = re.compile(r"[^./\\\0][^/\\\0]*\.safetensors")  # a name in the same folder
MOST_INDEX = 16 << 20  # bytes; a tensor takes about 120
MOST_TOLD = 10  # problems reported for one index
DIGESTS = "digests.json"  # SHA-256 of each file of weights, as it was written
OTHERS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".npz", ".safetensors", ".gz", ".zip")
ADAPTER = "adapter_config.json"
ADAPTER_CURE = "this is a LoRA adapter; merge it into its model (merge_and_unload of peft)"


class WeightFiles:
    """The open files of a folder of weights.

    tensors: {name: Entry} of all files. where: begins each message. Every method raises DataError
    that names the file.
    """

    def __init__(self, folder, where: str):
        self.folder, self.where = Path(folder), where
        self.files: dict[str, TensorFile] = {}
        self.tensors: dict[str, Entry] = {}
        self.file_of: dict[str, str] = {}
        with ExitStack() as stack:
            expected = index_of(self.folder, where)
            other = "" if expected else instead_of_weights(self.folder)
            for name in dict.fromkeys(expected.values()) or [WEIGHTS]:
                with problems_as(DataError, f"{where}: {name}", other):
                    self.files[name] = stack.enter_context(TensorFile(self.folder / name))
            self._match(expected)
            self.stack = stack.pop_all()

    def _match(self, expected: dict[str, str]) -> None:
        """Collect the tensors of all files, if each is in one of them, as the index says."""
        wrong = [
            f"{self.where}: {INDEX}: says that tensor {shown(name)} is in {file}, which lacks it"
            for name, file in expected.items()
            if name not in self.files[file].tensors
        ]
        for file_name, file in self.files.items():
            for name, entry in file.tensors.items():
                if name in self.tensors:
                    wrong.append(
                        f"{self.where}: tensor {shown(name)} is in"
                        f" {self.file_of[name]} and in {file_name}"
                    )
                self.tensors[name], self.file_of[name] = entry, file_name
        if wrong:
            raise DataError(wrong[:MOST_TOLD])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stack.close()

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Return the rows [first, last) of a tensor. See `TensorFile.rows`."""
        file = self.file_of[name]
        with problems_as(DataError, f"{self.where}: {file}"):
            return self.files[file].rows(name, first, last)


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


def index_of(folder: Path, where: str) -> dict[str, str]:
    """Return {tensor: name of its file} of a folder's index; {} for one file without an index."""
    if os.path.exists(folder / WEIGHTS) or not os.path.exists(folder / INDEX):
        return {}
    where = f"{where}: {INDEX}"
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


def weight_paths(folder: Path, where: str) -> list[Path]:
    """Return the files of a folder of weights, including the index. Raises DataError."""
    index = index_of(folder, where)
    return [
        folder / name for name in ([INDEX, *sorted(set(index.values()))] if index else [WEIGHTS])
    ]


def split(tensors, most_bytes: int) -> dict[str, list]:
    """Return {file name: its tensors}, in order, so that no file exceeds so many bytes of numbers.

    tensors: (name, dtype, shape) in order. A tensor that is larger gets a file of its own.
    """
    parts: list[list] = [[]]
    size = 0
    for one in tensors:
        more = _bytes(one)
        if parts[-1] and size + more > most_bytes:
            parts.append([])
            size = 0
        parts[-1].append(one)
        size += more
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    return {
        f"model-{number:05}-of-{len(parts):05}.safetensors": part
        for number, part in enumerate(parts, 1)
    }


def _bytes(tensor) -> int:
    _, dtype, shape = tensor
    return math.prod(shape) * dtype.itemsize


def write_weights(
    folder: Path, texts: dict[str, str], tensors, most_bytes: int, blocks: Iterator[np.ndarray]
) -> None:
    """Write tensors block by block; all files get their names at the end, the old ones stay before.

    The folder is created if necessary, and a link is refused. texts: {name: text} of files to write
    beside the weights. tensors, most_bytes: see `split`. blocks: arrays of the tensors' type, with
    all their numbers in order. Raises OSError.

    The library `safetensors` writes only what is in memory as a whole.
    """
    parts, rest = split(tensors, most_bytes), np.empty(0, np.uint8)
    index = {INDEX: _index_text(parts)} if len(parts) > 1 else {}
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in index.items()}

    def taken(size: int) -> Iterator[np.ndarray]:
        """Yield the next bytes, so many of them."""
        nonlocal rest
        while size:
            rest = rest if rest.size else next(blocks).reshape(-1).view(np.uint8)
            piece, rest = rest[:size], rest[size:]
            size -= piece.size
            yield piece

    # Half of a new set of files must never be mixed with half of an old one under one index, or
    # be compared with its digests.
    with replaced_files(folder.parent, folder.name, gone=[*index, DIGESTS]) as create:
        files = {name: create(name) for name in [*texts, *parts, *index, DIGESTS]}
        for name, text in (texts | index).items():
            files[name].write(text.encode())
        for name, part in parts.items():
            digest = hashlib.sha256()
            for piece in itertools.chain([safetensors_head(part)], taken(sum(map(_bytes, part)))):
                files[name].write(piece)
                digest.update(piece)
            digests[name] = digest.hexdigest()
        assert next(blocks, None) is None, "blocks beyond the tensors"
        files[DIGESTS].write(json.dumps(digests, indent=2).encode() + b"\n")
    with no_links.folder(folder.parent, folder.name) as inside:
        stale = [name for name in os.listdir(inside) if name not in files and _is_of_weights(name)]
    for name in stale:
        no_links.remove(folder.parent, f"{folder.name}/{name}")


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
    return {name: digest for name, digest in found.items() if _is_of_weights(name)}


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


def _is_of_weights(name: str) -> bool:
    return name in (WEIGHTS, INDEX) or SHARD.fullmatch(name) is not None


def _index_text(parts: dict[str, list]) -> str:
    sizes = [(_bytes(one), math.prod(one[2])) for part in parts.values() for one in part]
    total, parameters = map(sum, zip(*sizes, strict=True))
    return (
        json.dumps(
            {
                "metadata": {"total_parameters": parameters, "total_size": total},
                "weight_map": {one[0]: name for name, part in parts.items() for one in part},
            },
            indent=2,
        )
        + "\n"
    )
