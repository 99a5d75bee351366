"""How many of our own calls lie between a training step and MPI."""

import sys
from pathlib import Path

import pytest
from small_model import small_config, worker_and_rows

import mpipar

PACKAGE = str(Path(mpipar.__file__).parent)
MOST = {"block1.ffn.down": 10, "grads.bucket": 9}


def own_calls(frame):
    """Names of our functions from `train_step` to a frame's."""
    found = []
    while frame:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_name)
        if frame.f_code.co_name == "train_step":
            return found[::-1]
        frame = frame.f_back
    return []


@pytest.mark.ranks(4)
def test_a_step_reaches_mpi_in_few_calls(monkeypatch):
    """Counted where an algorithm of the transport calls MPI."""
    worker, rows = worker_and_rows(small_config((2, 1, 2)))
    seen = {}
    for comm, method in ((worker.comms["tp"], "all_reduce"), (worker.comms["data"], "iall_reduce")):
        transport = comm.transport
        plain = getattr(transport, method)

        def counted(*given, plain=plain, method=method, **named):
            frame = sys._getframe(1)
            name = frame.f_locals.get("name")
            seen.setdefault(name, [*own_calls(frame), method])
            return plain(*given, **named)

        monkeypatch.setattr(transport, method, counted)
    worker.train_step(1, lambda mb: rows.train(1, mb))
    for name, most in MOST.items():
        assert seen[name][0] == "train_step"
        assert len(seen[name]) <= most, seen[name]
    worker.close()
