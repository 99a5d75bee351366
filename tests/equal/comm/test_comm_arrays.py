"""What a Comm refuses before anything is sent, and the self-test of the MPI library."""

import inspect
import os

import numpy as np
import pytest
from fake_cupy import put_in, put_in_nccl
from small_model import (
    WORLD,
    comms_of,
    on_all_ranks,
    raised_everywhere,
    small_config,
    worker_and_step,
)

from mpipar import ops as ops_module
from mpipar.comm import groups
from mpipar.comm.device import DeviceTransport, StagedTransport
from mpipar.comm.grid import Grid
from mpipar.comm.group import Comm
from mpipar.comm.groups import Comms
from mpipar.comm.nccl import NcclTransport
from mpipar.comm.record import STATE_CHANGES
from mpipar.comm.recorder import Recorder
from mpipar.errors import EnvironmentProblem
from mpipar.run.process import self_test
from mpipar.run.process.environment import chosen_by_user
from mpipar.run.process.mpi import check_same
from mpipar.run.replicas import Replicas

pytestmark = pytest.mark.ranks(2)
HERE, OTHER = WORLD.rank, 1 - WORLD.rank
CALLS = {
    "all_reduce": lambda comm, x: comm.all_reduce(x, "t"),
    "iall_reduce": lambda comm, x: comm.iall_reduce(x, "t"),
    "all_gather": lambda comm, x: comm.all_gather(x, "t"),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x, "t"),
    "ireduce_scatter": lambda comm, x: comm.ireduce_scatter(x, "t"),
    "iall_gather": lambda comm, x: comm.iall_gather(x, "t"),
    "all_to_all": lambda comm, x: comm.all_to_all(x, "t"),
    "all_to_allv": lambda comm, x: comm.all_to_allv(x, [1, 1], "t"),
    "broadcast": lambda comm, x: comm.broadcast(x, 0, "t"),
    "reduce": lambda comm, x: comm.reduce(x, 0, "t"),
    "isend": lambda comm, x: comm.isend(x, OTHER, 0, "t"),
    "irecv": lambda comm, x: comm.irecv(x, OTHER, 0, "t"),
    "send": lambda comm, x: comm.send(x, OTHER, 0, "t"),
    "recv": lambda comm, x: comm.recv(x, OTHER, 0, "t"),
}
OF_OTHER_ORDER = {
    "Fortran": np.asfortranarray,
    "with gaps": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "backwards": lambda x: x[..., ::-1],
}


def test_every_call_with_an_array_is_in_the_table():
    with_array = {
        name
        for name, one in inspect.getmembers(Comm, inspect.isfunction)
        if not name.startswith("_") and "x" in inspect.signature(one).parameters
    }
    assert with_array == CALLS.keys()


def assert_refused(comm, arrays):
    for words, call in CALLS.items():
        for x in arrays:
            with pytest.raises(ValueError, match=f"{words.lstrip('i')} t: .* is not C-contiguous"):
                call(comm, x)
    assert not comm.recorder.records


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_what_is_not_contiguous_is_refused_before_it_is_sent(dtype):
    comms = comms_of(ops_module.make("cpu", dtype))
    x = np.zeros((2, 3, 4), comms.ops.dtype)
    assert_refused(comms.world, [order(x) for order in OF_OTHER_ORDER.values()])
    WORLD.Barrier()
    assert not getattr(comms.world.transport, "transport", comms.world.transport).mpi.Iprobe()
    comms.close()


@pytest.mark.parametrize(
    ("kind", "aware"), [(StagedTransport, "no"), (DeviceTransport, "yes"), (NcclTransport, "no")]
)
def test_every_transport_of_a_device_refuses_it(kind, aware, monkeypatch):
    (put_in_nccl if kind is NcclTransport else put_in)(monkeypatch)
    monkeypatch.setattr(groups, "cuda_aware", lambda: aware)
    comms = comms_of(ops_module.make("cuda", "float64"))
    assert type(comms.world.transport) is kind
    assert_refused(comms.world, [comms.ops.zeros((3, 2), label="buffers").T])
    comms.close()


def test_the_step_on_shapes_refuses_it():
    comms = Comms(Grid(0, {"tp": 2}), ops := ops_module.make("shapes", "float32"), Recorder())
    assert_refused(comms.world, [ops.zeros((2, 4, 3), label="buffers").transpose(0, 2, 1)])


@pytest.mark.parametrize("size", [10, 20_000, 20_001])  # whole arrays; chunks; padded chunks
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_sum_in_sixteen_bits_is_rounded_once(dtype, size, rng):
    comms = comms_of(ops_module.make("cpu", dtype))
    parts = rng.standard_normal((WORLD.size, size)).astype(comms.ops.dtype)
    found = comms.world.all_reduce(parts[HERE].copy(), "t")
    expected = sum(parts.astype(np.float32)).astype(comms.ops.dtype)
    assert np.array_equal(found.view("uint16"), expected.view("uint16"))
    comms.close()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_a_maximum_of_unsigned_numbers_is_refused(dtype):
    comms = comms_of(ops_module.make("cpu", "float32"))
    with pytest.raises(ValueError, match=f"the largest of {dtype} numbers is wrong"):
        comms.world.all_reduce(np.ones(3, dtype), "t", "max")
    comms.close()


# --- the self-test of the library


class Wrong:
    """A communicator with one wrong reduction: it changes the last number that arrives."""

    def __init__(self, method, dtype):
        self.method, self.dtype = method, dtype

    def __getattr__(self, name):
        plain = getattr(WORLD, name)
        if name != self.method:
            return plain

        def call(x, *more):
            request = plain(x, *more)
            if request is not None:
                request.Wait()
            arrays = [one for one in (x, *more) if getattr(one, "typecode", "") == self.dtype]
            for y in arrays[-1:]:  # where the result lies
                y[min(6, len(y) - 1)] += 1
            return request

        return call


@pytest.fixture
def cores(monkeypatch, request):
    """Let each rank see so many cores; with one, no reduction blocks."""
    seen = range(getattr(request, "param", 99))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: seen)


@pytest.mark.parametrize("cores", [1, 99], indirect=True)
def test_this_library_is_right(cores):
    assert self_test.wrong_reductions(WORLD) == []
    self_test.check_reductions(WORLD, "this library")


@pytest.mark.parametrize(("method", "dtype", "words"), [
    ("Allreduce", "f", "MPI_SUM of float32, MPI_MAX of float32, MPI_MIN of float32"),
    ("Allreduce", "d", "MPI_SUM of float64, MPI_MAX of float64, MPI_MIN of float64"),
    ("Allreduce", "l", "MPI_SUM of int64, MPI_MAX of int64, MPI_MIN of int64"),
    ("Reduce_scatter_block", "d", "MPI_Reduce_scatter_block of float64"),
    ("Ireduce_scatter_block", "d", "MPI_Ireduce_scatter_block of float64"),
    ("Iallreduce", "f", "MPI_Iallreduce of float32"),
])  # fmt: skip
def test_a_wrong_reduction_is_named_with_its_library(method, dtype, words, cores):
    text = raised_everywhere(
        EnvironmentProblem,
        lambda: self_test.check_reductions(Wrong(method, dtype), "Some MPI 1.2"),
    )
    assert text.startswith(f"the MPI library (Some MPI 1.2) computes wrong results: {words}; use")


@pytest.mark.skipif(WORLD.size == 1, reason="one rank shares no core")
@pytest.mark.parametrize("cores", [1], indirect=True)
def test_ranks_that_share_cores_do_not_block(cores):
    assert "MPI_SUM of float64" in self_test.wrong_reductions(Wrong("Iallreduce", "d"))
    assert not self_test.wrong_reductions(Wrong("Allreduce", "d"))


def test_without_memory_a_long_message_is_not_tried():
    free = self_test.ENOUGH - (WORLD.rank == 1)
    words = "it needs 6 GiB of free memory on a host" if WORLD.size > 1 else "it needs two ranks"
    assert words in self_test.long_message(WORLD, free)


def test_a_report_of_drift_notices_that_no_two_ranks_differ(monkeypatch):
    """The maximum of a library that takes the larger half of the numbers for the smaller one."""
    worker, step = worker_and_step(small_config((2, 1, 1), dtype="float32"))
    step(1)
    plain = Comm.all_reduce

    def all_reduce(self, x, name, op="sum"):
        plain(self, x, name, op)
        if name == "check.replicas":
            x[0] += 1
        return x

    monkeypatch.setattr(Comm, "all_reduce", all_reduce)
    text = raised_everywhere(EnvironmentProblem, lambda: Replicas(worker).check(1))
    worker.close()
    assert "compared one by one they are all equal: its MPI_MAX is wrong" in text


@pytest.mark.parametrize(
    "name",
    ["MPIR_CVAR_ANY_ALGORITHM", "OMPI_MCA_coll", "OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE"],
)
@pytest.mark.parametrize("other", [{}, {"of another value": 1}])
def test_ranks_whose_environment_differs_are_told_which_variable(name, other):
    environ = {name: "1"} if HERE == 0 else {name: "2"} if other else {}
    facts = chosen_by_user(environ, ())
    if HERE == 0:
        with pytest.raises(EnvironmentProblem, match=f"{name} +0 +1\n{name} +1 +(2|nothing)"):
            check_same(WORLD, facts)
    else:
        check_same(WORLD, facts)
    on_all_ranks("")


# --- what a barrier makes of an array


Q = WORLD.size
COLLECTIVES = {  # the collective of a Comm, as a function of a rank's array (Q, Q)
    "all_reduce": lambda comm, x: comm.all_reduce(x, "sum"),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x, "scatter")[None],
    "reduce": lambda comm, x: comm.reduce(x, 0, "reduce"),
    "all_gather": lambda comm, x: comm.all_gather(x, "gather").reshape(-1, Q),
    "all_to_all": lambda comm, x: comm.all_to_all(x.reshape(Q, Q, 1), "exchange").reshape(Q, Q),
    "broadcast": lambda comm, x: comm.broadcast(x, 0, "copy"),
}


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def value(state, x, axis=0):
    """The array that ranks hold together, of what each of them has."""
    parts = WORLD.allgather(x)
    if state == "partial":
        return sum(parts)
    if state == "one":
        return parts[0]
    if state == "whole":
        assert all(np.array_equal(part, x) for part in parts)
        return x
    return np.concatenate(parts, axis)


def before(operation):
    """This rank's array before a collective."""
    rows = 1 if operation == "all_gather" else Q
    own = 0 if STATE_CHANGES[operation][0] == "whole" else WORLD.rank
    return numbers(rows, Q, seed=own)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("operation", COLLECTIVES)
def test_a_collective_changes_the_state_and_not_the_array(operation):
    """The words of STATE_CHANGES, compared with numbers on real ranks."""
    comms = comms_of(axes={"tp": Q})
    tp = comms["tp"]
    start, end = STATE_CHANGES[operation]
    x = before(operation)
    expected = value(start, x)
    y = COLLECTIVES[operation](tp, x.copy())
    if operation == "all_to_all":  # cut along rows, then along columns
        expected = np.concatenate(
            [part.reshape(Q, Q, 1) for part in WORLD.allgather(x)], 2
        ).transpose(2, 0, 1)
        actual = np.stack([part.reshape(Q, Q) for part in WORLD.allgather(y)], 1)
    else:
        actual = value(end, y if y is not None else x)
    np.testing.assert_allclose(actual, expected, rtol=1e-14)
    comms.close()
