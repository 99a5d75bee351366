"""Checkpoints of the full state: saved on one layout, loaded on another, bit for bit."""

import math
import os
import re
import resource
import signal

import numpy as np
import pytest
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
from mpipar.run.checkpoint import load
from mpipar.run.checkpoint.manifest import committed_steps, damage, read_manifest
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


def test_all_ranks_write_about_the_same(tmp_path):
    config = config_for(dp=2, pp=2, tp=2, d_model=48, ffn=192, layers=4, vocab_size=64)
    manifest = read_manifest(saved(config, 8, tmp_path))
    sizes = [file.bytes for file in manifest.files.values()]
    assert len(sizes) == 8
    assert max(sizes) < 1.3 * min(sizes)


def test_blocks_of_full_tensors(tmp_path, monkeypatch):
    written = saved(config_for(dp=2, tp=2, pp=2), 8, tmp_path)
    manifest = read_manifest(written)
    monkeypatch.setattr(load, "BLOCK_BYTES", 200)
    found = {}
    for name, row, block in load.blocks(written, manifest, manifest.tensors, "v"):
        rows = found.setdefault(name, [])
        assert row == sum(len(one) for one in rows)
        rows.append(block)
    assert found.keys() == manifest.tensors.keys()
    assert max(map(len, found.values())) > 1
    for name, rows in found.items():
        np.testing.assert_array_equal(
            np.concatenate(rows), full_tensor(name, "v", manifest.tensors[name].shape, np.float32)
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


@pytest.fixture
def small_files():
    """A function that limits the size of files: a disk that becomes full, without being root."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)

    def limit(size):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
def test_no_space_leaves_the_former_checkpoint(background, tmp_path, small_files):
    workers = workers_of(config_for(dp=2), 2)
    savers = savers_of(workers, tmp_path, background=background)
    on_all(lambda saver: save_and_finish(saver, 1), savers)
    before = contents(tmp_path / "step-00000001")
    small_files(5000)

    def fails(saver):
        with pytest.raises(
            OutputError,
            match=r"step-00000002: the checkpoint could not be written:"
            r" rank 0: File too large; rank 1: File too large",
        ):
            save_and_finish(saver, 2)

    on_all(fails, savers)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert contents(tmp_path / "step-00000001") == before
    small_files(resource.RLIM_INFINITY)
    on_all(lambda saver: save_and_finish(saver, 3), savers)  # the next interval
    assert [step for step, _ in committed_steps(tmp_path)] == [1, 3]


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


def test_the_background_form_saves_the_state_of_its_step(tmp_path):
    workers = workers_of(config_for(dp=2, dtype="float16"), 2)
    savers = savers_of(workers, tmp_path, background=True)
    for worker in workers:
        fill(worker, seed=0)
    on_all(lambda saver: saver.save(4), savers)
    for worker in workers:
        fill(worker, seed=1)  # training goes on
    assert committed_steps(tmp_path) == []
    on_all(lambda saver: saver.finish(), savers)
    assert not any(saver.written() for saver in savers)
    ((step, folder),) = committed_steps(tmp_path)
    assert step == 4
    for worker in loaded(config_for(tp=2, dtype="float16"), 2, folder):
        assert_filled(worker, seed=0)


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
        load.load_state(worker, written, manifest)
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
        load.load_state(worker, written, read_manifest(written))


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
