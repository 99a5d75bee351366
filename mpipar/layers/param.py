"""Parameters: global name, logical shape, the one axis that is cut, and the same start on any
layout.
"""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np


class Param:
    """One tensor of the model, or this rank's shard of it.

    name: global name, the same on every layout. shape: logical N-d shape of the whole tensor.
    cut_axis: the axis that is cut over tp (None: every rank of tp holds a replica).
    std: standard deviation of the initial normal values; `fill` instead sets a constant.
    decay: whether weight decay applies (matrices and embeddings yes, biases and norms no).
    partial_groups: groups whose ranks each make a part of the gradient. copies: see `Copies`; the
    stage's by default.

    grad_groups: names of all groups over which the gradient is still partial when the last backward
    of the step is done, besides dp. owner: false for replicas and tied copies, which norms and
    files must not count again. unit: which layer of the stage it belongs to, counted from the
    first; the stage sets it. data, grad, master: views into the flat buffers of the stage, set by
    `FlatParams`; layers read data, the optimizer and files have to do with master.
    """

    def __init__(self, context, name, shape, *, cut_axis=None, std=0.0, fill=None, decay=True,
                 partial_groups=(), copies=None):
        comm, copies = context.tp, copies or context.copies
        self.name = name
        self.shape = tuple(shape)
        self.cut_axis = cut_axis
        self.cut_index = comm.index if cut_axis is not None else 0
        self.cut_count = comm.size if cut_axis is not None else 1
        self.std = std
        self.fill = fill
        self.decay = decay
        self.grad_groups: tuple[str, ...] = (*partial_groups, *copies.groups)
        self.owner = copies.owner and (cut_axis is not None or comm.index == 0)
        self.unit = 0
        self.data = self.grad = self.master = None

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

        Normal values of deviation `std`; for biases and norms `spread`, around their constant.

        Row i of the whole tensor is a pure function of (seed, name, i): Philox keyed by a hash of
        seed and name, its counter set to i << 64. So any layout starts from the same model, and no
        rank ever makes more than one row of a tensor it does not own.
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


class FlatParams:
    """Data, gradients and master weights of a list of parameters, each in one flat buffer, every
    Param a view into all three.

    With 16-bit data, gradients and master weights are float32: an update is often too small to
    change a 16-bit number. Otherwise the master weights are the data.

    Order: parameters whose gradient needs only dp first, then by further groups; inside each, the
    units from the last to the first, as their gradients are completed; inside each unit, those with
    decay first. So an optimizer update is two long runs for each unit, and a bucket of gradients or
    a group's sum is a slice. At the end are zeros, up to a multiple of `pieces`.

    pieces: ranks of the data group, each of which can own an equal share of the buffers. size: of
    all parameters, without those zeros. by_groups: (grad_groups, slice) of each run of parameters;
    by_decay: (decay, slice); owned: slices. units: {unit: its slices}, one for each grad_groups.
    """

    def __init__(self, ops, params, pieces=1):
        self.ops = ops
        self.params = sorted(params, key=lambda p: (p.grad_groups, -p.unit, not p.decay))
        largest = max(self.params, key=lambda p: p.size).name if params else "none"
        # for whoever reports that there is no room
        self.name = f"{largest} and {len(self.params) - 1} smaller tensors"
        self.size = sum(p.size for p in self.params)
        total = -(-self.size // pieces) * pieces
        self.data = self.master = ops.zeros((total,), label="weights")
        self.grad = ops.zeros((total,), ops.statistics, label="gradients")
        if ops.dtype != ops.statistics:
            self.master = ops.zeros((total,), ops.statistics, label="optimizer")
        start = 0
        for param in self.params:
            piece = slice(start, start + param.size)
            param.data = self.data[piece].reshape(param.local_shape)
            param.grad = self.grad[piece].reshape(param.local_shape)
            param.master = self.master[piece].reshape(param.local_shape)
            start += param.size
        self.by_groups = self._runs(lambda param: param.grad_groups)
        self.by_decay = self._runs(lambda param: param.decay)
        self.owned = [run for owner, run in self._runs(lambda param: param.owner) if owner]
        self.units: dict[int, list[slice]] = {}
        for (_, unit), run in self._runs(lambda param: (param.grad_groups, param.unit)):
            self.units.setdefault(unit, []).append(run)

    def _runs(self, key):
        """Contiguous runs of parameters with equal key(param): (key value, slice) of each."""
        found, start = [], 0
        for value, params in itertools.groupby(self.params, key):
            stop = start + sum(param.size for param in params)
            found.append((value, slice(start, stop)))
            start = stop
        return found

    def initialize(self, seed: int, spread: float = 0.0) -> None:
        """Set every parameter to its initial values (padding stays zero). Comm: none.

        spread: standard deviation around the constant of biases and norms. Training starts them at
        0 and 1; a comparison that is to see a bias counted twice must not.
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
        """Round the master weights, which have changed, to what the layers read. Comm: none."""
        if self.master is not self.data:
            self.ops.copy(self.data, self.master)
