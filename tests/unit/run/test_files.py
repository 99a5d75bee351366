"""Files from outside: each hostile or broken one ends with one sentence, immediately."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import tarfile
import tomllib
import zipfile
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process import assert_refused, at_once
from safetensors.numpy import save

from mpipar.config.text import harmless, printable, shown
from mpipar.errors import DataError, UsageError
from mpipar.run.checkpoint.tensor_file import entries, open_tensors
from mpipar.run.files import bounded
from mpipar.run.files.recognize import recognize

MANY = 400_000


JSON = {
    "nothing": ("", "is not JSON"),
    "depth": ("[" * MANY, "more than 32 deep"),
    "depth that Python reads": ("[" * 40 + "]" * 40, "more than 32 deep"),
    "objects in objects": ('{"a":' * MANY, "more than 32 deep"),
    "5,000 digits": (f'{{"a": {"9" * 5000}}}', "is not JSON: .*digits"),
    "30 digits": (f'{{"a": [-{"9" * 30}]}}', "64 bits cannot hold"),
    "NaN": ('{"a": [NaN]}', "not a finite number"),
    "more than float64": ("1e999", "not a finite number"),
    "a zero byte": ('["\\u0000"]', "zero byte"),
    "a zero byte in a name": ('{"a\\u0000": 1}', "zero byte"),
    "half a character": ('["\\ud800"]', "half a character"),
    "a key twice": ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' twice"),
    "a key twice among many": (json.dumps({f"k{i}": 1 for i in range(90_000)})[:-1] + ',"k9":1}',
                               "the key 'k9' twice"),
}  # fmt: skip
TOML = {
    "no value": ("x" * MANY, "is not TOML"),
    "depth": ("a = " + "[" * MANY, "more than 32 deep"),
    "tables in tables": ("a = " + "{b = " * 40 + "1" + "}" * 40, "more than 32 deep"),
    "5,000 digits": ("layers = " + "9" * 5000, "is not TOML: .*digits"),
    "hexadecimal digits": ("layers = 0x" + "f" * 5000, "64 bits"),
    "a zero byte": ('out = "run\\u0000"', "zero byte"),
    "a key twice": ("a = 1\na = 2", "Cannot overwrite a value"),
    "texts without end": ('a = "' + '\\"' * MANY + "\\", "is not TOML"),
}  # fmt: skip


def toml(path):
    return bounded.read_toml(path, UsageError, where="--config a")


@pytest.mark.parametrize(("read", "error", "text", "part"), [
    *((partial(bounded.read_json, most_bytes=1 << 22), DataError, *one) for one in JSON.values()),
    *((toml, UsageError, *one) for one in TOML.values()),
])  # fmt: skip
def test_what_is_hostile_or_broken(read, error, text, part, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(text)
    with at_once(), pytest.raises(error, match=rf"(a\.json|^--config a): .*{part}"):
        read(path)


def test_a_file_that_is_no_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path, part in [
        (tmp_path / "pipe", "a pipe or a device; give a regular file"),
        (tmp_path / "folder", "is a folder, a pipe"),
        ("/dev/zero", "or a device"),
        (tmp_path / "none", "No such file"),
        ("a\0b", "zero byte"),
    ]:
        with at_once(), pytest.raises(DataError, match=part):
            bounded.read_json(path)


def test_size_and_encoding_of_a_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(DataError, match="is not UTF-8 text: byte 7"):
        bounded.read_json(path)
    os.truncate(path, 1 << 40)  # a hole: nothing is stored, and nothing may be allocated
    with at_once(), pytest.raises(DataError, match=r"has 1,099,511,627,776 bytes; the limit is"):
        bounded.read_json(path)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text('ab\\"\n\u20ac')
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc"), inner),
)


@given(VALUES)
def test_every_other_value_is_read_as_it_is(value):
    assert bounded.parse_json(json.dumps(value)) == value


@given(VALUES, st.data())
def test_damaged_json_is_read_or_refused(value, data):
    text = list(json.dumps(value))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(text)))
        text[place : place + data.draw(st.integers(0, 2))] = data.draw(
            st.text('[]{}",:\\u0d8e9-.NI\x00', max_size=3)
        )
    text = "".join(text)
    with suppress(ValueError):
        assert bounded.parse_json(text) == json.loads(text)


@given(st.text("a.b\"'[]{}=#,\\\n 1e_-x:TZ", max_size=60))
def test_any_toml_is_read_or_refused(text):
    with suppress(ValueError):
        assert bounded.parse_toml(text) == tomllib.loads(text)


def test_text_that_a_terminal_would_obey_is_spelled_out():
    assert harmless("a\x1b[31mb\rc\x9bd\u202ee\nf\tg") == "a\\x1b[31mb\\rc\\x9bd\\u202ee\nf\tg"
    assert printable("\x07\u20ac") == "\\x07\u20ac"
    assert shown("\x1b" + "x" * 1000, 10) == "'\\x1bxxxxx..."
    assert shown(["a"]) == "['a']"


# --- A file is named by its first bytes before it is parsed


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


# --- safetensors files of a user: read by the library, and hostile ones refused


def written(path, header, numbers=b"\0" * 16, length=None):
    """Write a file with this header, a value or a text."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    length = len(text) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + text + numbers)
    return path


def entry(first=0, last=16, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}


def test_a_type_that_cannot_be_read_does_not_hide_the_others(tmp_path):
    path = written(
        tmp_path / "a.safetensors", {"a": entry(0, 8, (8,), "F8_E4M3"), "b": entry(8, 16, (2,))}
    )
    with open_tensors(path) as file:
        assert entries(file)["a"].dtype == "F8_E4M3"
        np.testing.assert_array_equal(file.get_slice("b")[0:2], [0, 0])


# --- inputs without bounds: each ends with exit code 2 or 65 and one sentence, immediately


NINES = "9" * 5000
SIZES = {
    "--d-model 2147483646": "--d-model 2147483646: must be at most 131,072",
    "--layers 2e9": "--layers 2e9: must be a whole number",
    "--layers 2000000000": "--layers 2000000000: must be at most 1,024",
    f"--layers {NINES}": "must be a whole number",
    "--num-microbatches 2147483647": "must be at most 65,536",
    "--num-microbatches 65536": "use a smaller --num-microbatches",
    "--schedule interleaved --chunks 2147483647": "must be at most 1,024",
    "--schedule interleaved --chunks 1024 --num-microbatches 512": "use a smaller --num-",
    f"--layout dp={NINES}": "is not understood",
    "--layout dp=999999999,pp=4096,tp=65536": "at most 131,072 can be explained",
    f"--memory-limit {NINES}": "must be bytes",
    f"--rank {NINES}": "must be a whole number",
}
COUNTS = {
    "1f1b --num-microbatches 2147483647": "must be at most 65,536",
    "interleaved --chunks 2147483647": "must be at most 1,024",
    "1f1b --pp 2147483647 --num-microbatches 1": "must be at most 4,096",
    "--compare --num-microbatches 2147483647": "must be at most 65,536",
    "1f1b --costs 1e999999999,1,1": "'1e999999999' is not a number of at most 9 digits",
    f"1f1b --costs {NINES},1,1": "is not a number of at most 9 digits",
    "1f1b --latency 1e-999999999": "'1e-999999999' is not a number",
}


@pytest.mark.parametrize("words", SIZES, ids=lambda words: words[:40])
def test_sizes_are_bounded_before_anything_is_made(words):
    for command in (
        ("explain",)
        if "explained" in SIZES[words] or "rank" in words
        else ("explain", "train", "verify")
    ):
        if (command, words[:14]) != ("verify", "--memory-limit"):
            with at_once():
                assert_refused(2, [SIZES[words]], command, *words.split())


@pytest.mark.parametrize("words", COUNTS, ids=lambda words: words[:40])
def test_counts_of_a_schedule_are_bounded(words):
    with at_once():
        assert_refused(2, [COUNTS[words]], "schedule", *words.split())


@pytest.mark.parametrize(("text", "part"), [
    ("0F9999999\n", "is not an instruction"), (f'"{"x" * 200_000}"\n', "larger than field limit"),
    ("0F0,1F0," * 300_000, "more than 524,288 instructions"),
    ("0F0\n" * (3 << 20), "the limit is 8,388,608"),
], ids=lambda value: value[:20])  # fmt: skip
def test_csv_files_are_bounded(text, part, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with at_once():
        assert_refused(2, [part], "schedule", "--from-csv", path)
        assert_refused(2, [part], "train", "--schedule-csv", path, "--steps", "1")


@pytest.mark.parametrize("words", [
    "train --config PIPE", "explain --machine PIPE.toml", "train --data PIPE",
    "schedule --from-csv PIPE", "train --val-data PIPE",
])  # fmt: skip
def test_a_pipe_is_no_file(words, tmp_path):
    os.mkfifo(tmp_path / "PIPE")
    os.mkfifo(tmp_path / "PIPE.toml")
    code = 2 if "--config" in words or "csv" in words else 65
    with at_once():
        assert_refused(
            code, ["PIPE", ": is a folder, a pipe or a device"], *words.split(), folder=tmp_path
        )
