"""An exchange of unequal pieces against a plain reference, on every transport that has one."""

import re

import numpy as np
import pytest
from fake_cupy import put_in, put_in_nccl
from small_model import WORLD, comms_of, cpu, plant, raised_everywhere

from mpipar import ops as ops_module
from mpipar.comm import groups
from mpipar.comm.grid import Grid, consecutive_slices
from mpipar.comm.groups import Comms
from mpipar.comm.mpi import MpiTransport
from mpipar.comm.nccl import NcclTransport
from mpipar.errors import HangError

pytestmark = pytest.mark.ranks(2, 3, 4)
HERE, RANKS = WORLD.rank, WORLD.size


def group(ops, check=False):
    """The group of all ranks, with the groups that must be closed."""
    comms = comms_of(ops, check=check)
    return comms.world, comms


def piece(counts, source, target, width):
    """What a rank sends to another: every row tells sender, receiver and its place."""
    rows = 16 * source + 4 * target + np.arange(counts[source, target]) % 4
    return np.repeat(rows[:, None], width, axis=1)


def exchange(comm, counts, width, known=False):
    """This rank's (rows, split) of an exchange by counts[from, to]."""
    x = np.concatenate([piece(counts, HERE, target, width) for target in range(RANKS)])
    x = x.astype(comm.transport.ops.dtype)
    received = counts[:, HERE].tolist() if known else None
    y, split = comm.all_to_allv(
        comm.transport.ops.asarray(x), counts[HERE].tolist(), "tokens", received
    )
    return comm.transport.ops.to_host(y), split


def assert_exchanged(comm, counts, width=3, known=False):
    """The reference: from each rank in turn the piece for this one."""
    y, split = exchange(comm, counts, width, known)
    expected = [piece(counts, source, HERE, width) for source in range(RANKS)]
    assert [int(count) for count in split] == [len(rows) for rows in expected]
    assert y.shape == (sum(split), width)
    for run, rows in zip(consecutive_slices(split), expected, strict=True):
        np.testing.assert_array_equal(y[run].astype(np.int64), rows)


EYE = np.eye(RANKS, dtype=np.int64)
COUNTS = {  # [from, to], the same on every rank
    "nothing": 0 * EYE,
    "to one rank": np.outer(4 + np.arange(RANKS), EYE[-1]),
    "from one rank": np.outer(EYE[0], 1 + np.arange(RANKS)),
    "to itself": 5 * EYE,
    "any": np.random.default_rng(2).integers(0, 6, (RANKS, RANKS)),
}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("kind", COUNTS)
def test_every_piece_arrives_in_its_place(kind, dtype, known):
    comm, comms = group(ops_module.make("cpu", dtype), check=True)
    for width in (1, 3):
        assert_exchanged(comm, COUNTS[kind], width, known)
    comms.close()


@pytest.mark.parametrize("transport", ["yes", "no", "nccl"], ids=["cuda-aware", "staged", "nccl"])
def test_from_device_memory(transport, monkeypatch):
    (put_in_nccl if transport == "nccl" else put_in)(monkeypatch)
    monkeypatch.setattr(groups, "cuda_aware", lambda: transport)
    comm, comms = group(ops_module.make("cuda", "float64"))
    assert isinstance(comm.transport, NcclTransport) == (transport == "nccl")
    for counts in COUNTS.values():
        for known in (False, True):
            assert_exchanged(comm, counts, 3, known)
    comms.close()


def test_a_thousand_sizes_are_one_line():
    comm, comms = group(cpu())
    random, sent = np.random.default_rng(0), []
    for number in range(1000):
        counts = random.integers(0, 8, (RANKS, RANKS))
        counts[:, 0] += number
        assert_exchanged(comm, counts, 1)
        sent.append(8 * int(counts[HERE].sum() - counts[HERE, HERE]))
    (tally,) = comm.recorder.tallies.values()
    assert tally.sums()[:3] == (1000, sum(sent), sum(sent))
    records = comm.recorder.records
    assert [record.payload_bytes for record in records] == sent
    assert [record.seq for record in records] == list(range(1, 1001))
    comms.close()


def test_a_group_of_one_keeps_its_rows_and_records_nothing():
    comm = Comms.solo(cpu()).world
    x = np.ones((4, 2))
    y, split = comm.all_to_allv(x, [4], "tokens")
    assert y is x
    assert list(split) == [4]
    assert comm.recorder.records == []


def test_shapes_only_is_balanced():
    ops = ops_module.make("shapes", "float64")
    comm = Comms.solo(ops, Grid(HERE, {"dp": RANKS}))["dp"]
    x = ops.empty((10, 3))
    y, split = comm.all_to_allv(x, [10] + [0] * (RANKS - 1), "tokens")
    assert y.shape == (10, 3)
    assert sum(split) == 10
    assert max(split) - min(split) <= 1
    y, split = comm.all_to_allv(x, [10] + [0] * (RANKS - 1), "tokens", [1] * RANKS)
    assert (y.shape, list(split)) == ((RANKS, 3), [1] * RANKS)


def other_order(plain, self, x, counts, received):
    """The broken twin: the pieces come from the last rank first."""
    y, received = plain(self, x, counts, received)
    parts = [y[run] for run in consecutive_slices(received)]
    return np.concatenate(parts[::-1]), received


def test_another_order_is_found(monkeypatch):
    plant(monkeypatch, MpiTransport, "all_to_allv", other_order)
    comm, comms = group(cpu())
    with pytest.raises(AssertionError):
        assert_exchanged(comm, COUNTS["any"] + 1)
    comms.close()


# --- --check-comm


def disagreement(call, collectives=0):
    """The text of the error that every rank raises in `call(comm)`; equal calls come before."""
    comm, comms = group(cpu(), check=True)
    try:
        assert_exchanged(comm, COUNTS["any"], known=True)
        comm.collectives += collectives
        return raised_everywhere(HangError, lambda: call(comm))
    finally:
        comms.close()


LAST = RANKS - 1
OTHER = HERE == LAST  # this rank calls what the others do not
CALLS = {  # what one rank does: (the call, a line of the error)
    "name": (
        lambda comm: comm.all_reduce(np.ones(3), "b" if OTHER else "a"),
        rf"rank {LAST} calls all_reduce b float64 24 bytes at .*test_uneven_exchange.py:\d+",
    ),
    "operation": (
        lambda comm: comm.barrier("a") if OTHER else comm.all_reduce(np.ones(3), "a"),
        rf"rank {LAST} calls barrier a .* 0 bytes at",
    ),
    "dtype": (
        lambda comm: comm.all_reduce(np.ones(3 + 3 * OTHER, "f4" if OTHER else "f8"), "a"),
        rf"rank {LAST} calls all_reduce a float32 24 bytes at",
    ),
    "size": (
        lambda comm: comm.all_reduce(np.ones(3 + OTHER), "a"),
        rf"rank {LAST} calls all_reduce a float64 32 bytes at",
    ),
    "root": (
        lambda comm: comm.broadcast(np.ones(3), LAST if OTHER else 0, "a"),
        rf"rank {LAST} calls broadcast a float64 24 bytes root {LAST} at",
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_calls_that_differ_are_named_with_rank_and_line(what):
    call, line = CALLS[what]
    text = disagreement(call)
    assert text.startswith(f"ranks disagree at collective 2 of the group {list(range(RANKS))}")
    assert re.search(line, text), text


def test_a_collective_that_one_rank_left_out_is_found():
    text = disagreement(lambda comm: comm.barrier("a"), collectives=OTHER)
    for rank in range(RANKS):
        assert re.search(rf"rank {rank} calls barrier a .*, collective {2 + (rank == LAST)}", text)
