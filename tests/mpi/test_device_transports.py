"""The GPU path without a GPU: real CupyOps and device transports over a stand-in for CuPy.

A step equals one rank, host and device memory never meet, and the stream is drained before every
MPI call on device memory.
"""

import sys
from dataclasses import replace

import fake_cupy
import numpy as np
import pytest
from small_model import LAYOUTS, MODEL, WORLD, computed_once, small_config, tokens

from bench.matmul.cut_product import PHASES, CutProduct, Sizes, cases, whole
from bench.matmul.cut_product import connect as connect_cut
from mpipar import ops as ops_module
from mpipar.comm import connect
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.comm.transport import HostTransport
from mpipar.config.memory import MemoryConfig
from mpipar.data.rows import Rows
from mpipar.train.verify import SPREAD, differences, full_tensors
from mpipar.train.worker import Worker

HERE = LAYOUTS[WORLD.size]
CALLS = ("all_reduce", "iall_reduce", "all_gather", "iall_gather", "reduce_scatter",
         "ireduce_scatter", "isend", "irecv", "send", "recv", "broadcast", "reduce")


@pytest.fixture(params=["yes", "no"], ids=["cuda-aware", "staged"])
def cuda_aware(request, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    monkeypatch.setattr(connect, "cuda_aware", lambda: request.param)
    for name in CALLS:
        plain = getattr(HostTransport, name)

        def checked(self, x, *arguments, plain=plain):
            if isinstance(x, fake_cupy.DeviceArray):
                assert not fake_cupy.stream.busy, "MPI gets an array that is still being computed"
            return plain(self, x, *arguments)

        monkeypatch.setattr(HostTransport, name, checked)
    return request.param


@pytest.mark.parametrize("layout", HERE, ids=str)
def test_device_path_equals_one_rank(cuda_aware, layout):
    check_step(cuda_aware, small_config(layout, 5))


@pytest.mark.parametrize("tp_matmul", ["plain", "ring"])
@pytest.mark.parametrize("layout", [layout for layout in HERE if layout[2] > 1], ids=str)
@pytest.mark.ranks(2, 3, 4, 8)
def test_device_path_with_cut_tokens_equals_one_rank(cuda_aware, layout, tp_matmul):
    model = replace(MODEL, sequence_parallel=True, tp_matmul=tp_matmul)
    check_step(cuda_aware, small_config(layout, 2, model=model))


@pytest.mark.parametrize("memory", [MemoryConfig(zero=1), MemoryConfig(zero=3)], ids=["1", "3"])
@pytest.mark.ranks(2)
def test_device_path_that_shares_out_equals_one_rank(cuda_aware, memory):
    check_step(cuda_aware, replace(small_config((2, 1, 1), 2), memory=memory))


def check_step(cuda_aware, config):
    """Assert that a step on the device equals one on the host by one rank. Comm: a step's."""
    ops = ops_module.make("cuda", "float64")
    worker = Worker(config, Grid.of(config.grid, WORLD.rank), ops, Recorder(), WORLD)
    kind = connect.DeviceTransport if cuda_aware == "yes" else connect.StagedTransport
    if WORLD.size > 1:
        assert type(worker.comms.world.wire) is kind
    worker.initialize(SPREAD)
    rows = Rows(ops, tokens(), config, worker.grid)
    loss, norm, _ = worker.gradients(1, lambda mb: rows.train(1, mb))
    gradients = full_tensors(worker, "grad")
    worker.close()
    bad = np.zeros(1, np.int64)
    if WORLD.rank == 0:
        expected = computed_once(config, tokens())
        assert loss == pytest.approx(expected[0], rel=1e-12)
        assert norm == pytest.approx(expected[1], rel=1e-12)
        bad[0] = sum(not d.ok for d in differences("gradient", gradients, expected[2]))
    WORLD.Bcast(bad)
    assert bad[0] == 0


@pytest.mark.parametrize("case", cases(WORLD.size), ids=str)
def test_every_cut_on_the_device(cuda_aware, case):
    ops, recorder, sizes = ops_module.make("cuda", "float64"), Recorder(), Sizes(2, 5, 7, 9)
    comms, comm = connect_cut(*case, WORLD.rank, ops, recorder, mpi_world=WORLD)
    product, full = CutProduct(ops, recorder, case[0], comm, sizes), whole(sizes, "float64")
    product.take(full)
    for phase in PHASES:
        product.run(phase)
    comms.close()
    assert all(error <= 1e-12 for error in product.errors(full).values())


@pytest.mark.ranks(2)
def test_forgotten_synchronize_is_caught(cuda_aware, monkeypatch):
    if cuda_aware == "no":
        return  # staging copies, and the copy waits
    ops = ops_module.make("cuda", "float64")
    monkeypatch.setattr(type(ops), "synchronize", lambda self: None)
    config = small_config((1, 1, 2))
    worker = Worker(config, Grid.of(config.grid, WORLD.rank), ops, Recorder(), WORLD)
    worker.initialize()
    rows = Rows(ops, tokens(), config, worker.grid)
    with pytest.raises(AssertionError, match="still being computed"):
        worker.gradients(1, lambda mb: rows.train(1, mb))
