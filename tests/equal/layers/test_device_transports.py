"""The GPU path without a GPU: real CupyOps and device transports over a stand-in for CuPy.

A step equals one rank, host and device memory never meet, and the stream is drained before every
MPI call on device memory. Copies of the staged transport run as late as they can, see
`fake_streams`.
"""

import fake_cupy
import fake_streams
import numpy as np
import pytest
from fake_cupy import put_in
from small_model import (
    DP,
    LAYOUTS,
    TP,
    WORLD,
    comms_of,
    computed_once,
    small_config,
    tokens,
    worker_and_rows,
)
from test_cuts import connected

from bench.matmul import Sizes, cases, whole
from mpipar import ops as ops_module
from mpipar.comm import groups
from mpipar.comm.collective_check import CollectiveCheck
from mpipar.comm.transport import MpiTransport
from mpipar.ops.cupy_copies import Copies
from mpipar.run.verify import SPREAD, differences, full_tensors

HERE = LAYOUTS[WORLD.size]
BLOCKING = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "barrier",
)
CALLS = (
    *BLOCKING,
    "iall_reduce",
    "iall_gather",
    "ireduce_scatter",
    "isend",
    "irecv",
)


@pytest.fixture(params=["yes", "no"], ids=["cuda-aware", "staged"])
def cuda_aware(request, monkeypatch):
    put_in(monkeypatch)
    monkeypatch.setattr(groups, "cuda_aware", lambda: request.param)
    for name in CALLS:
        plain = getattr(MpiTransport, name)

        def checked(self, *arguments, plain=plain, blocks=name in BLOCKING):
            if arguments and isinstance(arguments[0], fake_cupy.DeviceArray):
                assert not fake_cupy.stream.busy, "MPI gets an array that is still being computed"
            assert not (blocks and self.ops.copies.leaving), "it blocks with an unsent message"
            return plain(self, *arguments)

        monkeypatch.setattr(MpiTransport, name, checked)
    return request.param


@pytest.mark.parametrize("layout", HERE, ids=str)
def test_device_path_equals_one_rank(cuda_aware, layout):
    """Stages of unequal lengths, as few rows and blocks as that takes: kernels are emulated.

    Only a pipeline needs more microbatches than two.
    """
    check_step(
        cuda_aware,
        small_config(layout, 5 if layout[1] > 1 else 2, layers=layout[1] + 1, rows_per_mb=1),
    )


@pytest.mark.parametrize("tp_matmul", ["plain", "ring"])
@pytest.mark.parametrize("layout", [layout for layout in HERE if layout[2] > 1], ids=str)
@pytest.mark.ranks(2, 3, 4, 8)
def test_device_path_with_cut_tokens_equals_one_rank(cuda_aware, layout, tp_matmul):
    check_step(
        cuda_aware,
        small_config(
            layout, layers=layout[1] + 1, sequence_parallel=True, tp_matmul=tp_matmul, rows_per_mb=1
        ),
    )


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.ranks(2)
def test_device_path_that_shares_out_equals_one_rank(cuda_aware, zero):
    check_step(cuda_aware, small_config(DP, zero=zero))


@pytest.mark.ranks(4)
def test_device_path_with_checked_calls_equals_one_rank(cuda_aware, monkeypatch):
    """--check-comm blocks in MPI too, before each collective."""
    plain, unsent = CollectiveCheck.__call__, []
    monkeypatch.setattr(
        CollectiveCheck,
        "__call__",
        lambda self, record: (
            unsent.append(any(copy.leaves for copy in fake_streams.Stream.queued)),
            plain(self, record),
        )[1],
    )
    check_step(cuda_aware, small_config((2, 2, 1), check_comm=True))
    assert unsent
    assert not any(unsent)


def exchanged(poll=False):
    """Two ranks post a sum and a message, and compute.

    Return sum and message that this rank has then, and how many calls of MPI waited for a copy.
    poll: test until all is done, before waiting.
    """
    ops, here = ops_module.make("cuda", "float64"), WORLD.rank
    comms = comms_of(ops)
    x, sent, got = (ops.asarray(np.full(5, value)) for value in (here + 1.0, here + 10.0, 0.0))
    comm = comms.world
    pending = [
        comm.iall_reduce(x, "sum"),
        comm.isend(sent, 1 - here, 7, "message"),
        comm.irecv(got, 1 - here, 7, "message"),
    ]
    ops.matmul(ops.zeros((3, 3)), ops.zeros((3, 3)))
    waiting = len(ops.copies.leaving)
    while poll and not all(one.test() for one in pending):
        pass
    for one in reversed(pending):
        one.wait()
    ops.scale(x, 1.0)
    comms.close()
    return ops.to_host(x), ops.to_host(got), waiting


@pytest.mark.parametrize("poll", [False, True])
@pytest.mark.ranks(2)
def test_what_is_posted_arrives(cuda_aware, poll):
    total, message, waiting = exchanged(poll)
    np.testing.assert_array_equal(total, np.full(5, 3.0))
    np.testing.assert_array_equal(message, np.full(5, 11.0 - WORLD.rank))
    assert waiting == (2 if cuda_aware == "no" else 0), "products go on while copies are under way"


@pytest.mark.ranks(2, 4)
def test_only_the_own_piece_of_a_gather_leaves_the_device(cuda_aware, monkeypatch):
    """And all pieces come back: 3 numbers of each rank."""
    left = []
    monkeypatch.setattr(
        Copies, "out", lambda self, x, *more: (left.append(x.nbytes), COPY_OUT(self, x, *more))[1]
    )
    ops, here = ops_module.make("cuda", "float64"), WORLD.rank
    comms = comms_of(ops)
    pieces = np.full((WORLD.size, 3), np.nan)
    pieces[here] = here
    x = ops.asarray(pieces)
    comms.world.iall_gather(x, "pieces").wait()
    ops.scale(x, 1.0)  # reads what came
    comms.close()
    assert ops.to_host(x).tolist() == [[rank] * 3 for rank in range(WORLD.size)]
    assert sum(left) == (3 * 8 if cuda_aware == "no" else 0)


def sent_at_once(self, x, then, host=None):
    """MPI gets host memory before the event of its copy."""
    host = COPY_OUT(self, x, then, host)
    self.leaving.pop()[1]()
    return host


def forgotten(self, host, x):
    """Host memory is given back before the event of the copy that reads it."""
    x.set(host, stream=self._in)
    return self._in.record()


COPY_OUT = Copies.out
TWINS = {
    "out": sent_at_once,
    "into": forgotten,
    "use_after": lambda self, event: None,
}  # products do not wait for the copy of their input


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.ranks(2)
def test_a_forgotten_event_is_caught(cuda_aware, monkeypatch, name):
    if cuda_aware == "yes":
        return  # nothing is copied
    monkeypatch.setattr(Copies, name, TWINS[name])
    with pytest.raises(AssertionError, match="page-locked" if name == "into" else "not equal"):
        test_what_is_posted_arrives(cuda_aware, False)


@pytest.mark.ranks(2)
def test_a_message_left_behind_is_caught(cuda_aware, monkeypatch):
    """A rank that blocks in MPI with a message that has not been sent may wait for ever."""
    if cuda_aware == "yes":
        return
    ops = ops_module.make("cuda", "float64")
    comms = comms_of(ops)
    monkeypatch.setattr(Copies, "hand_over", lambda self, wait=False: None)
    comms.world.isend(ops.zeros(5), 1 - WORLD.rank, 7, "message")
    with pytest.raises(AssertionError, match="unsent message"):
        comms.world.all_reduce(ops.zeros(5), "sum")
    comms.close()


def check_step(cuda_aware, config):
    """Assert that a step on the device equals one on the host by one rank. Comm: a step's.

    Checked calls hand over every message at once, so they are an exception.
    """
    worker, rows = worker_and_rows(config, spread=SPREAD, ops=ops_module.make("cuda", "float64"))
    kind = groups.DeviceTransport if cuda_aware == "yes" else groups.StagedTransport
    if WORLD.size > 1:
        assert type(worker.comms.world.transport) is kind
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
    sizes = Sizes(2, 5, 7, 9)
    with connected(case, sizes, ops_module.make("cuda", "float64")) as product:
        assert all(error <= 1e-12 for error in product.errors(whole(sizes, "float64")).values())


@pytest.mark.ranks(2)
def test_forgotten_synchronize_is_caught(cuda_aware, monkeypatch):
    if cuda_aware == "no":
        return  # staging copies, and the copy waits
    ops = ops_module.make("cuda", "float64")
    monkeypatch.setattr(type(ops), "synchronize", lambda self: None)
    worker, rows = worker_and_rows(small_config(TP), ops=ops)
    with pytest.raises(AssertionError, match="still being computed"):
        worker.gradients(1, lambda mb: rows.train(1, mb))
