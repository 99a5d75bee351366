"""Safetensors files of a user: read by the library, and hostile ones refused."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from mpipar.run.checkpoint.tensor_file import NUMBERS, entries, open_tensors


def written(path, header, numbers=b"\0" * 16, length=None):
    """Write a file with this header, a value or a text."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    length = len(text) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + text + numbers)
    return path


def entry(first=0, last=16, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [first, last]}


def test_rows_of_every_type(rng, tmp_path):
    tensors = {
        "a": rng.random((5, 3, 2)).astype(np.float32),
        "b": rng.random(7),
        "c": rng.random((4, 2)).astype(np.float16),
        "empty": np.zeros((0, 3)),
        "d": rng.random((6, 1)).astype(ml_dtypes.bfloat16),
    }
    save_file(tensors, tmp_path / "a.safetensors", {"format": "pt"})
    with open_tensors(tmp_path / "a.safetensors") as file:
        found = entries(file)
        assert found.keys() == tensors.keys()
        for name, expected in tensors.items():
            assert found[name].shape == expected.shape
            assert NUMBERS[found[name].dtype] == expected.dtype
            if len(expected):
                np.testing.assert_array_equal(file.get_slice(name)[1:], expected[1:])


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
        open_tensors(written(tmp_path / "a.safetensors", header, **more))


def test_a_type_that_cannot_be_read_does_not_hide_the_others(tmp_path):
    path = written(
        tmp_path / "a.safetensors", {"a": entry(0, 8, (8,), "F8_E4M3"), "b": entry(8, 16, (2,))}
    )
    with open_tensors(path) as file:
        assert entries(file)["a"].dtype == "F8_E4M3"
        np.testing.assert_array_equal(file.get_slice("b")[0:2], [0, 0])
