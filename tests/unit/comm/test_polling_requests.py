"""Where ranks share cores, a rank that waits for a message sleeps between two tests of it, and
interrupts no other rank when it wakes up.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mpipar import ops
from mpipar.comm import groups, mpi, transport
from mpipar.comm.grid import Grid
from mpipar.comm.mpi import POLLS_BEFORE_SLEEP, MpiTransport, PollingRequest
from mpipar.comm.recorder import Recorder
from mpipar.config.run import RunConfig


class Late:
    """A request that is done at the given test."""

    def __init__(self, tests):
        self.tests = tests

    def Test(self):
        self.tests -= 1
        return self.tests <= 0


@pytest.fixture
def naps(monkeypatch):
    found = []
    monkeypatch.setattr(mpi, "time", SimpleNamespace(sleep=found.append))
    return found


def test_naps_grow_to_the_longest(naps):
    PollingRequest(Late(POLLS_BEFORE_SLEEP + 6)).Wait()
    assert naps == [50e-6, 100e-6, 200e-6, 200e-6, 200e-6]


def test_a_message_that_is_nearly_there_is_not_slept_for(naps):
    PollingRequest(Late(POLLS_BEFORE_SLEEP)).Wait()
    assert naps == []


@pytest.mark.parametrize("yields_cpu", [True, False])
def test_sends_and_receives_are_patient_on_request(yields_cpu):
    wire = MpiTransport.__new__(MpiTransport)  # without MPI
    wire.options, wire.mpi_isend = transport.Options(yields_cpu=yields_cpu), lambda *_: Late(1)
    wire.mpi = SimpleNamespace(Irecv=wire.mpi_isend)
    for made in (wire.isend(None, 1, 0), wire.irecv(None, 1, 0)):
        assert isinstance(made, PollingRequest) == yields_cpu
        assert made.Test()


@pytest.mark.parametrize(
    ("layout", "uneven"),
    [
        ([{"pp": 2, "dp": 2}], {"world", "pp", "tie"}),
        ([{"dp": 4}], set()),
        ([{"dp": 2, "tp": 2}], set()),
        ([{"pp": 4}, ("tp", "cp", "dp", "pp")], {"world", "pp", "tie"}),
    ],
)
def test_groups_with_several_stages_are_uneven(layout, uneven, monkeypatch):
    made = []

    def connect(ops, mpi_world, ranks, options):
        made.append((ranks, options.uneven))
        return transport.ShapesTransport(ops)

    monkeypatch.setattr(groups, "connect", connect)
    grid, recorder = Grid(0, *layout), Recorder()
    comms = groups.Comms(
        grid,
        ops.shapes_for(RunConfig(), recorder),
        recorder,
        partitions={"tie": grid.partition("pp", [(0, grid.size("pp") - 1)])},
    )
    expected = {comm.ranks: name in uneven for name, comm in comms.groups.items() if comm.size > 1}
    assert dict(made) == expected


@pytest.mark.parametrize("crowded", [True, False])
def test_only_ranks_that_share_cores_ask_for_it(crowded, monkeypatch):
    asked = []
    monkeypatch.setattr(groups, "shares_cores", lambda world: crowded)
    monkeypatch.setattr(groups, "use_batch_scheduling", lambda: asked.append(1))
    recorder = Recorder()
    groups.Comms.solo(ops.shapes_for(RunConfig(), recorder), Grid(0), recorder)
    assert asked == [1] * crowded


@pytest.mark.parametrize(
    ("before", "after"), [("SCHED_OTHER", "SCHED_BATCH"), ("SCHED_IDLE", "SCHED_IDLE")]
)
def test_the_usual_policy_becomes_one_that_interrupts_nobody(before, after):
    """In a process of its own; a policy that the user chose stays."""
    code = f"""import os
from mpipar.comm.hosts import use_batch_scheduling
os.sched_setscheduler(0, os.{before}, os.sched_param(0))
use_batch_scheduling()
print(os.sched_getscheduler(0))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{getattr(os, after)}\n", done.stderr
