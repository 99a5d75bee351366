"""The sum of a unit's gradients starts when its last weight gradient is done, not before or later.

No MPI: every rank's real step on shapes, with the order of its events.
"""

import pytest
from config_helpers import changed

from mpipar.comm.grid import Grid
from mpipar.comm.group import Comm
from mpipar.comm.recorder import Recorder
from mpipar.config.resolve import resolve
from mpipar.ops import make
from mpipar.pipeline.engine import Engine
from mpipar.pipeline.schedules.catalog import SCHEDULES
from mpipar.run.data import rows
from mpipar.train.worker import Worker

SHAPE = {
    "layers": 8,
    "d_model": 6,
    "heads": 2,
    "ffn": 11,
    "seq_len": 5,
    "vocab_size": 13,
    "dp": 2,
    "pp": 2,
    "tp": 1,
    "num_microbatches": 4,
    "batch_size": 8,
    "bucket_bytes": 600,
}


def workers(**values):
    """The Workers of the first data rank, one for each pipeline rank, without MPI."""
    values = SHAPE | values
    config, _ = resolve(changed(**values), values["dp"] * values["pp"] * values["tp"])
    for pp_rank in range(config.grid.pp):
        recorder = Recorder(1 << 16)
        place = Grid.of(config.grid, 0).rank_at(pp=pp_rank)
        yield Worker(
            config, Grid.of(config.grid, place), make("shapes", "float32", recorder), recorder
        )


def step(worker):
    """One step on blank rows."""
    config = worker.config
    blank = rows.blank_batch
    worker.train_step(1, lambda mb: blank(worker.ops, config))


def events(worker, monkeypatch):
    """(what, stage, unit) of a step: weight gradients of units as they end, and bucket sums."""
    found, flats = [], {stage: one.flats for stage, one in worker.stages.items()}
    for stage, one in worker.stages.items():
        for unit, layers in enumerate(one.units):
            plain = layers[0].backward_weight

            def backward_weight(stash, plain=plain, stage=stage, unit=unit):
                plain(stash)
                found.append(("W", stage, unit))

            layers[0].backward_weight = backward_weight
    plain_post = Comm.iall_reduce

    def iall_reduce(self, x, name):
        record = worker.recorder
        assert record.phase == "sync"
        if name != "grads.late":
            found.append(("sum", record.stage, x))
        return plain_post(self, x, name)

    monkeypatch.setattr(Comm, "iall_reduce", iall_reduce)
    step(worker)
    monkeypatch.setattr(Comm, "iall_reduce", plain_post)
    return found, flats


def sums_are_in_time(worker, monkeypatch):
    """Return whether each unit's sums come right after its last weight gradient, and carry all of
    it.
    """
    found, flats = events(worker, monkeypatch)
    for stage, own in flats.items():
        for unit in {unit for flat in own for unit in flat.units}:
            alone = [
                flat.units[unit] for flat in own if len(flat.groups) == 1 and unit in flat.units
            ]
            last = max(place for place, one in enumerate(found) if one == ("W", stage, unit))
            behind = []
            for what, where, x in found[last + 1 :]:
                if what != "sum":
                    break
                behind.append(x.size)
                assert where == stage
            wanted = [
                min(150, run.stop - first)
                for run in alone
                for first in range(run.start, run.stop, 150)
            ]
            if behind != wanted:
                return False
    sums = sum(x.nbytes for what, _, x in found if what == "sum")
    late = sum(
        record.payload_bytes for record in worker.recorder.records if record.name == "grads.late"
    )
    assert sums + late == 4 * sum(flat.size for flat in worker.flats)
    return True


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_unit_is_summed_behind_its_last_weight_gradient(schedule, recompute, monkeypatch):
    ranks = list(workers(schedule=schedule, recompute=recompute, tied=True))
    assert len(ranks) == 2
    for worker in ranks:
        assert sums_are_in_time(worker, monkeypatch)


def test_with_one_rank_in_a_data_group_nothing_is_sent(monkeypatch):
    (worker,) = workers(dp=1, pp=1)
    found, _ = events(worker, monkeypatch)
    assert {what for what, *_ in found} == {"W"}


def before_its_weight_gradient(self, unit):
    if self.passing in self.last_passes:
        self.gradsync.end_unit(self.passing.stage, unit, True)


@pytest.mark.parametrize(
    "twin",
    [
        {"enter": before_its_weight_gradient, "leave": lambda self, unit: None},
        {"leave": lambda self, unit: None},  # all at the end of the stage's last backward
    ],
    ids=["too early", "too late"],
)
def test_sums_at_another_time_are_seen(twin, monkeypatch):
    for name, function in twin.items():
        monkeypatch.setattr(Engine, name, function)
    for worker in workers(schedule="1f1b"):
        assert not sums_are_in_time(worker, monkeypatch)
