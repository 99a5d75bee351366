"""Every cut of a product equals the whole one: results and both gradients.

Bytes equal the formulas, and planted bugs are caught.
"""

import runpy
from contextlib import contextmanager

import numpy as np
import pytest
from helpers import REPOSITORY
from small_model import WORLD, comms_of, cpu

from bench.matmul import PHASES, CutProduct, Sizes, cases, connect, whole
from docs.build.commands import FILE
from mpipar.comm.grid import chunk_size, chunk_slice
from mpipar.comm.group import Comm
from mpipar.comm.groups import Comms, Options
from mpipar.comm.record import Sums
from mpipar.comm.recorder import Recorder
from mpipar.layers.context import Context
from mpipar.layers.flat import FlatParams
from mpipar.layers.linears import LINEARS, make_linear
from mpipar.layers.parallel import chunks, ring, sequence
from mpipar.layers.stash import Stash

pytestmark = pytest.mark.usefixtures("poisoned_memory")
TOLERANCE = 1e-12
HERE = cases(WORLD.size)
# No size divides by 2 or 3; less than one token and channel for each rank; all sizes divide.
SIZES = [Sizes(3, 5, 7, 11), Sizes(1, 1, 2, 1), Sizes(2, 24, 48, 72)]


@contextmanager
def connected(case, sizes, ops=None, **options):
    """The product of a cut, whose three functions have run. Comm: the cut's."""
    ops, recorder = ops or cpu(), Recorder()
    comms, mesh = connect(
        *case, WORLD.rank, ops, recorder, mpi_world=WORLD, options=Options(**options)
    )
    product = CutProduct(ops, recorder, case[0], comms, mesh, sizes)
    product.take(whole(sizes, "float64"))
    for phase in PHASES:
        product.run(phase)
    yield product
    comms.close()


def run(case, sizes, sync_sends=False):
    """All three functions of a cut; returns the product and the recorder. Comm: the cut's."""
    with connected(case, sizes, sync_sends=sync_sends, check=True) as product:
        return product, product.recorder


def bad_tensors(case, sizes, sync_sends=False) -> int:
    """Number of results on all ranks that differ from the whole product. Comm: one all-reduce."""
    product, _ = run(case, sizes, sync_sends)
    errors = product.errors(whole(sizes, "float64"))
    count = np.array([sum(not error <= TOLERANCE for error in errors.values())])
    return int(WORLD.allreduce(count[0]))


@pytest.mark.parametrize("sync_sends", [False, True], ids=["", "sync"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("case", HERE, ids=str)
def test_cut_equals_the_whole_product(case, sizes, sync_sends):
    assert bad_tensors(case, sizes, sync_sends) == 0


# Every function of Comm that a cut uses is broken: its sums, or data from others, are dropped.
def _own_part(self, x, name):
    return x[self.group_rank].copy()


def _own_repeated(self, x, name):
    return np.stack([x] * self.size)


def _long_last_piece(ops, x, axis, comm):
    """A variant without padding: the last pieces begin earlier and overlap."""
    width = chunk_size(x.shape[-1], comm.size)
    start = min(comm.group_rank * width, x.shape[-1] - width)
    return x[..., start : start + width]


BROKEN = {
    "all_reduce": (
        Comm,
        lambda self, x, name, op="sum": x,
        {"column", "row", "gather", "reduce", "2.5d"},
    ),
    "all_gather": (Comm, _own_repeated, {"gather", "reduce", "column_sp", "row_sp"}),
    "local_chunk": (chunks, _long_last_piece, {"gather", "reduce"}),
    "reduce_scatter": (Comm, _own_part, {"column_sp", "row_sp"}),
    "broadcast": (Comm, lambda self, x, root, name: x, {"2d", "2.5d"}),
    "reduce": (
        Comm,
        lambda self, x, root, name: x if self.group_rank == root else None,
        {"2d", "2.5d"},
    ),
    "pieces": (
        ring,
        lambda ops, x, comm, name: ((i, x) for i in range(comm.size)),
        {"column_ring", "row_ring"},
    ),
    "total": (
        ring,
        lambda ops, part, comm, name: part(comm.group_rank),
        {"column_ring", "row_ring"},
    ),
}


def test_each_cut_is_broken():
    assert LINEARS.keys() <= set().union(*(cuts for _, _, cuts in BROKEN.values()))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("function", BROKEN)
def test_dropped_barrier_is_caught(function, monkeypatch):
    where, broken, cuts = BROKEN[function]
    monkeypatch.setattr(where, function, broken)
    caught = {case[0] for case in HERE if bad_tensors(case, SIZES[0])}
    here = {case[0] for case in HERE}
    # A grid of 1 x 1 x d has nothing to broadcast or to reduce in its only row and column.
    sides = {cut for cut, q, _ in HERE if q > 1 or function == "all_reduce"}
    assert caught == cuts & here & sides


SWAPPED = [
    (sequence, {"column_sp", "row_sp"}),
    (chunks, {"gather", "reduce", "column_sp", "row_sp"}),
]


@pytest.mark.parametrize(("where", "cuts"), SWAPPED, ids=["sequence", "chunks"])
def test_pieces_swapped_are_caught(where, cuts, monkeypatch):
    """The typical bug of a cut puts a token or channel in the wrong place."""
    monkeypatch.setattr(
        where,
        "chunk_slice",
        lambda length, parts, index: chunk_slice(length, parts, parts - 1 - index),
    )
    caught = {case[0] for case in HERE if bad_tensors(case, SIZES[2])}
    assert caught == (cuts if WORLD.size > 1 else set())


def local_sizes(product):
    """Bytes of this rank's blocks of x, w and y."""
    return product.x.nbytes, product.w.nbytes, product.dy.nbytes


def piece_sizes(product):
    """Bytes of x and y with as many channels as this rank's w: pieces of whole arrays."""
    rows = product.sizes.batch * product.sizes.tokens
    return tuple(8 * rows * width for width in product.w.shape)


def sent_bytes(case, product):
    """Bytes that one rank sends, by phase: the formulas. Sources: ring algorithms; SUMMA."""
    cut, q, d = case
    x, w, y = local_sizes(product)
    side = q - 1
    x_piece, y_piece = piece_sizes(product)
    return {
        "column": (0, 2 * side * x // q, 0),
        "row": (2 * side * y // q, 0, 0),
        "gather": (side * y_piece, 2 * side * x // q, 0),
        "reduce": (2 * side * y // q, side * x_piece, 0),
        # one share of the tokens to each of the others
        "column_sp": (side * x, side * x, side * x),
        "row_sp": (side * y, side * y, 0),
        # (q-1)/q^2 of both whole matrices = (q-1) of a rank's blocks
        "2d": (side * (x + w),) * 3,
        "2.5d": (side * (x + w), side * (x + w), side * (x + w) + 2 * (d - 1) * w // d),
    }[cut.replace("_ring", "_sp")]


@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[2]], ids=str)
@pytest.mark.parametrize("case", HERE, ids=str)
def test_bytes_on_the_wire_follow_the_formula(case, sizes):
    product, recorder = run(case, sizes)
    totals = recorder.totals("phase")
    sent = tuple(totals.get((phase,), Sums()).wire_bytes for phase in PHASES)
    assert sent == sent_bytes(case, product)
    _, q, d = case
    barriers = {
        "column": (0, 1, 0),
        "row": (1, 0, 0),
        "gather": (1, 1, 0),
        "reduce": (1, 1, 0),
        "column_sp": (1, 1, 1),
        "row_sp": (1, 1, 0),
        "column_ring": (2 * (q - 1),) * 3,
        "row_ring": (2 * (q - 1), 2 * (q - 1), 0),
        "2d": (2 * q,) * 3,
        "2.5d": (2 * q * (q > 1), 2 * q * (q > 1), 2 * q * (q > 1) + (d > 1)),
    }[case[0]]
    calls = tuple(totals.get((phase,), Sums()).calls for phase in PHASES)
    assert calls == (barriers if WORLD.size > 1 else (0, 0, 0))


def pair_of_layers(comms, cuts):
    """(y, dx, {name: (the Param, its gradient)}) of two layers with these cuts. Comm: theirs."""
    ops, widths = cpu(), ((6,), (23,), (5,))
    first, second = (
        make_linear(
            Context(ops, comms), f"{number}", *widths[number : number + 2], cut=cut, std=0.3
        )
        for number, cut in enumerate(cuts)
    )
    params = [*first.params, *second.params]
    FlatParams(ops, params).initialize(seed=1, spread=0.1)
    rng, stash = np.random.default_rng(0), Stash()
    y = second.forward(first.forward(rng.standard_normal((4, 3, 6)), stash), stash)
    dx = first.backward_input(second.backward_input(rng.standard_normal(y.shape), stash), stash)
    for one in (second, first):
        one.backward_weight(stash)
    return y, dx, {param.name: (param, param.grad) for param in params}


def wrong_results(cuts) -> set[str]:
    """The results of a pair of layers on all ranks that differ from those of one rank."""
    ops = cpu()
    comms = comms_of(ops, axes={"tp": WORLD.size})
    y, dx, grads = pair_of_layers(comms, cuts)
    comms.close()
    whole_y, whole_dx, whole_grads = pair_of_layers(Comms.solo(ops), cuts)
    found = {"y": (y, whole_y), "dx": (dx, whole_dx)}
    for name, (param, grad) in grads.items():
        held = tuple(slice(stop - start) for start, stop in param.box)
        there = tuple(slice(start, stop) for start, stop in param.box)
        found[name] = (grad[held], whole_grads[name][1][there])
    return {
        name
        for name, (have, want) in found.items()
        if not np.allclose(have, want, rtol=0, atol=1e-10)
    }


@pytest.fixture
def add_here(monkeypatch, tmp_path):
    """The cut of docs/how-to/add-a-layer.md, in the table."""
    page = (REPOSITORY / "docs" / "how-to" / "add-a-layer.md").read_text(encoding="utf-8")
    (tmp_path / "add_here.py").write_text(dict(FILE.findall(page))["add_here.py"])
    cut = runpy.run_path(str(tmp_path / "add_here.py"))["AddHereLinear"]
    monkeypatch.setitem(LINEARS, "add_here", cut)
    return cut


@pytest.mark.parametrize(
    "cuts",
    [("column", "row"), ("gather", "gather"), ("reduce", "reduce"), ("column", "add_here")],
    ids=str,
)
def test_a_cut_goes_with_a_layer(cuts, add_here):
    assert wrong_results(cuts) == set()


@pytest.mark.ranks(2, 4)
def test_a_cut_of_the_how_to_that_adds_nothing_is_caught(add_here, monkeypatch):
    def not_added(self, x, stash):
        stash[self.name, "x"] = x
        return self.ops.matmul_bias(x, self.w, self.b)

    monkeypatch.setattr(add_here, "forward", not_added)
    assert "y" in wrong_results(("column", "add_here"))
