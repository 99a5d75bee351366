"""Ranks that share cores: how they wait for each other, and the cost of a pass (planted times)."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from small_model import MODEL, WORLD, comms_of, cpu, small_config, worker_of

from mpipar.comm import groups, request
from mpipar.comm.grid import Grid
from mpipar.comm.hosts import Cores
from mpipar.plan import measure

pytestmark = pytest.mark.ranks(4)
WALL, CORE, CROWDED = 3.0, 2.0, 2.5  # seconds of a pass; the last two are those of a core


def planted(layout, cores, monkeypatch):
    """The costs where a pass takes WALL and CORE in turns, and CROWDED when all ranks compute."""
    calls = []

    def measured(worker, repeats, nap=0.0):
        calls.append(nap)
        each = [WALL, CORE if len(calls) == 1 else CROWDED]
        return {kind: dict.fromkeys(range(MODEL.layers + 2), each) for kind in "fiw"}

    monkeypatch.setattr(measure, "measure_times", measured)
    monkeypatch.setattr(measure, "cores_of", lambda world: Cores(cores, cores < WORLD.size))
    config = small_config(layout)
    grid = Grid.of(config.grid, WORLD.rank)
    return measure.measure_costs(config, grid, cpu(), WORLD), calls


@pytest.mark.parametrize(
    ("layout", "cores", "times"),
    [
        ((4, 1, 1), 2, 2),
        ((1, 4, 1), 1, 2),
        ((2, 2, 1), 2, 2),
        ((4, 1, 1), 4, 1),  # a core each
        ((2, 1, 2), 2, 1),  # ranks of tp wait for each other, which takes cores, too
    ],
)
def test_sharing_is_the_time_of_a_core_with_all_ranks_over_that_in_turns(
    layout, cores, times, monkeypatch
):
    costs, calls = planted(layout, cores, monkeypatch)
    assert calls == [0.0, request.NAP_SECONDS][:times]
    if WORLD.rank == 0:
        assert set(costs.f + costs.i + costs.w) == {WALL}
        assert costs.sharing == (CROWDED / CORE if times == 2 else 1.0)


@pytest.mark.parametrize(
    ("axis", "crowded", "sleeps"),
    [
        ("world", True, True),
        ("world", False, False),
        ("dp", True, False),  # of one stage: its ranks come together
    ],
)
def test_a_rank_whose_stage_is_done_early_sleeps_before_a_sum(axis, crowded, sleeps, monkeypatch):
    naps = []

    def sleep(seconds):
        naps.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(request, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(groups, "cores_of", lambda world: Cores(2, crowded))
    monkeypatch.setattr(groups, "finish_passes_first", lambda: None)
    comms = comms_of(axes={"pp": 2, "dp": 2})
    comm = comms.groups[axis]
    last = comm.index == comm.size - 1
    if last:
        time.sleep(0.05)
    total = comm.all_reduce(np.array([2.0**WORLD.rank]), "sum")
    assert total == sum(2.0**rank for rank in comm.ranks)
    comms.close()
    assert last or bool(naps) == sleeps


def test_waiting_and_sleep_are_no_time_of_a_core(monkeypatch):
    """Clocks that do not agree: each look, 4 seconds pass and the core works for 1."""
    now, naps = [0.0], []

    def tick():
        now[0] += 4.0
        return now[0]

    monkeypatch.setattr(measure, "perf_counter", tick)
    monkeypatch.setattr(measure, "thread_time", lambda: now[0] / 4.0)
    worker = worker_of(small_config((4, 1, 1)))
    worker.initialize()
    monkeypatch.setattr(measure, "sleep", lambda nap: (naps.append(nap), tick()))
    times = measure.measure_times(worker, 2, 0.5)
    worker.close()
    units = MODEL.layers + 2
    assert naps == [0.5] * (3 * units * (1 + 2))  # behind each unit of each pass
    assert {tuple(each) for units in times.values() for each in units.values()} == {(4.0, 1.0)}
