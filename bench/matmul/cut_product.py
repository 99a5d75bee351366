"""One product y = x w and its two gradients in any cut: a rank's blocks, and errors of results.

Used by bench.matmul and by the tests. Letters: B batch, T tokens, K inner and N outer width.
"""

from __future__ import annotations

import math
from time import perf_counter_ns
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from bench.matmul.mesh import MESH_CUTS, Mesh
from mpipar.comm.grid import Grid, chunk_size, chunk_slice
from mpipar.comm.groups import Comms
from mpipar.layers.context import Context
from mpipar.layers.flat import FlatParams
from mpipar.layers.linears import LINEARS
from mpipar.layers.stash import Stash

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
            rows = (depth.size * column.size, depth.index * column.size + column.index)
            columns = (mesh.row.size, mesh.row.index)
            self.x_places = self.y_places = (whole_, rows, columns)
            self.w_places = ((column.size, column.index), columns)
            blocks = [chunk_size(sizes.inner, column.size), chunk_size(sizes.outer, mesh.row.size)]
            w, dw = (ops.zeros(tuple(blocks), label="weights") for _ in range(2))
            self.layer = MESH_CUTS[cut](ops, mesh, NAME, w, dw)
        else:
            own = (self.comm.size, self.comm.index)
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
