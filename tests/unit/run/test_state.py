"""Checkpoints of the full state: saved on one layout, loaded on another, bit for bit."""

import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process import assert_refused, printed
from program import flip
from safetensors.numpy import load_file
from state_cases import (
    assert_filled,
    config_for,
    full_tensor,
    known_shard,
    loaded,
    on_all,
    saved,
    savers_of,
    state_views,
    workers_of,
)

from mpipar.config.resolve import resolve
from mpipar.config.sections import build
from mpipar.config.train import OPTIMIZERS
from mpipar.errors import DataError, OutputError
from mpipar.run.checkpoint import boxes
from mpipar.run.checkpoint.boxes import within
from mpipar.run.checkpoint.formats import model_settings
from mpipar.run.checkpoint.manifest import NAME, committed_steps, damage, read_manifest
from mpipar.run.checkpoint.state import Pieces, load_state
from mpipar.run.files.settings import values_of
from mpipar.run.resolve import digest_of_weights
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
    {"dp": 3, "zero": 1, "bucket_bytes": 800},
    {"dp": 2, "tp": 2, "zero": 3, "rank_order": "tp,cp,dp,pp"},
    {"dp": 5, "bucket_bytes": 800},
    {"pp": 2, "schedule": "interleaved", "tied": False},
]


def ranks_of(layout):
    return math.prod(layout.get(axis, 1) for axis in ("dp", "pp", "cp", "tp"))


def files_of(folder):
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
    *({"dtype": "float64", "optimizer": name} for name in OPTIMIZERS),
    {"dtype": "bfloat16", "optimizer": "muon"}, {"dtype": "float16", "norm": "rms"},
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
    """A commit also removes what others have left, and nothing else."""
    (saver,) = savers_of(workers_of(config_for(), 1), tmp_path, keep)
    for name in ("step-00000009.partial-0a", ".trash-step-00000001-0b", "notes"):
        (tmp_path / name).mkdir()
    for step in (1, 2, 3, 4):
        saver.save(step)
    assert [step for step, _ in committed_steps(tmp_path)] == left
    assert len(list(tmp_path.iterdir())) == len(left) + 1


# --- a disk that cannot take it


def test_a_rank_whose_file_is_elsewhere(tmp_path):
    """A folder that not all hosts share: rank 1 has written, but rank 0 cannot see it."""
    savers = savers_of(workers_of(config_for(dp=2), 2), tmp_path)
    savers[1].file = "pieces-00009.safetensors"

    def fails(saver):
        with pytest.raises(OutputError, match=r"pieces-00001\.safetensors: has no bytes"):
            saver.save(2)

    on_all(fails, savers)
    assert list(tmp_path.iterdir()) == []


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


# --- another model


@pytest.mark.fault
@pytest.mark.parametrize(("ours", "parts"), [
    ({"vocab_size": 30, "tied": False, "layers": 4}, "block3.* and "),
    ({"dtype": "float64"}, "block0.* and "),
    ({"optimizer": "sgd"}, "differs in m, v"),
], ids=str)  # fmt: skip
def test_another_model_or_optimizer_is_refused(ours, parts, tmp_path):
    written = saved(config_for(), 1, tmp_path)
    (worker,) = workers_of(config_for(**ours), 1)
    with pytest.raises(DataError, match=f"is of another model or optimizer, .*{parts}"):
        load_state(worker, written, read_manifest(written))
    assert not any(np.any(values) for *_, values in state_views(worker))


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


@pytest.mark.parametrize(("dtype", "background"), [("float64", False), ("bfloat16", True)])
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
    on_all(lambda saver: saver.save(3), savers)
    on_all(lambda saver: saver.commit(), savers)
    ((_, between),) = committed_steps(tmp_path / "device")
    workers = loaded(on_host, 2, between)
    for worker in workers:
        assert_filled(worker)
    on_all(lambda saver: saver.save(3), savers_of(workers, tmp_path / "again"))
    ((_, again),) = committed_steps(tmp_path / "again")
    assert files_of(again) == files_of(written)


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


def as_a_link(path):
    shutil.move(path, path.parent.parent / "outside")
    path.symlink_to(path.parent.parent / "outside")


def as_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


OF_A_FILE = [
    (lambda path: os.truncate(path, 300), r"has \d+ bytes, \d+ were written|is not JSON"),
    (lambda path: path.unlink(), "No such file|has no bytes"),
    (as_a_link, "is a link|were written"),
    (as_a_pipe, "were written|is a link"),
]


@pytest.mark.parametrize("name", ["manifest.json", PIECES])
@pytest.mark.parametrize(("change", "part"), OF_A_FILE)
def test_a_file_that_is_not_what_was_written(change, part, name, folder):
    change(folder / name)
    assert_damaged(folder, f"{name}.*({part})")


def test_a_checkpoint_that_is_removed_during_a_resume_is_named(folder):
    """It was found before; what reads it later does not look for other weights in its place."""
    (folder / NAME).unlink()
    for read in (read_manifest, digest_of_weights, model_settings):
        with pytest.raises(DataError, match=rf"{folder.name}/manifest.json: .*No such file"):
            read(str(folder))


def test_names_that_are_no_checkpoints(folder):
    parent = folder.parent
    for name in ("step-3", "step-00000001.partial-0a", "step-0000000x"):
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
    "a file above": (named(f"../{PIECES}"), r"\.\./pieces-00001\.safetensors: has no bytes"),
    "a zero byte": (named("pieces-00001\0.safetensors"), "is not JSON"),
    "a box of texts": (lambda one: one["pieces"][0].update(box=["ab"]), r"pieces\[0\].box"),
    "no tensors": (lambda one: one.update(tensors={}), "it lacks tensors"),
    "half a scale": (lambda one: one["loss_scale"].pop("good"), "values of a loss scale"),
    "a newer format": (lambda one: one.update(format=2), "its format is 2, this mpipar reads 1"),
    "an entry more": (lambda one: one.update(more=1), "is not the manifest"),
}


@pytest.mark.fault
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


# --- boxes


LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=4)


@given(LENGTHS, st.data())
def test_rows_of_copies_and_blocks_tile_a_shard(lengths, data):
    box = tuple(
        (first, first + length)
        for first, length in zip(
            data.draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths))),
            lengths,
            strict=True,
        )
    )
    copies = data.draw(st.integers(1, 9))
    shares = [boxes.share_of_rows(box, index, copies) for index in range(copies)]
    rows = [row for share in shares for row in range(*share[0])]
    assert rows == list(range(*box[0]))
    limit = data.draw(st.integers(1, 300))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "BLOCK_BYTES", limit)
        blocks = list(boxes.row_blocks(box, 4))
    assert [row for block in blocks for row in range(*block[0])] == rows
    assert all(
        4 * boxes.volume(block) <= limit or block[0][1] - block[0][0] == 1 for block in blocks
    )


@given(LENGTHS, st.data())
def test_boxes_of_a_run_hold_its_elements_in_order(lengths, data):
    whole = np.arange(math.prod(lengths)).reshape(lengths)
    first, stop = sorted(data.draw(st.lists(st.integers(0, whole.size), min_size=2, max_size=2)))
    found = boxes.boxes_of_run(tuple(lengths), first, stop)
    parts = [whole[boxes.within(box, tuple((0, length) for length in lengths))] for box in found]
    numbers = [number for part in parts for number in part.reshape(-1)]
    assert numbers == list(range(first, stop))
    assert len(found) <= 2 * len(lengths) - 1
    assert all(part.size for part in parts)


# --- A checkpoint written by version 0.1.0 can still be read, onto any layout


OLD = Path(__file__).parent / "old_checkpoint"
STEP = OLD / "checkpoints" / "step-00000002"


def test_it_exports_the_weights_that_its_run_wrote(tmp_path, monkeypatch):
    monkeypatch.setattr(boxes, "BLOCK_BYTES", 200)
    printed("ckpt", "export", OLD, "--out", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = load_file(OLD / "weights.safetensors")
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_no_weights_of_another_model_are_exported(tmp_path):
    """Other heads are other shapes, although the files of weights would have as many numbers."""
    shutil.copytree(OLD, tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / STEP.name
    two, four = (
        f"heads = {heads}\nkv-heads = {heads // 2}\nhead-dim = {8 // heads}" for heads in (2, 4)
    )
    rewrite(step, lambda one: one.update(config=one["config"].replace(two, four)))
    assert_refused(
        65,
        ["not the tensors of its configuration"],
        "ckpt",
        "export",
        tmp_path / "run",
        "--out",
        tmp_path / "out",
    )
    assert not (tmp_path / "out").exists()


def whole_tensor(pieces, name, kind):
    """All numbers of a tensor, from all files that have some of them."""
    shape = pieces.manifest.tensors[name].shape
    found = np.full(shape, np.nan, np.float32)
    for box, block in pieces.read(name, kind, boxes.whole_box(shape)):
        found[tuple(slice(*one) for one in box)] = block
    return found


@pytest.mark.parametrize(
    "layout",
    [{"dp": 1}, {"dp": 1, "tp": 2}, {"dp": 1, "pp": 2}, {"dp": 2, "zero": 3}, {"dp": 1, "cp": 2}],
    ids=str,
)
def test_it_loads_onto_any_layout(layout):
    manifest = read_manifest(STEP)
    values = values_of(manifest.config) | {"pp": 1, "cp": 1, "tp": 1, "zero": 0} | layout
    size = values["dp"] * values["pp"] * values["cp"] * values["tp"]
    config, _ = resolve(build(values), size)
    with Pieces(STEP, manifest) as pieces:
        whole = {
            kind: {name: whole_tensor(pieces, name, kind) for name in manifest.tensors}
            for kind in manifest.kinds
        }
    seen = set()
    for worker in loaded(config, size, STEP):
        for flat in worker.flats:
            for kind in flat.state:
                for param, first, held in flat.parts_in(kind):
                    shard = np.zeros(param.local_shape, np.float32)
                    box = tuple((0, length) for length in param.shape)
                    inside = tuple(slice(0, stop - start) for start, stop in param.box)
                    shard[inside] = whole[kind][param.name][within(param.box, box)]
                    np.testing.assert_array_equal(
                        held, shard.reshape(-1)[first : first + held.size], err_msg=param.name
                    )
                    seen.add((kind, param.name))
    assert len(seen) == 3 * len(manifest.tensors)
