"""Where ranks share cores, a rank that waits for a message sleeps between two looks at it."""

from types import SimpleNamespace

import pytest

from mpipar.comm import transport
from mpipar.comm.transport import POLLS_BEFORE_SLEEP, HostTransport, PatientRequest


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
    monkeypatch.setattr(transport, "time", SimpleNamespace(sleep=found.append))
    return found


def test_naps_grow_to_the_longest(naps):
    PatientRequest(Late(POLLS_BEFORE_SLEEP + 6)).Wait()
    assert naps == [50e-6, 100e-6, 200e-6, 200e-6, 200e-6]


def test_a_message_that_is_nearly_there_is_not_slept_for(naps):
    PatientRequest(Late(POLLS_BEFORE_SLEEP)).Wait()
    assert naps == []


@pytest.mark.parametrize("patient", [True, False])
def test_sends_and_receives_are_patient_on_request(patient):
    wire = HostTransport.__new__(HostTransport)  # without MPI
    wire.patient, wire._isend = patient, lambda *_: Late(1)
    wire.mpi = SimpleNamespace(Irecv=wire._isend)
    for made in (wire.isend(None, 1, 0), wire.irecv(None, 1, 0)):
        assert isinstance(made, PatientRequest) == patient
        assert made.Test()
