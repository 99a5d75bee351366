"""Parameters: global name, logical shape, the one axis that is cut, and the same start on any
layout.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np


class Param:
    """One tensor of the model, or this rank's shard of it.

    name: global name, the same on every layout. shape: logical N-d shape of the whole tensor.
    cut_axis: the axis that is cut over `comm` (None: every rank of comm holds a replica).
    std: standard deviation of the initial normal values; `fill` instead sets a constant.
    decay: whether weight decay applies (matrices and embeddings yes, biases and norms no).
    grad_groups: names of the groups over which the gradient is still partial when the last backward
    of the step is done, besides dp. owner: false for replicas and tied copies, which norms and
    files must not count again. data, grad, master: views into the flat buffers of the stage, set by
    `FlatParams`; layers read data, the optimizer and files have to do with master.
    """

    def __init__(self, name, shape, comm, cut_axis=None, std=0.0, fill=None, decay=True):
        self.name = name
        self.shape = tuple(shape)
        self.cut_axis = cut_axis
        self.cut_index = comm.index if cut_axis is not None else 0
        self.cut_count = comm.size if cut_axis is not None else 1
        self.std = std
        self.fill = fill
        self.decay = decay
        self.grad_groups: tuple[str, ...] = ()
        self.owner = cut_axis is not None or comm.index == 0
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

    Order: parameters whose gradient needs only dp first, then by further groups; inside each, those
    with decay first. So an optimizer update is a handful of long runs, and a bucket of gradients or
    a group's sum is a slice.
    """

    def __init__(self, ops, params):
        self.ops = ops
        self.params = sorted(params, key=lambda p: (p.grad_groups, not p.decay))
        largest = max(self.params, key=lambda p: p.size).name if params else "none"
        # for whoever reports that there is no room
        self.name = f"{largest} and {len(self.params) - 1} smaller tensors"
        total = sum(p.size for p in self.params)
        self.data = self.master = ops.zeros((total,), label="weights")
        self.grad = ops.zeros((total,), ops.statistics, label="gradients")
        if ops.dtype != ops.statistics:
            self.master = ops.zeros((total,), ops.statistics, label="optimizer")
        self.slices = {}
        start = 0
        for param in self.params:
            piece = slice(start, start + param.size)
            self.slices[param.name] = piece
            param.data = self.data[piece].reshape(param.local_shape)
            param.grad = self.grad[piece].reshape(param.local_shape)
            param.master = self.master[piece].reshape(param.local_shape)
            start += param.size

    def runs(self, key):
        """Contiguous runs of parameters with equal key(param): yields (key value, slice)."""
        start = stop = 0
        value = None
        for param in self.params:
            if start < stop and key(param) != value:
                yield value, slice(start, stop)
                start = stop
            value = key(param)
            stop += param.size
        if start < stop:
            yield value, slice(start, stop)

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
