"""A file is named by its first bytes before it is parsed."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save

from mpipar.run.files.recognize import recognize


def zipped(*names: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name in names:
            archive.writestr(name, b"x" * 100)
    return content.getvalue()


def tarred() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return content.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (POINTER, "Git LFS"),
        (zipped("archive/data.pkl"), "PyTorch"),
        (zipped("pytorch_model/data.pkl", "pytorch_model/version"), "PyTorch"),
        (zipped("a.txt"), "zip"),
        (pickle.dumps({"a": 1}), "pickle"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (gzip.compress(b"once upon a time", mtime=0), "gzip"),
        (b"\x28\xb5\x2f\xfd rest", "zstd"),
        (tarred(), "tar"),
        (b"PAR1" + bytes(20), "Parquet"),
        (b"\n<!DOCTYPE html>\n<html></html>", "web page"),
        ("\ufeffonce".encode(), "byte order mark"),
        ("once".encode("utf-16"), "UTF-16"),
        (b'{"text": "a"}\r\n{"text": "b"}\n', "JSON lines"),
        (save({"a": np.zeros(3)}), "safetensors"),
        (b"Once upon a time, <html> was young.\n", None),
        (json.dumps({"model_type": "gpt2", "a": {"b": 1}}, indent=1).encode(), None),
        (np.arange(100, dtype=np.uint16).tobytes(), None),
    ],
)
def test_a_file_is_named_by_its_first_bytes(tmp_path, content, word):
    (tmp_path / "file").write_bytes(content)
    found = recognize(tmp_path / "file")
    assert (word in found) if word else found is None, found
