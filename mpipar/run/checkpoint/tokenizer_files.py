"""Files beside weights: the tokenizer's, and one with the token ids that begin and end a text.

A run copies them from its data or from the weights that it starts from, so that the weights it
writes are a model that other programs can load together with its tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path

from mpipar.errors import DataError
from mpipar.run.data import tokenizer
from mpipar.run.files import no_links
from mpipar.run.files.bounded import problems_as, read_bytes, read_json
from mpipar.run.files.replace import replace_file

GENERATION = "generation_config.json"
FILES = (*tokenizer.FILES, GENERATION)
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_tokenizer_files(source: Path | None, speaks=None) -> dict[str, bytes]:
    """Return {name: content} of the files to put beside weights.

    source: the folder of the initial weights. speaks: the run's Tokenizer; if it is another one,
    nothing in `source` applies. Otherwise its generation_config.json says which ids begin and end
    a text, else config.json, else the tokenizer. Raises DataError for a file that cannot be read.
    """
    found, files = _read(source) if source else {}, speaks.files if speaks else {}
    if (
        files
        and found.keys() - {GENERATION}
        and any(found.get(name) != files.get(name) for name in tokenizer.FILES)
    ):
        found = {}
    if GENERATION not in found and speaks and speaks.end is not None:
        found[GENERATION] = json_bytes({"eos_token_id": speaks.end})
    return found | files


def _read(source: Path) -> dict[str, bytes]:
    """Return {name: content} of the files beside weights; make generation_config.json if needed."""
    found = tokenizer.read_files(source)
    if (path := source / GENERATION).exists():
        with problems_as(DataError, str(path)):
            return found | {GENERATION: read_bytes(path)}
    ids = token_ids(source / "config.json")
    is_known = any(value is not None for value in ids.values())
    return found | ({GENERATION: json_bytes(ids)} if is_known else {})


def write_tokenizer_files(found: dict[str, bytes], folder: Path) -> None:
    """Write files into a folder, which is created if necessary; refuse a link. Raises OSError."""
    if found:
        no_links.make_root(folder.parent)
    for name, content in found.items():
        replace_file(f"{folder.name}/{name}", [content], root=folder.parent)


def token_ids(path: Path, vocab_size: int | None = None) -> dict:
    """Return {key: id, list of ids, or None} for IDS from a JSON file; all None without the file.

    An id outside the vocabulary is treated as None.
    """
    content = read_json(path) if path.exists() else {}
    found = content if isinstance(content, dict) else {}
    return {key: found[key] if _is_id(found.get(key), vocab_size) else None for key in IDS}


def _is_id(value, vocab_size: int | None) -> bool:
    ids = value if isinstance(value, list) and value else [value]
    return all(type(one) is int and 0 <= one < (vocab_size or one + 1) for one in ids)


def config_texts(folder: Path, config: dict) -> dict[str, str]:
    """Return {name: text} of config.json and generation_config.json to write into a folder.

    config: all fields except the token ids, which are taken from the folder's existing
    generation_config.json; that file is not changed.
    """
    path = folder / GENERATION
    ids = token_ids(path, config.get("vocab_size"))
    texts = {"config.json": json_bytes(config | ids).decode()}
    return texts if path.exists() else texts | {GENERATION: json_bytes(ids).decode()}


def json_bytes(value) -> bytes:
    """Return a value as the text of a JSON file."""
    return (json.dumps(value, indent=2) + "\n").encode()
