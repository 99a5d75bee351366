"""The files of a folder of weights: one, or several with an index that says where each tensor is.

Names and index are Hugging Face's: `model.safetensors`, or `model-00001-of-00003.safetensors` and
so on beside `model.safetensors.index.json`. Each of these files is called a shard there.
"""

from __future__ import annotations

import json
import math
import os
import re
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from mpipar.checkpoint.disk import safetensors_head
from mpipar.checkpoint.tensor_file import Entry, TensorFile
from mpipar.errors import DataError
from mpipar.files import no_links
from mpipar.files.bounded import problems_as, read_json
from mpipar.files.replace import replaced_files
from mpipar.files.text import shown

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")  # as they are written
MOST_INDEX = 16 << 20  # bytes; a tensor takes about 120
MOST_TOLD = 10  # problems reported for one index


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
            other = (
                ""
                if expected or os.path.exists(self.folder / WEIGHTS)
                else (
                    "only safetensors can be read: let transformers save the weights in that format"
                )
            )
            for name in dict.fromkeys(expected.values()) if expected else [WEIGHTS]:
                with problems_as(DataError, f"{where}: {name}", other):
                    self.files[name] = stack.enter_context(TensorFile(self.folder / name))
            self._match(expected)
            self.stack = stack.pop_all()

    def _match(self, expected: dict[str, str]) -> None:
        """Collect the tensors of all files, if each is where the index says, and nowhere else."""
        wrong = []
        for file_name, file in self.files.items():
            for name, entry in file.tensors.items():
                if expected and name not in expected:
                    continue
                if name in self.tensors:
                    wrong.append(
                        f"{self.where}: tensor {shown(name)} is in"
                        f" {self.file_of[name]} and in {file_name}"
                    )
                self.tensors[name], self.file_of[name] = entry, file_name
        wrong += [
            f"{self.where}: {INDEX}: says that tensor {shown(name)} is in {file}, which lacks it"
            for name, file in expected.items()
            if name not in self.files[file].tensors
        ]
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
        if not _is_plain(name)
    ]
    if wrong:
        raise DataError(wrong[:MOST_TOLD])
    return found


def _is_plain(name: str) -> bool:
    """Return whether a name is that of a file beside the index, not of one elsewhere."""
    return (
        name.endswith(".safetensors")
        and not name.startswith(".")
        and not set(name) & {"/", "\\", "\0"}
    )


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


@contextmanager
def new_weights(folder: Path, texts: dict[str, str], tensors, most_bytes: int):
    """Yield a function put(tensor, first, numbers), which writes a flat array from that number on.

    All files get their names when the block ends; the old ones stay until then. The folder is
    created if necessary, and a link is refused. texts: {name: text} of files to write beside the
    weights. tensors, most_bytes: see `split`. Raises OSError.
    """
    parts, places = split(tensors, most_bytes), {}
    index = {INDEX: _index_text(parts)} if len(parts) > 1 else {}
    # Half of a new set of files must never be mixed with half of an old one under one index.
    with replaced_files(folder.parent, folder.name, gone=index) as create:
        files = {name: create(name) for name in [*texts, *parts, *index]}
        for name, text in (texts | index).items():
            files[name].write(text.encode())
        for name, part in parts.items():
            head = safetensors_head(part)
            files[name].write(head)
            files[name].flush()
            offset = len(head)
            for tensor in part:
                places[tensor[0]] = files[name].fileno(), offset, tensor[1]
                offset += _bytes(tensor)

        def put(tensor: str, first: int, numbers: np.ndarray) -> None:
            number, offset, dtype = places[tensor]
            view = memoryview(np.ascontiguousarray(numbers, dtype).view(np.uint8))
            offset += first * dtype.itemsize
            done = 0
            while done < len(view):
                done += os.pwrite(number, view[done:], offset + done)

        yield put
    with no_links.folder(folder.parent, folder.name) as inside:
        stale = [
            name
            for name in os.listdir(inside)
            if name not in files and (SHARD.fullmatch(name) or name in (WEIGHTS, INDEX))
        ]
    for name in stale:
        no_links.remove(folder.parent, f"{folder.name}/{name}")


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
