"""Checkpoints of the full state: saved on one layout, loaded on another, bit for bit."""

import hashlib
import json
import math
import os
import re
import shutil

import numpy as np
import pytest
from damage import flip
from fault_table import fault
from safetensors.numpy import load_file
from simulated_ranks import on_all, workers_of
from state_cases import (
    assert_filled,
    config_for,
    fill,
    full_tensor,
    known_shard,
    loaded,
    saved,
    savers_of,
    state_views,
)

from mpipar.errors import DataError, OutputError
from mpipar.run.checkpoint.formats import model_settings
from mpipar.run.checkpoint.load import load_state
from mpipar.run.checkpoint.manifest import NAME, committed_steps, damage, read_manifest
from mpipar.run.compared import digest_of_weights
from mpipar.study.explain.predict import predict

LAYOUTS = [
    {},
    {"dp": 2},
    {"pp": 2},
    {"tp": 2},
    {"dp": 2, "pp": 2, "tp": 2},
    {"tp": 3, "dp": 3},
    {"pp": 3, "dp": 2, "rank_order": "dp,pp,cp,tp"},
    {"pp": 2, "schedule": "zb-v", "tied": False},
    {"dp": 2, "cp": 2, "tp": 2},
]


def ranks_of(layout):
    return math.prod(layout.get(axis, 1) for axis in ("dp", "pp", "cp", "tp"))


def save_and_finish(saver, step):
    saver.save(step)
    saver.finish()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=[pytest.mark.slow] * (number % 4 != 0))
        for number, layout in enumerate(LAYOUTS)
    ],
    ids=str,
)
def test_any_layout_reads_what_another_has_written(layout, tmp_path):
    written = saved(config_for(**layout), ranks_of(layout), tmp_path)
    assert damage(written) == []
    for other in ({**one, "tied": layout.get("tied", True)} for one in LAYOUTS):
        for worker in loaded(config_for(**other), ranks_of(other), written):
            assert_filled(worker)


@pytest.mark.parametrize("values", [
    {"dtype": "float64"}, {"dtype": "bfloat16"}, {"dtype": "float16"}, {"optimizer": "sgd"},
    {"optimizer": "muon"}, {"norm": "rms"},
], ids=str)  # fmt: skip
def test_every_kind_of_state(values, tmp_path):
    written = saved(config_for(dp=2, tp=2, **values), 4, tmp_path)
    assert damage(written) == []
    for worker in loaded(config_for(pp=2, **values), 2, written):
        assert_filled(worker)


def test_the_files_are_ordinary_safetensors(tmp_path):
    written = saved(config_for(dp=2, tp=2), 4, tmp_path)
    manifest = read_manifest(written)
    assert manifest.kinds == ("m", "master", "v")
    for piece in manifest.pieces:
        found = load_file(written / piece.file)[piece.key]
        expected = full_tensor(
            piece.tensor, piece.kind, manifest.tensors[piece.tensor].shape, np.float32
        )
        np.testing.assert_array_equal(
            found, expected[tuple(slice(first, stop) for first, stop in piece.box)]
        )


# --- which checkpoints there are


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4])])
def test_the_newest_stay(keep, left, tmp_path):
    (saver,) = savers_of(workers_of(config_for(), 1), tmp_path / "checkpoints", keep)
    for step in (1, 2, 3, 4):
        save_and_finish(saver, step)
    folder = tmp_path / "checkpoints"
    assert [step for step, _ in committed_steps(folder)] == left
    assert len(list(folder.iterdir())) == len(left)


def test_a_commit_removes_what_others_have_left_and_later_steps(tmp_path):
    (worker,) = workers_of(config_for(), 1)
    (saver,) = savers_of([worker], tmp_path)
    saver.save(7)
    (tmp_path / "step-00000009.partial-0a").mkdir()
    (tmp_path / ".trash-step-00000001-0b").mkdir()
    (tmp_path / "notes").mkdir()
    fill(worker, seed=1)
    (again,) = savers_of([worker], tmp_path)
    save_and_finish(again, 5)  # a run that was resumed from a step before 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00000005"]


# --- a disk that cannot take it


def test_a_rank_whose_file_is_elsewhere(tmp_path, monkeypatch):
    """A folder that not all hosts share: rank 1 has written, but rank 0 cannot see it."""
    savers = savers_of(workers_of(config_for(dp=2), 2), tmp_path)
    savers[1].file = "pieces-00009.safetensors"

    def fails(saver):
        with pytest.raises(OutputError, match=r"pieces-00001\.safetensors: No such file"):
            saver.save(2)

    on_all(fails, savers)
    assert list(tmp_path.iterdir()) == []


def test_a_slow_disk_is_progress_for_every_rank(tmp_path, monkeypatch):
    """What a watchdog looks at grows while any rank writes, and says nothing between saves."""
    savers, plain, seen = savers_of(workers_of(config_for(dp=2), 2), tmp_path), os.write, set()

    def write(file, data):
        seen.add(tuple(saver.moved() for saver in savers))
        return plain(file, data)

    monkeypatch.setattr(os, "write", write)
    on_all(lambda saver: saver.save(1), savers)
    for number in range(2):
        assert len({one[number] for one in seen}) > 10
    assert [saver.moved() for saver in savers] == [0, 0]


# --- in the background


def test_a_second_save_waits_for_the_first(tmp_path):
    (saver,) = savers_of(workers_of(config_for(), 1), tmp_path, background=True)
    saver.save(1)
    saver.save(2)
    assert [step for step, _ in committed_steps(tmp_path)] == [1]
    while not saver.written():
        os.sched_yield()
    saver.commit()
    assert [step for step, _ in committed_steps(tmp_path)] == [1, 2]
    saver.finish()  # nothing is left to do


# --- another model


@fault(20, "a checkpoint of another model", 65)
def test_another_model_is_refused_with_a_table(tmp_path):
    written = saved(config_for(), 1, tmp_path)
    manifest = read_manifest(written)
    (worker,) = workers_of(config_for(vocab_size=30, tied=False, layers=4), 1)
    with pytest.raises(DataError) as caught:
        load_state(worker, written, manifest)
    (problem,) = caught.value.problems
    lines = problem.splitlines()
    assert lines[0].endswith("the checkpoint is of another model:")
    here, there = "in the checkpoint", "in the model"
    for line in (
        f"  embedding.tokens: float32 [29, 12] {here}, float32 [30, 12] {there}",
        f"  head.table: missing {here}, float32 [30, 12] {there}",
        f"  block3.ffn.up.w: missing {here}, float32 [12, 21] {there}",
    ):
        assert line in lines
    assert not any(np.any(values) for *_, values in state_views(worker))


@pytest.mark.parametrize(("ours", "part"), [
    ({"dtype": "float64"}, "float32 [12] in the checkpoint, float64 [12] in the model"),
    ({"optimizer": "sgd"}, "it has m, master, v; the optimizer sgd needs master"),
    ({"layers": 9}, "and "),
], ids=str)  # fmt: skip
def test_another_type_or_optimizer_is_refused(ours, part, tmp_path):
    written = saved(config_for(), 1, tmp_path)
    (worker,) = workers_of(config_for(**ours), 1)
    with pytest.raises(DataError, match=re.escape(part)):
        load_state(worker, written, read_manifest(written))


@pytest.mark.parametrize("values", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2, "dtype": "bfloat16"}])
def test_the_copy_for_the_background_is_predicted(values, tmp_path):
    """All ranks' copies together are one state; each is held while the next steps run."""
    config = config_for(save_async=True, **values)
    predicted = [predict(config, number).peak_bytes for number in range(4)]
    savers = savers_of(workers_of(config, 4), tmp_path, background=True)
    assert [peak["snapshot"] for peak in predicted] == [
        sum(one.x.nbytes for one in saver.copy) for saver in savers
    ]
    tensors = savers[0].tensors.values()
    assert sum(peak["snapshot"] for peak in predicted) == 3 * sum(
        4 * math.prod(tensor.shape) for tensor in tensors
    )
    assert "snapshot" not in predict(config_for(**values), 0).peak_bytes


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_state_on_a_gpu(dtype, background, cupy, tmp_path):
    """Saved on the CPU, loaded on a device, saved there and loaded on the CPU: the same bits.

    The device cuts the vocabulary elsewhere, because it pads each rank's rows to a multiple.
    """
    on_device, on_host = (
        config_for(tp=2, dtype=dtype, device=device) for device in ("cuda", "cpu")
    )
    written = saved(on_host, 2, tmp_path / "host")
    workers = loaded(on_device, 2, written)
    for worker in workers:
        for param in (param for flat in worker.flats for param in flat.params):
            shard = known_shard("master", param, worker.ops.accum_dtype, 0)
            expected = shard.astype(worker.ops.dtype).tobytes()
            assert worker.ops.to_host(param.data).tobytes() == expected, param.name
    savers = savers_of(workers, tmp_path / "device", background=background)
    on_all(lambda saver: save_and_finish(saver, 3), savers)
    ((_, between),) = committed_steps(tmp_path / "device")
    workers = loaded(on_host, 2, between)
    for worker in workers:
        assert_filled(worker)
    on_all(lambda saver: saver.save(3), savers_of(workers, tmp_path / "again"))
    ((_, again),) = committed_steps(tmp_path / "again")
    assert contents(again) == contents(written)


# --- damaged and hostile checkpoints: refused with exit code 65, and nothing else is read


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


def as_a_link(path):
    shutil.move(path, path.parent.parent / "outside")
    path.symlink_to(path.parent.parent / "outside")


def as_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


OF_A_FILE = [
    (lambda path: os.truncate(path, 0), r"has [\d,]+ bytes, [\d,]+ were written|is not JSON"),
    (lambda path: os.truncate(path, 300), r"has [\d,]+ bytes, [\d,]+ were written|is not JSON"),
    (lambda path: path.unlink(), "No such file"),
    (as_a_link, "(is a link|were written)"),
    (as_a_pipe, "(pipe|were written|is a link)"),
]


@pytest.mark.parametrize("name", ["manifest.json", PIECES])
@pytest.mark.parametrize(("change", "part"), OF_A_FILE)
def test_a_file_that_is_not_what_was_written(change, part, name, folder):
    change(folder / name)
    assert_damaged(folder, f"{name}.*{part}")


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


def named(name):
    """Return a change that gives the second file another name, with the same bytes in it."""

    def change(content):
        content["files"][name] = content["files"].pop(PIECES)
        for piece in content["pieces"]:
            if piece["file"] == PIECES:
                piece["file"] = name

    return change


HOSTILE = {
    "a file above": (named(f"../{PIECES}"), r"'../pieces-00001\.safetensors' is not the name"),
    "an absolute path": (named("/etc/passwd"), "'/etc/passwd' is not the name of a file"),
    "another name": (named("weights.safetensors"), "is not the name of a file"),
    "a zero byte": (named("pieces-00001\0.safetensors"), "zero byte"),
    "a box of texts": (lambda one: one["pieces"][0].update(box=["ab"]), r"pieces\[0\].box"),
    "a newer format": (
        lambda one: one.update(format=2),
        "has format 2, but this version of mpipar reads 1: it was written",
    ),
    "a counter with a point": (lambda one: one["loss_scale"].update(good=5.0), "loss_scale.good"),
    "another step": (lambda one: one.update(step=2**60), "its folder is of another"),
    "an entry more": (lambda one: one.update(more=1), "is not the manifest"),
    "a configuration of numbers": (lambda one: one.update(config=7), "config is 7"),
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
    rewrite(folder, lambda one: one["layout"].pop("cp"))
    assert read_manifest(folder).layout == {"pp": 1, "dp": 2, "cp": 1, "tp": 1}
