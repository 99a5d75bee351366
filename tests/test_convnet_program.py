"""`mpipar train --model convnet` as a user types it: learning, files and refusals."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from in_process import assert_refused
from program import layout_flags, metrics, mpipar, weights

from mpipar.config.sections import Config
from mpipar.data import images
from mpipar.errors import DataError

CONVNET = ("train", "--model", "convnet")


def npz(folder, **changes):
    """A file of 40 random images 6 x 5 of 3 classes, with arrays replaced, or left out by None."""
    rng = np.random.default_rng(1)
    arrays = {"x": rng.random((40, 6, 5)), "y": np.arange(40) % 3} | changes
    path = folder / "images.npz"
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return str(path)


@pytest.mark.slow
def test_learns_the_digits_and_its_weights_go_on_in_another_layout(tmp_path):
    pytest.importorskip("sklearn", reason="digits: scikit-learn is not installed")
    run, more = tmp_path / "run", tmp_path / "more"
    result = mpipar(*CONVNET, "--out", run, ranks=2).ended()
    found = re.search(r"accuracy ([\d.]+)% of 359 images", result.stdout)
    assert float(found[1]) > 95, result.tail()
    assert metrics(run)[-1]["loss"] < 0.1 < metrics(run)[0]["loss"]
    described = json.loads((run / "weights" / "config.json").read_text())
    assert described["model_type"] == "mpipar-convnet"
    assert weights(run)["block1.up.w"].shape == (3, 3, 32, 128)
    result = mpipar(
        *CONVNET,
        "--out",
        more,
        "--steps",
        1,
        "--lr",
        1e-9,
        "--init-from",
        run / "weights",
        *layout_flags((1, 1, 2)),
        ranks=2,
    ).ended()
    assert re.search(r"accuracy ([\d.]+)%", result.stdout)[1] == found[1]
    assert_refused(2, ["a convnet, which generates no text"], "generate", run, "--prompt", "a")
    assert_refused(2, ["type --model convnet"], "train", "--init-from", run / "weights")


def test_images_of_the_users_own_and_verify(tmp_path):
    shape = (
        "--data",
        npz(tmp_path),
        "--image-shape",
        "6,5,1",
        "--classes",
        3,
        "--channels",
        5,
        "--batch-size",
        8,
        "--num-microbatches",
        2,
    )
    result = mpipar("verify", "--model", "convnet", *shape, *layout_flags((1, 1, 3)), ranks=3)
    assert result.returncode == 0, result.tail()
    assert re.search(r"(\d+) of \1 agree to 1e-12", result.stdout), result.tail()
    assert "40 images of" in result.stdout


WRONG_FILES = {
    "no x": ({"x": None, "z": np.zeros(2)}, "has no array x (it has y, z)"),
    "another size": ({"x": np.zeros((40, 9, 5))}, "the images are 9,5,1; type --image-shape 9,5,1"),
    "too many classes": ({"y": np.arange(40)}, "type --classes 40 or more"),
    "negative class": ({"y": np.arange(40) % 3 - 1}, "y has classes -1 to 1"),
    "no whole numbers": ({"y": np.zeros(40)}, "y must hold whole numbers"),
    "not as many": ({"y": np.zeros(7, int)}, "equally many classes (N,)"),
    "not finite": ({"x": np.full((40, 6, 5), np.nan)}, "x must hold finite numbers"),
    "objects": ({"x": np.array([None] * 40)}, "is not an .npz file of numeric arrays"),
    "few": ({"x": np.zeros((9, 6, 5)), "y": np.zeros(9, int)}, "has 9 images, fewer than one"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_a_wrong_file_is_refused(tmp_path, case):
    arrays, message = WRONG_FILES[case]
    assert_refused(
        65,
        [message],
        *CONVNET,
        "--data",
        npz(tmp_path, **arrays),
        "--image-shape",
        "6,5,1",
        "--classes",
        3,
        "--batch-size",
        8,
        "--num-microbatches",
        2,
        "--out",
        tmp_path / "run",
    )
    assert not (tmp_path / "run").exists()


def test_without_scikit_learn_the_extra_is_named(monkeypatch, tmp_path):
    for name in ("sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, name, None)  # any import of it fails now
    assert_refused(65, ["pip install '.[digits]'"], *CONVNET, folder=tmp_path)


WRONG_FLAGS = {
    "of a decoder": (
        ("--heads", 4, "--d-model", 31),
        ("--heads: belongs to --model decoder", "type --channels 31"),
    ),
    "preset": (("--preset", "gpt2"), ("--preset gpt2 with --model convnet",)),
    "image of two numbers": (("--image-shape", "8,8"), ("--image-shape 8,8: ",)),
    "image too small": (("--stem-stride", 9), ("use --image-shape 10,10,1, or --stem-stride 7",)),
}


@pytest.mark.parametrize("case", WRONG_FLAGS)
def test_wrong_flags_are_refused(case):
    flags, messages = WRONG_FLAGS[case]
    assert_refused(2, messages, "explain", "--model", "convnet", *flags)


@pytest.mark.parametrize(
    "damage",
    [(b"PK\x01\x02", 6, 99), (b"PK\x01\x02", 8, 1), (b"x.npy", 60, 255)],
    ids=["zip version", "encrypted", "compressed bytes"],
)
def test_a_damaged_file_is_no_file_of_images(tmp_path, damage):
    path = tmp_path / "images.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).random((40, 6, 5)), y=np.arange(40) % 3)
    damaged = bytearray(path.read_bytes())
    mark, distance, byte = damage
    damaged[damaged.index(mark) + distance] = byte
    path.write_bytes(damaged)
    config = replace(Config(), run=replace(Config().run, data=(str(path),)))
    with pytest.raises(DataError, match=r"is not an \.npz file of numeric arrays"):
        images.load(config)
