"""Parameters: global name, logical shape, cut axis, and the same initial values on any layout."""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np


class Param:
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
    first; the stage sets it. data, grad, master: views into the flat buffers of the stage, set by
    `FlatParams`. Layers read data; the optimizer and files use master. leads: the `Joined` that
    begins with it, or None.
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
        self.data = self.grad = self.master = self.leads = None

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

    def initial_rows(self, seed: int, spread: float = 0.0):
        """Yield (local row, values) for each first-axis row of this shard, without padding.

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
        for row in range(first, last):
            state["state"]["counter"][1] = row  # the counter is row << 64: rows cannot meet
            bits.state = state
            values = np.asarray(generator.standard_normal(self.shape[1:]))
            values = values * self.std if self.fill is None else values * spread + self.fill
            if not cut_rows:
                values = np.moveaxis(values, self.cut_axis - 1, 0)[start:stop]
                values = np.moveaxis(values, 0, self.cut_axis - 1)
            yield row - first, values


class Joined:
    """Parameters that lie side by side in the flat buffers, seen as one.

    data, grad: flat views over all of them, set by `FlatParams`.
    """

    def __init__(self, params):
        self.params = params
        self.size = sum(param.size for param in params)
        self.data = self.grad = self.master = None
        params[0].leads = self


def joined(params) -> list:
    """The parameters of a layer, in their order: those that lie side by side as a Joined.

    Where some have gradients that are partial over other groups, they lie apart.
    """
    runs = [list(run) for _, run in itertools.groupby(params, lambda param: param.grad_groups)]
    return [run[0] if len(run) == 1 else Joined(run) for run in runs]


class FlatParams:
    """Data, gradients and master weights of a list of parameters, each kind in one flat buffer.

    Every Param is a view into all three buffers.

    With 16-bit data, gradients and master weights are float32: an update is often too small to
    change a 16-bit number. Otherwise the master weights are the data.

    Parameters whose gradient needs only the data group come first, then the others by their groups.
    Inside each, units go from the last to the first, as their gradients are completed. Inside each
    unit, parameters with decay come first. So an optimizer update is two long runs for each unit,
    and a bucket of gradients or a group's sum is a slice. Zeros fill the end up to a multiple of
    `pieces`.

    pieces: number of ranks of the data group, each of which can own an equal share of the buffers.
    size: elements of all parameters, without those zeros. by_groups: (grad_groups, slice) of each
    run of parameters. by_decay: (decay, slice) of each run. owned: slices of the parameters that
    this rank owns; copies: those of all others. units: {unit: {grad_groups: slice}}, in the
    order of the buffers.
    """

    def __init__(self, ops, params, pieces=1):
        self.ops = ops
        self.params = sorted(params, key=lambda p: (
            len(p.grad_groups), p.grad_groups, -p.unit, not p.decay))
        largest = max(self.params, key=lambda p: p.size).name if params else "none"
        # for the error that reports a lack of memory
        self.name = f"{largest} and {len(self.params) - 1} smaller tensors"
        self.size = sum(p.size for p in self.params)
        total = -(-self.size // pieces) * pieces
        self.data = self.master = ops.zeros((total,), label="weights")
        self.grad = ops.zeros((total,), ops.statistics, label="gradients")
        if ops.dtype != ops.statistics:
            self.master = ops.zeros((total,), ops.statistics, label="optimizer")
        for kind in ("data", "grad", "master"):
            self.place(kind, getattr(self, kind))
        self.by_groups = self._runs(lambda param: param.grad_groups)
        self.by_decay = self._runs(lambda param: param.decay)
        self.owned, self.copies = (
            [run for owner, run in self._runs(lambda param: param.owner) if owner == wanted]
            for wanted in (True, False))
        self.units: dict[int, dict[tuple[str, ...], slice]] = {}
        for (groups, unit), run in self._runs(lambda param: (param.grad_groups, param.unit)):
            self.units.setdefault(unit, {})[groups] = run

    def place(self, kind, buffer):
        """Make `kind` of every Param and Joined its view of a flat buffer with this order."""
        start = 0
        for place, param in enumerate(self.params):
            setattr(param, kind, buffer[start:start + param.size].reshape(param.local_shape))
            if param.leads:
                assert self.params[place:place + len(param.leads.params)] == param.leads.params
                setattr(param.leads, kind, buffer[start:start + param.leads.size])
            start += param.size

    def views(self, buffer):
        """Yield (Param, its view of its local shape) of a flat buffer with this order."""
        start = 0
        for param in self.params:
            yield param, buffer[start:start + param.size].reshape(param.local_shape)
            start += param.size

    def _runs(self, key):
        """Contiguous runs of parameters with equal key(param): (key value, slice) of each."""
        found, start = [], 0
        for value, params in itertools.groupby(self.params, key):
            stop = start + sum(param.size for param in params)
            found.append((value, slice(start, stop)))
            start = stop
        return found

    def initialize(self, seed: int, spread: float = 0.0) -> None:
        """Set every parameter to its initial values; padding stays zero.

        spread: standard deviation around the constant of biases and norms. Training starts them at
        0 and 1. A comparison needs a spread: a zero bias that is counted twice is still zero.
        """
        for param in self.params:
            if param.fill is not None and not spread:
                self.ops.fill(param.master, param.fill)
                continue
            host = np.zeros(param.local_shape, self.ops.statistics)
            for row, values in param.initial_rows(seed, spread):
                host[(row, *(slice(n) for n in values.shape))] = values
            self.ops.copy(param.master, self.ops.asarray(host))
        self.publish()

    def publish(self) -> None:
        """Round the changed master weights to the data that the layers read."""
        if self.master is not self.data:
            self.ops.copy(self.data, self.master)
