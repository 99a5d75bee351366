"""kill -9 at every system call of a save: the newest committed checkpoint always loads."""

import itertools
import os
import shutil
import signal
from pathlib import Path

import pytest
from fault_table import fault
from simulated_ranks import workers_of
from state_cases import assert_filled, config_for, fill, loaded, savers_of

from mpipar.run.checkpoint.manifest import committed_steps, damage

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
@fault(15, "kill -9 at each call of a save", None)
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
