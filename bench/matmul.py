"""Times one product and its two gradients, cut over ranks in every way; bytes and memory too.

    mpiexec -n 4 python -m bench.matmul [--tokens 1024 --inner 1024 --outer 1024] [--json FILE]

A row is one cut of y (T, N) = x (T, K) w (K, N). It times forward, input gradient and weight
gradient: the median over the repetitions of the slowest rank. Before anything is timed, the results
are compared with the product of one rank.

Columns: sent_MiB: bytes that one rank sends by the stated algorithms. blocks_MiB: its blocks of x,
w, y and their gradients. beside_MiB: the most that the cut needs in addition to the blocks.
in_communication: share of the time inside barriers or waiting for messages. hidden: share of the
time from posting a message to its arrival in which the rank computed instead of waiting.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from time import perf_counter_ns
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from bench.program import Outcome, Program
from mpipar import ops as ops_module
from mpipar.comm.grid import Grid, chunk_size, chunk_slice
from mpipar.comm.group import Comm
from mpipar.comm.groups import Comms
from mpipar.comm.objects import all_gather_objects, gather_objects
from mpipar.comm.record import COMPUTE, POINT_TO_POINT, Sums
from mpipar.comm.recorder import Recorder
from mpipar.errors import EXIT_CHECK_FAILED
from mpipar.layers.context import Context
from mpipar.layers.flat import FlatParams
from mpipar.layers.linears import LINEARS
from mpipar.layers.stash import Stash
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array


class Mesh(NamedTuple):
    """A rank's groups: its row and column of the q x q grid, and its counterparts in other grids.

    row.group_rank counts along N (and K of x), column.group_rank along the rows of x (and K of w).
    depth: the ranks at the same place of each grid, for the 2.5d cut.
    """

    row: Comm
    column: Comm
    depth: Comm


class Summa:
    """y = x w over one grid of q x q ranks, with the three functions of a layer.

    Rank (i, j) holds x[i, j] (rows and K), w[i, j] (K and N) and y[i, j] (rows and N); w, dw: its
    blocks. Every product is a sum of q products of blocks. One rank of each row or column of the
    grid after another broadcasts its block, or collects the sum of all ranks' blocks:

    forward          x along the rows,  w along the columns   y[i, j] = sum_l x[i, l] w[l, j]
    backward_input   w along the columns, dx in the rows      dx[i, l] = sum_j dy[i, j] w[l, j]^T
    backward_weight  x along the rows,  dw in the columns     dw[l, j] = sum_i x[i, l]^T dy[i, j]

    Two matrices travel in each function, and a rank holds its own block of each plus at most one
    more. Per rank, every function sends (q-1)/q^2 of these two whole matrices. Source: van de Geijn
    and Watts, SUMMA, 1997.
    """

    def __init__(self, ops: Ops, mesh: Mesh, name: str, w: Array, dw: Array) -> None:
        self.ops, self.mesh, self.name, self.w, self.dw = ops, mesh, name, w, dw

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (.., N/q) of x (.., K/q).

        Comm: q broadcasts of x over row, q of w over column.
        """
        stash[self.name, "x"] = x
        rows = x.reshape(-1, x.shape[-1])
        y = self.ops.zeros((rows.shape[0], self.w.shape[1]))
        x_blocks = self._blocks(rows, self.mesh.row)
        w_blocks = self._blocks(self.w, self.mesh.column)
        for x_block, w_block in zip(x_blocks, w_blocks, strict=True):
            # y += x w, where x is the transpose of x^T.
            self.ops.matmul_tn_add(x_block.T, w_block, y)
        return y.reshape(*x.shape[:-1], self.w.shape[1])

    def backward_input(self, dy: Array, stash: Stash) -> Array | None:
        """Return dx (.., K/q) of dy (.., N/q).

        Comm: q broadcasts of w over column, q reduces of dx over row.
        """
        stash[self.name, "dy"] = dy
        dx, row = None, self.mesh.row
        for root, w_block in enumerate(self._blocks(self.w, self.mesh.column)):
            part = row.reduce(self.ops.matmul_nt(dy, w_block), root, self.name)
            dx = part if row.group_rank == root else dx
        return dx

    def backward_weight(self, stash: Stash) -> None:
        """Add x^T dy to dw (K/q, N/q).

        Comm: q broadcasts of x over row, q reduces of dw over column.
        """
        self.add(stash, self.dw)

    def add(self, stash: Stash, dw: Array) -> None:
        """Add x^T dy over the rows of this grid to dw. Comm: that of `backward_weight`."""
        x, dy = stash.pop((self.name, "x")), stash.pop((self.name, "dy"))
        rows, column = x.reshape(-1, x.shape[-1]), self.mesh.column
        for root, x_block in enumerate(self._blocks(rows, self.mesh.row)):
            part = self.ops.zeros(dw.shape)
            self.ops.matmul_tn_add(x_block, dy.reshape(-1, dy.shape[-1]), part)
            part = column.reduce(part, root, self.name)
            if column.group_rank == root:
                self.ops.accumulate(dw, part)

    def _blocks(self, own: Array, comm: Comm) -> Iterator[Array]:
        """Yield all ranks' blocks in group order, in one buffer: use each before the next.

        Comm: one broadcast of each block.
        """
        other = own if comm.size == 1 else self.ops.empty(own.shape, label="buffers")
        for root in range(comm.size):
            yield comm.broadcast(own if root == comm.group_rank else other, root, self.name)


class Depth(Summa):
    """2.5d: y = x w over d grids, each of which runs SUMMA on its 1/d of the rows of x and y.

    Each has its own copy of w's blocks. A rank thus sends 1/d as much of x, and as much of w as in
    a single grid. Sources: Solomonik and Demmel, 2011; Tesseract, arXiv 2105.14500.
    """

    def backward_weight(self, stash: Stash) -> None:
        """Add x^T dy to dw (K/q, N/q).

        Comm: that of SUMMA, and one all_reduce of dw over depth.
        """
        part = self.ops.zeros(self.dw.shape)
        self.add(stash, part)
        self.ops.accumulate(self.dw, self.mesh.depth.all_reduce(part, self.name))


MESH_CUTS = {"2d": Summa, "2.5d": Depth}


PHASES = ("F", "I", "W")  # forward, input gradient, weight gradient
NAME = "product"  # of the barriers


class Sizes(NamedTuple):
    """The sizes of a product before it is cut: x (batch, tokens, inner), w (inner, outer)."""

    batch: int
    tokens: int
    inner: int
    outer: int


class Whole(NamedTuple):
    """The whole product: x, w, dy, an old dw that the new one is added to, and the results."""

    x: np.ndarray
    w: np.ndarray
    dy: np.ndarray
    old_dw: np.ndarray
    y: np.ndarray
    dx: np.ndarray
    dw: np.ndarray


def whole(sizes: Sizes, dtype: str, seed: int = 5) -> Whole:
    """Return random matrices, the same on every rank, and their product and gradients by NumPy."""
    rng = np.random.default_rng(seed)

    def random(*shape):
        return rng.standard_normal(shape).astype(dtype)

    batch, tokens, inner, outer = sizes
    x, w, dy = random(batch, tokens, inner), random(inner, outer), random(batch, tokens, outer)
    old_dw = random(inner, outer)
    dw = old_dw + x.reshape(-1, inner).T @ dy.reshape(-1, outer)
    return Whole(x, w, dy, old_dw, x @ w, dy @ w.T, dw)


def cases(num_ranks: int) -> list[tuple[str, int, int]]:
    """Return (cut, q, d) of every cut for these ranks; q: the group, or the grid's side."""
    found = [(cut, num_ranks, 1) for cut in LINEARS]
    for q in range(math.isqrt(num_ranks), 0, -1):
        d, rest = divmod(num_ranks, q * q)
        if not rest:
            found.append(("2d" if d == 1 else "2.5d", q, d))
    return found


def shown(cut: str, q: int, d: int) -> str:
    """Return the grid of ranks as text: "2 x 2", "2 x 2 x 2", or the size of the only group."""
    return {"2d": f"{q} x {q}", "2.5d": f"{q} x {q} x {d}"}.get(cut, str(q))


def connect(cut, q, d, world_rank, ops, recorder, *, mpi_world=None, options=None):
    """Return (the groups, of which `tp` cuts a layer, the Mesh of MESH_CUTS or None).

    Comm: that of Comms; all ranks call it.
    """
    if cut not in MESH_CUTS:
        comms = Comms(Grid(world_rank, {"tp": q}), ops, recorder, mpi_world, options)
        return comms, None
    grid = Grid(world_rank, {"tp": q, "cp": q, "dp": d})
    comms = Comms(grid, ops, recorder, mpi_world, options)
    return comms, Mesh(row=comms["tp"], column=comms["cp"], depth=comms["dp"])


def block(array: np.ndarray, places) -> np.ndarray:
    """Return a rank's block of a whole array: for each axis (parts, index), padded with zeros."""
    shape = [
        chunk_size(length, parts) for length, (parts, _) in zip(array.shape, places, strict=True)
    ]
    own = array[
        tuple(
            chunk_slice(length, *place) for length, place in zip(array.shape, places, strict=True)
        )
    ]
    result = np.zeros(shape, array.dtype)
    result[tuple(slice(length) for length in own.shape)] = own
    return result


class CutProduct:
    """This rank's part of a product in a cut; `run` executes one of its three functions.

    comms, mesh: see `connect`; over a mesh all rows of x are in one sequence. layer: has the three
    functions.
    """

    def __init__(self, ops, recorder, cut: str, comms, mesh: Mesh | None, sizes: Sizes):
        self.ops, self.recorder, self.name = ops, recorder, cut
        self.comm, self.mesh = comms["tp"], mesh
        whole_ = (1, 0)
        if mesh is not None:
            sizes = Sizes(1, sizes.batch * sizes.tokens, sizes.inner, sizes.outer)
            depth, column = mesh.depth, mesh.column
            rows = (depth.size * column.size, depth.group_rank * column.size + column.group_rank)
            columns = (mesh.row.size, mesh.row.group_rank)
            self.x_places = self.y_places = (whole_, rows, columns)
            self.w_places = ((column.size, column.group_rank), columns)
            blocks = [chunk_size(sizes.inner, column.size), chunk_size(sizes.outer, mesh.row.size)]
            w, dw = (ops.zeros(tuple(blocks), label="weights") for _ in range(2))
            self.layer = MESH_CUTS[cut](ops, mesh, NAME, w, dw)
        else:
            own = (self.comm.size, self.comm.group_rank)
            tokens = own if cut.endswith(("_sp", "_ring")) else whole_
            channels = whole_ if cut in ("gather", "reduce") else own
            by_output = LINEARS[cut].cuts_outputs
            self.x_places = (whole_, tokens, whole_) if by_output else (whole_, whole_, channels)
            self.y_places = (whole_, whole_, channels) if by_output else (whole_, tokens, whole_)
            self.w_places = (whole_, own) if by_output else (own, whole_)
            self.layer = LINEARS[cut](
                Context(ops, comms), NAME, (sizes.inner,), (sizes.outer,), std=0.0, bias=False
            )
            FlatParams(ops, self.layer.params)
        self.sizes, self.w, self.dw = sizes, self.layer.w, self.layer.dw
        self.stash = Stash(SimpleNamespace(shape=(sizes.batch, sizes.tokens)))

    def take(self, full: Whole) -> None:
        """Cut this rank's blocks out of the whole matrices."""
        sizes, on_device = self.sizes, self.ops.asarray
        three = (sizes.batch, sizes.tokens, -1)
        self.x = on_device(block(full.x.reshape(three), self.x_places))
        self.ops.copy(self.w, on_device(block(full.w, self.w_places)))
        self.dy = on_device(block(full.dy.reshape(three), self.y_places))
        self.ops.copy(self.dw, on_device(block(full.old_dw, self.w_places)))

    def run(self, phase: str):
        """Run forward, input gradient or weight gradient, and keep the result. Comm: the cut's."""
        start = perf_counter_ns()
        with self.recorder.at(phase):
            if phase == "F":
                self.y = self.layer.forward(self.x, self.stash)
            elif phase == "I":
                self.dx = self.layer.backward_input(self.dy, self.stash)
            else:
                self.layer.backward_weight(self.stash)
        self.recorder.span(phase, start)

    def errors(self, full: Whole) -> dict[str, float]:
        """Return each result's largest difference from its block of the whole, over the largest
        entry.
        """
        three = (self.sizes.batch, self.sizes.tokens, -1)
        expected = {
            "y": block(full.y.reshape(three), self.y_places),
            "dx": block(full.dx.reshape(three), self.x_places),
            "dw": block(full.dw, self.w_places),
        }
        largest = {name: np.abs(getattr(full, name)).max() for name in expected}
        found = {}
        for name, want in expected.items():
            have = self.ops.to_host(getattr(self, name))
            assert have.shape == want.shape, (name, have.shape, want.shape)
            found[name] = float(np.abs(have - want).max(initial=0.0) / largest[name])
        return found


TOLERANCE = {"float32": 1e-4, "float64": 1e-12}  # of the largest entry
MIB = 2**20


def memory(case, sizes, dtype, world_rank) -> tuple[int, int]:
    """Return the bytes of the blocks, and the most bytes besides, from the shapes-only run.

    tests/equal/layers/test_cuts.py proves both equal to the measured bytes.
    """
    recorder = Recorder()
    ops = ops_module.make("shapes", dtype, recorder)
    comms, mesh = connect(*case, world_rank, ops, recorder)
    product = CutProduct(ops, recorder, case[0], comms, mesh, sizes)
    product.take(whole(sizes, dtype))
    held, worst = sum(ops.live.values()), 0
    for phase, result in zip(PHASES, ("y", "dx", None), strict=True):
        before = sum(ops.live.values())
        ops.reset_peak()
        product.run(phase)
        own = getattr(product, result).nbytes if result else 0
        worst = max(worst, sum(ops.peak.values()) - before - own)
        held += own
    return held, worst


def measure_product(case, sizes, dtype, repeats, world, full) -> dict:
    """Return this rank's figures of a cut. Comm: the cut's, and a barrier per repetition."""
    ops, recorder = ops_module.make("cpu", dtype), Recorder(1 << 16)
    comms, mesh = connect(*case, world.rank, ops, recorder, mpi_world=world)
    product = CutProduct(ops, recorder, case[0], comms, mesh, sizes)
    product.take(full)
    for phase in PHASES:
        product.run(phase)
    wrong = [
        f"{name} is off by {error:.1e}"
        for name, error in product.errors(full).items()
        if not error <= TOLERANCE[dtype]
    ]
    seconds, inside = [], []
    recorder.clear()
    for _ in range(repeats):
        comms.world.barrier("start")
        before, start = recorder.totals().get((), Sums()), time.perf_counter()
        for phase in PHASES:
            product.run(phase)
        seconds.append(time.perf_counter() - start)
        inside.append((recorder.totals().get((), Sums()).nanoseconds - before.nanoseconds) * 1e-9)
    totals = recorder.totals("phase")
    sent = sum(totals.get((phase,), Sums()).wire_bytes for phase in PHASES) // repeats
    flight, hidden = flight_ns(recorder, "tp", POINT_TO_POINT)
    comms.close()
    held, beside = memory(case, sizes, dtype, world.rank)
    return {
        "wrong": wrong,
        "seconds": seconds,
        "inside": inside,
        "sent": sent,
        "hidden": hidden / flight if flight else None,
        "held": held,
        "beside": beside,
    }


def flight_ns(recorder: Recorder, axis: str, operations: tuple[str, ...]) -> tuple[int, int]:
    """Return (ns in which any of these operations over `axis` is in flight, ns overlapped).

    Flight lasts from posting to the end, and is overlapped where the rank computes and is in no
    other wait, not even inside a pass. Blocking operations are left out, and only what is in the
    rings counts.
    """
    records = [record for record in recorder.records if record.done_ns]
    flights = [
        (record.posted_ns, record.done_ns)
        for record in records
        if record.axis == axis
        and record.operation in operations
        and record.posted_ns < record.waited_ns
    ]
    computing = [(span.start_ns, span.end_ns) for span in recorder.spans if span.kind in COMPUTE]
    blocked = [(record.waited_ns, record.done_ns) for record in records]
    edges = sorted(
        (time, kind, change)
        for kind, intervals in enumerate((flights, computing, blocked))
        for start, end in intervals
        for time, change in ((start, 1), (end, -1))
    )
    inside, last, flight, hidden = [0, 0, 0], 0, 0, 0
    for at, kind, change in edges:
        if inside[0]:
            flight += at - last
            if inside[1] and not inside[2]:
                hidden += at - last
        inside[kind] += change
        last = at
    return flight, hidden


def row(case, num_ranks, facts) -> dict:
    """Return one line of the table, made from all ranks' figures."""
    slowest = [max(times) for times in zip(*(fact["seconds"] for fact in facts), strict=True)]
    shares = [
        inside / seconds
        for fact in facts
        for inside, seconds in zip(fact["inside"], fact["seconds"], strict=True)
    ]
    hidden = [fact["hidden"] for fact in facts if fact["hidden"] is not None]
    return {
        "cut": case[0],
        "ranks": num_ranks,
        "grid": shown(*case),
        "median_ms": statistics.median(slowest) * 1e3,
        "best_ms": min(slowest) * 1e3,
        "sent_MiB": max(fact["sent"] for fact in facts) / MIB,
        "blocks_MiB": max(fact["held"] for fact in facts) / MIB,
        "beside_MiB": max(fact["beside"] for fact in facts) / MIB,
        "in_communication": statistics.mean(shares),
        "hidden": statistics.mean(hidden) if hidden else "-",
    }


def measure(args, session) -> Outcome | int:
    """Measure every cut that these ranks allow; code 1 if one computes something else."""
    world, sizes = session.world, Sizes(1, args.tokens, args.inner, args.outer)
    rows, full = [], whole(sizes, args.dtype)
    for case in cases(world.size):
        fact = measure_product(case, sizes, args.dtype, args.repeats, world, full)
        facts = gather_objects(world, fact)
        if any(all_gather_objects(world, bool(fact["wrong"]))):
            for number, one in enumerate(facts or []):
                for text in one["wrong"]:
                    print(f"{case[0]} on grid {shown(*case)}, rank {number}: {text}")
            return EXIT_CHECK_FAILED
        if facts is not None:
            rows.append(row(case, world.size, facts))
    return 0 if world.rank else Outcome(rows, sizes._asdict() | {"dtype": args.dtype})


main = Program(
    "matmul",
    __doc__,
    measure,
    together=True,
    counts={
        "--tokens": (1024, "rows T of x"),
        "--inner": (1024, "columns K of x"),
        "--outer": (1024, "columns N of w"),
        "--repeats": (7, "repetitions"),
    },
    add=lambda parser: parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32"),
).started(__name__)
