"""Damaged and hostile checkpoints: each is refused with exit code 65, and nothing else is read."""

import hashlib
import json
import os
import re
import shutil

import numpy as np
import pytest
from damage import flip
from fault_table import fault
from state_cases import assert_filled, config_for, loaded, saved

from mpipar.errors import DataError
from mpipar.run.checkpoint.formats import model_settings
from mpipar.run.checkpoint.manifest import NAME, committed_steps, damage, read_manifest
from mpipar.run.compared import digest_of_weights

PIECES = "pieces-00001.safetensors"
SMALL = {"layers": 1, "d_model": 4, "heads": 2, "ffn": 3, "seq_len": 2, "vocab_size": 5}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return saved(config_for(dp=2, **SMALL), 2, tmp_path_factory.mktemp("state"))


@pytest.fixture
def folder(original, tmp_path):
    """A copy of a checkpoint that two ranks have written."""
    return shutil.copytree(original, tmp_path / original.name)


def load(folder):
    return loaded(config_for(**SMALL), 1, folder)[0]


def assert_damaged(folder, *parts):
    """Assert that the full check and a load name what is wrong."""
    problems = "\n".join(damage(folder))
    with pytest.raises(DataError) as caught:
        load(folder)
    for part in parts:
        assert re.search(part, problems), problems
        assert re.search(part, str(caught.value)), caught.value


def test_the_original_loads(folder):
    assert damage(folder) == []
    assert_filled(load(folder))


@pytest.mark.parametrize("name", ["manifest.json", PIECES])
def test_every_flipped_bit_is_found(name, folder):
    path = folder / name
    content = bytearray(path.read_bytes())
    places = np.random.default_rng(1).integers(0, 8 * len(content), 40).tolist()
    for place in (*places, 0, 8 * len(content) - 1):
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        assert_damaged(folder, name)
        content[place // 8] ^= 1 << place % 8


def test_a_flipped_bit_names_file_and_tensor(folder):
    flip(folder / PIECES, 1)
    with pytest.raises(DataError, match=rf"{PIECES}: is damaged: its SHA-256 is .*; tensor "):
        load(folder)
    (problem,) = damage(folder)
    assert re.search(rf"{PIECES}: is damaged: its SHA-256 is \w+, \w+ was written", problem)


@pytest.mark.parametrize("size", [0, 7, 300, -1])
def test_a_truncated_file(size, folder):
    path = folder / PIECES
    path.write_bytes(path.read_bytes()[:size])
    assert_damaged(folder, rf"{PIECES}: has [\d,]+ bytes, [\d,]+ were written")


@pytest.mark.parametrize("name", ["manifest.json", PIECES])
def test_a_missing_file(name, folder):
    (folder / name).unlink()
    assert_damaged(folder, f"{name}: No such file")


@pytest.mark.parametrize("gone", ["manifest", "folder"])
def test_a_checkpoint_that_is_removed_during_a_resume_is_named(gone, folder):
    """It was found before; what reads it later does not look for other weights in its place."""
    (folder / NAME).unlink()
    if gone == "folder":
        shutil.rmtree(folder)
    for read in (read_manifest, digest_of_weights, model_settings):
        with pytest.raises(DataError, match=rf"{folder.name}/manifest.json: .*was it removed"):
            read(str(folder))


def test_the_folder_of_another_step(folder):
    renamed = folder.rename(folder.with_name("step-00000004"))
    assert_damaged(renamed, "is of step 3, but its folder is of another")


@fault(18, "a stray file of another layout", 0)
def test_a_stray_file_is_reported_and_not_read(folder):
    shutil.copy(folder / PIECES, folder / "pieces-00002.safetensors")
    (problem,) = damage(folder)
    assert problem.endswith("pieces-00002.safetensors: does not belong to the checkpoint")
    assert_filled(load(folder))


def test_names_that_are_no_checkpoints(folder):
    parent = folder.parent
    for name in ("step-3", "step-00000001.partial-0a", ".trash-step-00000002-0a", "step-0000000x"):
        (parent / name).mkdir()
    (parent / "step-00000009").write_text("")
    assert committed_steps(parent) == [(3, folder)]
    assert committed_steps(parent / "nowhere") == []


# --- manifests that someone has made up, with the right digest


def rewrite(folder, change):
    """Change the entries of a manifest, and give it the digest that fits them."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    change(content)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps(content | {"sha256": hashlib.sha256(text.encode()).hexdigest()}))


def entry(*keys, value):
    """A change of one entry of a manifest."""

    def change(content):
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return change


def named(name):
    """Return a change that gives the second file another name, with the same bytes in it."""

    def change(content):
        content["files"][name] = content["files"].pop(PIECES)
        for piece in content["pieces"]:
            if piece["file"] == PIECES:
                piece["file"] = name

    return change


def without(*keys):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


HOSTILE = {
    "a file above": (named(f"../{PIECES}"), r"'../pieces-00001\.safetensors' is not the name"),
    "an absolute path": (named("/etc/passwd"), "'/etc/passwd' is not the name of a file"),
    "another name": (named("weights.safetensors"), "is not the name of a file"),
    "a zero byte": (named("pieces-00001\0.safetensors"), "zero byte"),
    "a box of texts": (entry("pieces", 0, "box", value=["ab"]), r"pieces\[0\].box"),
    "a newer format": (
        entry("format", value=2),
        "has format 2, but this version of mpipar reads 1: it was written",
    ),
    "a counter with a point": (entry("loss_scale", "good", value=5.0), "loss_scale.good"),
    "another step": (entry("step", value=2**60), "its folder is of another"),
    "an entry more": (entry("more", value=1), "is not the manifest"),
    "a configuration of numbers": (entry("config", value=7), "config is 7"),
}


@fault(23, "hostile manifests", 65)
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_refused(case, folder):
    change, part = HOSTILE[case]
    rewrite(folder, change)
    shutil.copy(folder / PIECES, folder.parent / PIECES)  # what a name with ../ would reach
    with pytest.raises(DataError, match=part):
        read_manifest(folder)
    assert damage(folder)


def test_an_axis_that_a_checkpoint_does_not_name_had_one_rank(folder):
    rewrite(folder, without("layout", "cp"))
    assert read_manifest(folder).layout == {"pp": 1, "dp": 2, "cp": 1, "tp": 1}


@pytest.mark.parametrize("name", ["manifest.json", PIECES])
@pytest.mark.parametrize("kind", ["a link", "a pipe"])
def test_links_and_pipes_are_not_followed(name, kind, folder):
    path = folder / name
    if kind == "a link":
        shutil.move(path, folder.parent / "outside")
        path.symlink_to(folder.parent / "outside")
    else:
        path.unlink()
        os.mkfifo(path)
    assert_damaged(folder, f"{name}.*(is a link|pipe|were written)")
