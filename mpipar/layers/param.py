"""Parameters: global name, logical shape, cut axis, and the same initial values on any layout."""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np

from mpipar.errors import UsageError


class Views:
    """Has data, grad and master: views into the flat buffers of a stage, set by `FlatParams`."""

    def __getattr__(self, kind):
        """Called for what has not been set."""
        if kind not in ("data", "grad", "master"):
            raise AttributeError(f"{type(self).__name__} has no attribute {kind!r}")
        raise UsageError(f"{self.name}: has no {kind} yet; before a layer computes, call"
                         " mpipar.FlatParams(ops, layer.params).initialize(seed)")


class Param(Views):
    """One tensor of the model, or this rank's shard of it.

    name: global name, the same on every layout. shape: logical N-d shape of the whole tensor.
    cut_axis: the axis that is cut over tp. With None every rank of tp holds a replica.
    pieces: into how many pieces at most, by default one for each rank of tp. With fewer, neighbours
    hold replicas of a piece, each makes a part of its gradient, and the group "kv" has their sum.
    std: standard deviation of the initial normal values. fill: a constant to start from instead.
    decay: whether weight decay applies: to matrices and embeddings, not to biases and norms.
    partial_groups: groups whose ranks each make a part of the gradient. copies: see `Copies`; by
    default the stage's.

    grad_groups: names of all groups over which the gradient is still partial after the step's last
    backward. The last one is the data group, whose ranks read different data. copy_groups: those of
    ranks beside it that hold copies. owner: false for replicas and tied copies, which norms and
    files must not count again. unit: the unit of the stage that it belongs to, counted from the
    first; the stage sets it. Layers read data; the optimizer and files use master. A kind that
    ranks share out is None. leads: the `Joined` that begins with it, or None.
    """

    def __init__(self, context, name, shape, *, cut_axis=None, pieces=None, std=0.0, fill=None,
                 decay=True, partial_groups=(), copies=None):
        comm, copies = context.tp, copies or context.copies
        self.name = name
        self.shape = tuple(shape)
        self.cut_axis = cut_axis
        self.pieces = 1 if cut_axis is None else pieces
        self.cut_count = self.cut_over(comm.size)
        replicas = comm.size // self.cut_count
        self.cut_index = comm.index // replicas
        self.std = std
        self.fill = fill
        self.decay = decay
        shared = ("kv",) if cut_axis is not None and replicas > 1 else ()
        self.grad_groups: tuple[str, ...] = (
            *partial_groups, *shared, *copies.groups, context.data.axis)
        self.copy_groups = (*copies.groups, *(("tp",) if cut_axis is None else shared))
        self.owner = copies.owner and comm.index % replicas == 0
        self.unit = 0
        self.leads = None

    def cut_over(self, ranks: int) -> int:
        """Into how many pieces this many ranks of tp cut it; each is held by equally many."""
        return ranks if self.pieces is None else min(ranks, self.pieces)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard; the cut axis is padded up so that all shards are equal."""
        if self.cut_axis is None:
            return self.shape
        shape = list(self.shape)
        shape[self.cut_axis] = -(-shape[self.cut_axis] // self.cut_count)
        return tuple(shape)

    @property
    def size(self) -> int:
        return math.prod(self.local_shape)

    def bounds(self) -> tuple[int, int]:
        """[start, stop) of this shard on the cut axis, without padding."""
        if self.cut_axis is None:
            return 0, self.shape[0]
        width = self.local_shape[self.cut_axis]
        start = min(self.cut_index * width, self.shape[self.cut_axis])
        return start, min(start + width, self.shape[self.cut_axis])

    def initial_run(self, seed: int, spread: float, first: int, count: int, dtype):
        """`count` initial values, flat, from place `first` of the shard; padding is zero."""
        width = math.prod(self.local_shape[1:])
        rows = slice(first // width, -(-(first + count) // width))
        values = np.zeros((rows.stop - rows.start, *self.local_shape[1:]), dtype)
        for row, one in self.initial_rows(seed, spread, rows):
            values[(row - rows.start, *(slice(n) for n in one.shape))] = one
        return values.reshape(-1)[first - rows.start * width:][:count]

    def initial_rows(self, seed: int, spread: float = 0.0, rows=slice(None)):
        """Yield (local row, values) for first-axis rows of this shard, without padding.

        rows: slice of the rows to make; all by default.

        The values are normal with deviation `std`. Those of biases and norms have deviation
        `spread` around their constant.

        Row i of the whole tensor is a pure function of (seed, name, i). Philox is keyed by a hash
        of seed and name, and its counter is set to i << 64. So any layout starts from the same
        model, and no rank ever makes more than one row of a tensor it does not own.
        """
        key = int.from_bytes(hashlib.sha256(f"{seed}:{self.name}".encode()).digest()[:16], "little")
        start, stop = self.bounds()
        cut_rows = self.cut_axis in (None, 0)
        first, last = (start, stop) if cut_rows else (0, self.shape[0])
        bits = np.random.Philox(key=key)
        generator, state = np.random.Generator(bits), bits.state
        for row in range(first, last)[rows]:
            state["state"]["counter"][1] = row  # the counter is row << 64: rows cannot meet
            bits.state = state
            values = np.asarray(generator.standard_normal(self.shape[1:]))
            values = values * self.std if self.fill is None else values * spread + self.fill
            if not cut_rows and (start, stop) != (0, self.shape[self.cut_axis]):
                values = np.moveaxis(values, self.cut_axis - 1, 0)[start:stop]
                values = np.moveaxis(values, 0, self.cut_axis - 1)
            yield row - first, values


class Joined(Views):
    """Parameters that lie side by side in the flat buffers, seen as one; its views are flat."""

    def __init__(self, params):
        self.params = params
        self.size = sum(param.size for param in params)
        self.name = params[0].name
        params[0].leads = self


def joined(params) -> list:
    """The parameters of a layer, in their order: those that lie side by side as a Joined.

    Where some have gradients that are partial over other groups, they lie apart.
    """
    runs = [list(run) for _, run in itertools.groupby(params, lambda param: param.grad_groups)]
    return [run[0] if len(run) == 1 else Joined(run) for run in runs]
