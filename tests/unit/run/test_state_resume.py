"""Training resumes from a checkpoint bit by bit, and each part of the state is needed for that."""

from threading import Event

import numpy as np
import pytest
from simulated_ranks import on_all, workers_of
from state_cases import FACTS, assert_filled, config_for, fill, loaded, savers_of

from mpipar.errors import DataError
from mpipar.layers.flat import FlatParams
from mpipar.run.checkpoint import boxes, load, save
from mpipar.run.checkpoint.load import load_state
from mpipar.run.checkpoint.manifest import committed_steps, read_manifest
from mpipar.run.checkpoint.save import Saver
from mpipar.run.data.rows import Rows
from mpipar.train.gradsync import LossScale

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
            load.load_state(*arguments)

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
            load.load_state(*arguments)

    monkeypatch.setitem(globals(), "load_state", broken)
    assert_resumes_differently(tmp_path, dtype="bfloat16")


def test_the_state_of_a_later_step(tmp_path, monkeypatch):
    """A background save that writes the live state and not its copy."""
    monkeypatch.setattr(save, "copies_of", lambda own, *arguments: own)
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
    plain = save.place_among_copies  # both write the first rows, and say so
    monkeypatch.setattr(save, "place_among_copies", lambda *arguments: (0, plain(*arguments)[1]))
    with pytest.raises(AssertionError):
        save_and_load(tmp_path / "named", dp=2)
