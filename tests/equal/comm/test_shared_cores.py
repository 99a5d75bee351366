"""Ranks that share cores: how they wait for each other without taking the others' time."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from small_model import WORLD, comms_of

from mpipar.comm import groups, request
from mpipar.comm.hosts import Cores

pytestmark = pytest.mark.ranks(4)


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
