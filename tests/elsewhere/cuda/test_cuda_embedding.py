"""The embedding kernels: against the plain functions, the same bits each time, broken twins."""

from types import SimpleNamespace

import numpy as np
import pytest
from cuda_fused import BOUNDS, DTYPES, HostLoader, Poisoned, hosts, place, relative
from ops_cases import plain

from mpipar.ops.cuda.embedding import MERGE, SORT, SORT_THREADS, Embedding

EVERY = DTYPES | {"float64": np.float64}
TOL = BOUNDS | {"float64": 1e-15}


class Case:
    """The kernels on a device, and what one shard of a table is asked."""

    def __init__(self, where, dtype, rng, loader=None):
        xp, own, self.to_device, self.to_host = place(where)
        self.kernels = Embedding(xp, loader or own)
        self.dtype, self.sums = EVERY[dtype], np.float64 if dtype == "float64" else np.float32
        self.rng, self.ops = rng, plain("float64")
        self.sums_tol = 1e-15 if dtype == "float64" else 1e-6

    def array(self, *shape, dtype=None):
        host = self.rng.standard_normal(shape).astype(dtype or self.dtype)
        return self.to_device(host), host.astype(np.float64)


@pytest.fixture(params=hosts())
def where(request):
    return request.param


# On the CPU one order of threads for each type: a test below compares the bits of both.
@pytest.fixture(
    params=[
        *(
            pytest.param((order, dtype), marks=pytest.mark.shim)
            for order, dtype in zip(2 * ["forwards", "backwards"], EVERY, strict=True)
        ),
        *(pytest.param(("gpu", dtype), marks=pytest.mark.gpu) for dtype in EVERY),
    ],
    ids=str,
)
def case(request, rng):
    return Case(*request.param, rng)


def test_a_shard_of_a_table(case):
    """Ids of other shards lie on both sides, and most ids occur several times."""
    for shape, width in (((1, 1), 1), ((2, 37), 33), ((3, 300), 5)):
        start, rows = 7, 11
        ids = case.rng.integers(0, 30, shape)
        table, table64 = case.array(rows, width)
        got = case.kernels.forward(case.to_device(ids), table, start)
        expected = case.ops.embedding_forward(ids, table64, start)
        assert np.array_equal(case.to_host(got).astype(np.float64), expected)
        (dy, dy64), (dtable, dtable64) = (
            case.array(*shape, width),
            case.array(rows, width, dtype=case.sums),
        )
        case.kernels.backward_weight(case.to_device(ids), dy, dtable, start)
        case.ops.embedding_backward_weight(ids, dy64, dtable64, start)
        assert relative(case.to_host(dtable), dtable64) <= case.sums_tol


def test_positions(case):
    for by_row in (False, True):
        batch, tokens, width = 3, 20, 40
        places = case.rng.integers(0, 9, (batch, tokens) if by_row else tokens)
        (x, x64), (table, table64) = case.array(batch, tokens, width), case.array(9, width)
        got = case.kernels.position_forward(x, case.to_device(places), table)
        assert got.dtype == case.dtype
        assert relative(case.to_host(got), x64 + table64[places]) <= TOL[np.dtype(case.dtype).name]
        if not by_row:
            dtable, dtable64 = case.array(9, width, dtype=case.sums)
            case.kernels.backward_weight(case.to_device(places), x, dtable, 0)
            case.ops.position_backward_weight(places, x64, dtable64)
            assert relative(case.to_host(dtable), dtable64) <= case.sums_tol


def test_nothing_is_read_where_there_is_nothing(where, rng):
    case = Case(where, "float32", rng)
    ids = case.to_device(np.zeros((0, 4), np.int64))
    table, table64 = case.array(3, 5)
    assert case.kernels.forward(ids, table, 0).shape == (0, 4, 5)
    case.kernels.backward_weight(ids, case.array(0, 4, 5)[0], table, 0)
    assert np.array_equal(case.to_host(table), table64)


@pytest.mark.shim
def test_the_order_of_threads_changes_no_bit(rng):
    """Atomics would add up in the order of threads."""
    ids, dy = rng.integers(0, 5, 400), rng.standard_normal((400, 33)).astype(np.float32)
    found = []
    for order in (1, -1):
        dtable = np.zeros((5, 33), np.float32)
        Embedding(Poisoned, HostLoader(order)).backward_weight(ids, dy, dtable, 0)
        found.append(dtable)
    assert np.array_equal(*found)


@pytest.mark.shim
@pytest.mark.parametrize(
    ("tiles", "edit"),
    [
        (5, None),
        (0, ("|| (tile[i] == id && i < int(threadIdx.x))", "")),
        (0, ("__syncthreads();  // all ids have been read", "")),
        (1, ("(second && there == id)", "there == id")),
        (1, ("high = min(other + length, n)", "high = min(other + length, n - 1)")),
    ],
)
def test_ids_are_sorted_and_equal_ones_stay_in_order(rng, tiles, edit):
    """Six tiles: whole and half pairs of runs, and a last run that is short.

    What a broken kernel makes is no index, so none is read in a twin.
    """
    right = []
    for order in (1, -1):
        ids = rng.integers(-3, 9, tiles * SORT_THREADS + 5)
        loader = HostLoader(order, edited="embedding.cu", edit=edit)
        found = Embedding(Poisoned, loader)._order(ids)
        right.append(np.array_equal(found, np.argsort(ids, kind="stable")))
    assert all(right) == (edit is None)


def test_the_steps_of_a_sort():
    """One for each doubling of a run, in which an id is compared with a few: n^2 would be more."""
    started = []
    loader = SimpleNamespace(launch=lambda file, name, *rest: started.append(name))
    Embedding(Poisoned, loader)._order(np.zeros(64 * SORT_THREADS, np.int64))
    assert started == [SORT, *6 * [MERGE]]


TWINS = [
    ("if (inside)", "if (true)"),
    ("blockIdx.x % n", "blockIdx.x % 2 % n"),
    ("(first > 0 && ids[order[first - 1]] == id)", "false"),
    ("i < n && ids[order[i]] == id", "i < n"),
    ("b < batch", "b < batch - 1"),
    ("for (int i = 1; i < SUM_HEIGHT; ++i) sum", "for (int i = 1; i < 2; ++i) sum"),
    ("__syncthreads();  // the sums of all threads have been written", ""),
]


@pytest.mark.shim
@pytest.mark.parametrize(
    "edit", [TWINS[0], *(pytest.param(twin, marks=pytest.mark.slow) for twin in TWINS[1:])]
)
def test_a_broken_kernel_is_seen(rng, edit):
    """In one of the two orders of threads."""
    failures = 0
    for order in (1, -1):
        case = Case("forwards", "float32", rng, HostLoader(order, edited="embedding.cu", edit=edit))
        for test in (test_a_shard_of_a_table, test_positions):
            try:
                test(case)
            except AssertionError:
                failures += 1
    assert failures
