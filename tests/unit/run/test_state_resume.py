"""Training resumes from a checkpoint bit by bit, and each part of the state is needed for that."""

import itertools
import os
import shutil
import signal
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from state_cases import (
    FACTS,
    assert_filled,
    config_for,
    fill,
    loaded,
    on_all,
    savers_of,
    workers_of,
)

from mpipar.errors import DataError
from mpipar.layers.flat import FlatParams
from mpipar.run.checkpoint import boxes
from mpipar.run.checkpoint import state as checkpoint
from mpipar.run.checkpoint.manifest import committed_steps, damage, read_manifest
from mpipar.run.checkpoint.state import Saver, load_state
from mpipar.run.data.rows import Rows
from mpipar.train.loss_scale import LossScale

TOKENS = np.random.default_rng(7).integers(0, 29, 500).astype(np.uint8)
# float16 overflows in the first steps here.
FLOAT16 = {"dtype": "float16", "loss_scale": 2.0**21}


@pytest.fixture(autouse=True)
def short_interval(monkeypatch):
    """The scale doubles again after four good steps."""
    monkeypatch.setattr(LossScale, "INTERVAL", 4)


def train(worker, steps):
    """Loss, norm, scale and whether skipped, of some steps of a worker without MPI, as texts."""
    rows = Rows(worker.ops, TOKENS, worker.config, worker.grid)
    found = [worker.train_step(step, lambda mb, step=step: rows.train(step, mb)) for step in steps]
    return [
        tuple(map(repr, (one.loss, one.grad_norm, one.loss_scale, one.skipped))) for one in found
    ]


def buffers_of(worker):
    """All bytes that training reads and changes."""
    return [
        buffer.tobytes() for flat in worker.flats for buffer in (flat.data, *flat.state.values())
    ]


def stop_and_resume(folder, background=False, **values):
    """Return what the steps after a save give, and what they leave: ((continued), (resumed))."""
    config = config_for(**values)
    (worker,) = workers_of(config, 1)
    worker.initialize()
    before, state = train(worker, range(1, 6)), worker.loss_scale.state()
    saver = Saver(worker, folder, keep=2, background=background, facts=FACTS)
    gate = Event()
    if background:  # its thread writes when the run has already gone on
        saver.thread.submit(gate.wait, 60)
    saver.save(5)
    went_on = train(worker, range(6, 11)), buffers_of(worker)
    gate.set()
    saver.commit()
    (again,) = workers_of(config, 1)
    again.initialize()
    ((_, step_folder),) = committed_steps(folder)
    load_state(again, step_folder, read_manifest(step_folder))
    if values.get("dtype") == "float16":
        assert {skipped for *_, skipped in before} == {"False", "True"}
        assert min(state["good"], state["skipped"]) > 0
        assert len({scale for _, _, scale, _ in went_on[0]}) > 1
    return went_on, (train(again, range(6, 11)), buffers_of(again))


@pytest.mark.parametrize(
    ("values", "background"),
    [
        ({}, False),
        ({"dtype": "float64", "optimizer": "sgd"}, True),
        ({"dtype": "bfloat16", "optimizer": "muon"}, False),
        ({"dtype": "bfloat16"}, True),
        (FLOAT16, False),
        (FLOAT16 | {"optimizer": "muon"}, True),
    ],
    ids=str,
)
def test_a_resumed_run_goes_on_bit_by_bit(values, background, tmp_path):
    went_on, resumed = stop_and_resume(tmp_path, background, **values)
    assert resumed == went_on


# --- broken twins: the test above must fail


def assert_resumes_differently(folder, **values):
    went_on, resumed = stop_and_resume(folder, **values)
    assert resumed != went_on


@pytest.mark.parametrize("moment", ["m", "v"])
def test_a_moment_not_loaded(moment, tmp_path, monkeypatch):
    plain = FlatParams.state

    def broken(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(
                FlatParams,
                "state",
                property(
                    lambda self: {kind: x for kind, x in plain.fget(self).items() if kind != moment}
                ),
            )
            checkpoint.load_state(*arguments)

    monkeypatch.setitem(globals(), "load_state", broken)
    assert_resumes_differently(tmp_path)


@pytest.mark.parametrize("counter", ["value", "good", "skipped"])
def test_a_counter_of_the_loss_scale_not_saved(counter, tmp_path, monkeypatch):
    plain = LossScale.restore
    monkeypatch.setattr(
        LossScale,
        "restore",
        lambda self, state: plain(self, state | {counter: getattr(self, counter)}),
    )
    assert_resumes_differently(tmp_path, **FLOAT16)


def test_publish_forgotten(tmp_path, monkeypatch):
    def broken(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(FlatParams, "copy_master_to_params", lambda self: None)
            checkpoint.load_state(*arguments)

    monkeypatch.setitem(globals(), "load_state", broken)
    assert_resumes_differently(tmp_path, dtype="bfloat16")


def test_the_state_of_a_later_step(tmp_path, monkeypatch):
    """A background save that writes the live state and not its copy."""
    monkeypatch.setattr(checkpoint, "copies_of", lambda own, *arguments: own)
    went_on, resumed = stop_and_resume(tmp_path, background=True)
    assert resumed != went_on


def save_and_load(folder, **layout):
    """Save the known state with all ranks of a layout; assert that one rank finds it again."""
    workers = workers_of(config_for(**layout), 2)
    for worker in workers:
        fill(worker)
    on_all(lambda saver: saver.save(1), savers_of(workers, folder))
    (worker,) = loaded(config_for(), 1, committed_steps(folder)[-1][1])
    assert_filled(worker)


def shifted(box):
    """The box one row further down, or one further up at the end."""
    (first, stop), *others = box
    return ((first + 1, stop + 1) if first == 0 else (first - 1, stop - 1), *others)


@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_a_box_off_by_one_row(layout, tmp_path, monkeypatch):
    """Either the manifest names other rows than those that are written, or no rank writes some."""
    save_and_load(tmp_path / "right", **layout)
    plain_share, plain_within = boxes.share_of_rows, boxes.within
    with monkeypatch.context() as patch:
        patch.setattr(
            boxes,
            "share_of_rows",
            lambda *arguments: (box := plain_share(*arguments)) and shifted(box),
        )
        with pytest.raises((AssertionError, DataError, ValueError)):
            save_and_load(tmp_path / "named", **layout)

    def within(box, outer):
        rows, *others = plain_within(box, outer)
        if rows.stop - rows.start < outer[0][1] - outer[0][0]:
            rows = slice(*shifted(((rows.start, rows.stop),))[0])
        return (rows, *others)

    monkeypatch.setattr(boxes, "within", within)
    if layout == {"dp": 2}:  # the others write whole shards
        with pytest.raises(AssertionError, match=r" of \w"):
            save_and_load(tmp_path / "written", **layout)


def test_a_replica_writes_what_another_should(tmp_path, monkeypatch):
    save_and_load(tmp_path / "right", dp=2)
    plain = checkpoint.place_among_copies  # both write the first rows, and say so
    monkeypatch.setattr(
        checkpoint, "place_among_copies", lambda *arguments: (0, plain(*arguments)[1])
    )
    with pytest.raises(AssertionError, match="do not cover"):
        save_and_load(tmp_path / "named", dp=2)


# --- kill -9 at every system call of a save: the newest committed checkpoint always loads


SMALL = {
    "layers": 1,
    "d_model": 4,
    "heads": 2,
    "ffn": 3,
    "seq_len": 2,
    "vocab_size": 5,
    "optimizer": "sgd",
}
CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")
LIMIT = 400  # points; a save has some 80


def kill_at(point, log):
    """From now on, kill this process before its call number `point`; half of a write counts too.

    log: a file descriptor that gets the name of the call.
    """
    numbers = itertools.count()
    write, kill = os.write, os.kill

    def dies(name):
        if next(numbers) == point:
            write(log, name.encode())
            kill(os.getpid(), signal.SIGKILL)

    def watched(name, plain):
        def call(*args, **named):
            dies(name)
            return plain(*args, **named)

        return call

    def half_write(file, data):
        dies("write")
        done = write(file, data[: len(data) // 2])
        dies("half of a write")
        return done + write(file, data[len(data) // 2 :])

    for name in CALLS:
        setattr(os, name, watched(name, getattr(os, name)))
    os.write = half_write


def save_and_die(saver, point):
    """Save step 2 in a forked process that dies at a point; the call's name, "" if it lived."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            kill_at(point, write)
            saver.save(2)
            saver.commit()
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read) as file:
        name = file.read()
    if name:
        assert os.WTERMSIG(status) == signal.SIGKILL
    else:
        assert status == 0, f"the save failed: {status}"
    return name


def newest(folder):
    """(step, folder) of the newest checkpoint without damage, as --resume auto finds it."""
    return next(
        (step, path) for step, path in reversed(committed_steps(folder)) if not damage(path)
    )


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize(
    ("start", "background"),
    [("step 1", False), ("a damaged step 2", True)],
    ids=["at once", "background"],
)
@pytest.mark.timeout(120)
def test_the_newest_committed_checkpoint_is_found(start, background, tmp_path, monkeypatch):
    """Of steps 1 (there before) and 2 (being saved); --keep-checkpoints 1 deletes step 1."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # counts, but a kill needs none
    config, folder, base = config_for(**SMALL), tmp_path / "checkpoints", tmp_path / "base"
    (worker,) = workers_of(config, 1)
    (saver,) = savers_of([worker], base)
    fill(worker, seed=0)
    saver.save(1)
    fill(worker, seed=1)
    if start == "a damaged step 2":
        saver.save(2)
        (base / "step-00000002" / "pieces-00000.safetensors").write_bytes(b"x")
    (saver,) = savers_of([worker], folder, keep=1, background=background)
    seen = []
    for point in range(LIMIT):
        shutil.copytree(base, folder)
        assert newest(folder)[0] == 1
        name = save_and_die(saver, point)
        step, path = newest(folder)
        assert_filled(loaded(config, 1, path)[0], seed=step - 1)
        seen.append((name, step))
        (again,) = savers_of([worker], folder, keep=1)
        again.save(3)  # what a killed run has left is no obstacle, and goes
        assert [path.name for path in folder.iterdir()] == ["step-00000003"]
        shutil.rmtree(folder)
        if not name:
            break
    calls, steps = zip(*seen, strict=True)
    assert set(calls) == {*CALLS, "half of a write", ""}
    assert list(steps) == sorted(steps)  # once committed, it stays
    assert calls[steps.index(2) - 1] == "rename"  # which commits it


def test_everything_is_on_the_disk_before_the_commit(tmp_path, monkeypatch):
    """A kill loses nothing that was written; a power cut loses what was not flushed."""
    plain_open, plain_rename, paths, order = os.open, os.rename, {}, []

    def note_open(path, *args, **named):
        file = plain_open(path, *args, **named)
        paths[file] = Path(path)
        return file

    def note_rename(source, target):
        order.append(("rename", Path(source).name.partition("-0")[0]))
        plain_rename(source, target)

    (tmp_path / "run").mkdir()
    (saver,) = savers_of(workers_of(config_for(**SMALL), 1), tmp_path / "run" / "checkpoints")
    monkeypatch.setattr(os, "open", note_open)
    monkeypatch.setattr(
        os, "fsync", lambda file: order.append(("flush", paths[file].name.partition("-0")[0]))
    )
    monkeypatch.setattr(os, "rename", note_rename)
    saver.save(1)
    assert order == [
        ("flush", "run"),
        ("flush", "checkpoints"),
        ("flush", "pieces"),
        ("flush", "manifest.json"),
        ("flush", "step"),
        ("rename", "step"),
        ("flush", "checkpoints"),
    ]
