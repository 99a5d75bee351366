"""Safetensors files of a user: read as by the library, and hostile ones refused."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from mpipar.checkpoint.tensor_file import NUMBERS, TensorFile


def written(path, header, numbers=b"\0" * 16, length=None):
    """Write a file with this header, a value or a text."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    length = len(text) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + text + numbers)
    return path


def entry(first=0, last=16, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}


def test_a_file_is_read_as_the_library_reads_it(rng, tmp_path):
    tensors = {
        "a": rng.random((5, 3, 2)).astype(np.float32),
        "b": rng.random(7),
        "c": rng.random((4, 2)).astype(np.float16),
        "empty": np.zeros((0, 3)),
        "d": rng.random((6, 1)).astype(ml_dtypes.bfloat16),
    }
    save_file(tensors, tmp_path / "a.safetensors", {"format": "pt"})
    with (
        TensorFile(tmp_path / "a.safetensors") as own,
        safe_open(tmp_path / "a.safetensors", "numpy") as other,
    ):
        assert own.tensors.keys() == set(other.keys())
        for name, expected in tensors.items():
            assert own.tensors[name].shape == expected.shape
            assert NUMBERS[own.tensors[name].dtype] == expected.dtype
            if len(expected):
                np.testing.assert_array_equal(own.rows(name, 1, len(expected)), expected[1:])


HOSTILE = {  # a header, what else is to be written
    "a header longer than the file": ({}, {"length": 1 << 20}),
    "a header that is a list": ([], {}),
    "objects in objects": ('{"a":' * 9_999, {}),
    "numbers missing": ({"a": entry()}, {"numbers": b""}),
    "an overlap": ({"a": entry(), "b": entry()}, {}),
    "a gap": ({"a": entry(8, 16, (2,))}, {}),
    "an enormous shape": ({"a": entry(shape=(2**62, 2**62))}, {}),
    "an unknown type": ({"a": entry(dtype="Q7")}, {}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused(case, tmp_path):
    header, more = HOSTILE[case]
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        TensorFile(written(tmp_path / "a.safetensors", header, **more))


def test_a_type_that_cannot_be_read_does_not_hide_the_others(tmp_path):
    path = written(
        tmp_path / "a.safetensors", {"a": entry(0, 8, (8,), "F8_E4M3"), "b": entry(8, 16, (2,))}
    )
    with TensorFile(path) as file:
        assert file.tensors["a"].dtype == "F8_E4M3"
        np.testing.assert_array_equal(file.rows("b", 0, 2), [0, 0])


@pytest.mark.parametrize("rows", [(0, 4), (1, 3), (2, 2)])
def test_rows_of_a_large_tensor_come_in_several_reads(rows, tmp_path, monkeypatch):
    """As a file system may return fewer bytes than were asked for."""
    x = np.arange(4 * 5 * 3, dtype=np.float32).reshape(4, 5, 3)
    save_file({"a": x, "b": x + 1}, tmp_path / "a.safetensors")
    plain = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, parts, place: plain(file, [parts[0][:7]], place))
    with TensorFile(tmp_path / "a.safetensors") as file:
        np.testing.assert_array_equal(file.rows("b", *rows), x[slice(*rows)] + 1)


def test_a_file_that_is_cut_while_it_is_read(tmp_path, monkeypatch):
    """Also between two reads of one tensor: a mapping would end the process there."""
    path = written(
        tmp_path / "a.safetensors", {"a": entry(0, 1 << 20, (1 << 18,))}, b"1" * (1 << 20)
    )
    plain = os.preadv

    def cuts(file, parts, place):
        size = plain(file, [parts[0][:4096]], place)
        os.truncate(path, 1000)
        return size

    monkeypatch.setattr(os, "preadv", cuts)
    with TensorFile(path) as file, pytest.raises(ValueError, match="bytes, but had more"):
        file.rows("a", 0, 1 << 18)
