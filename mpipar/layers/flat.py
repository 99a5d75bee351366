"""Flat buffers: all parameters of a stage in one array per kind, whole or sharded by ZeRO.

ZeRO shards what all ranks of the data group would otherwise hold as copies (arXiv 1910.02054):
level 1 shards master weights and moments, level 3 weights and gradients too. `Sharding` says how;
what is sent as a result is in `layers/units.py` and `train/gradsync.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from mpipar.comm.grid import consecutive_slices
from mpipar.comm.group import Comm, Pending
from mpipar.comm.groups import Comms
from mpipar.comm.record import Recorder
from mpipar.layers.param import Param
from mpipar.ops.signature import Array


class Segment(NamedTuple):
    """A run of a flat buffer that is divided into equal pieces. unit: the unit it belongs to."""

    unit: int
    run: slice


class Sharding(NamedTuple):
    """How ranks shard what stages keep.

    A flat buffer is divided into *segments*, and each segment into equal pieces, one for each rank
    of the group. A rank owns its piece of every segment: it updates these numbers, and no other
    rank does.

    level: of ZeRO. comm: the group that shards; with level 0 every rank is alone and keeps all.
    bucket: maximum number of elements of a segment with level 1. whole_grads: whether a rank keeps
    whole gradients during a step. data: the group that sums gradients, or None without a group.
    """

    level: int
    comm: Comm
    bucket: int = 1
    whole_grads: bool = True
    data: Comm | None = None

    def travels(self, kind: str) -> bool:
        """Return whether a buffer is summed or gathered in place."""
        return not self.shares(kind) and (kind == "grad" or (kind == "data" and self.level > 0))

    def shares(self, kind: str) -> bool:
        """Return whether a rank keeps only its own pieces of data, grad, master or a moment."""
        if kind == "grad":
            return not self.whole_grads
        return self.level == 3 if kind == "data" else self.level > 0

    def segments(self, units: dict[int, slice], total: int) -> list[Segment]:
        """Return the segments of a flat buffer of `total` elements, in its order.

        units: the run of each unit in the buffer; their lengths are multiples of the number of
        ranks.
        """
        if self.level == 0:
            return [Segment(-1, slice(0, total))]
        limit = self.bucket if self.level == 1 else total
        size = max(1, limit // self.comm.size) * self.comm.size
        return [
            Segment(unit, slice(first, min(first + size, run.stop)))
            for unit, run in units.items()
            for first in range(run.start, run.stop, size)
        ]

    def own(self, segments: list[Segment]) -> list[slice]:
        """Return this rank's piece of each segment, as slices of the whole buffer."""
        pieces = []
        for _, run in segments:
            length = (run.stop - run.start) // self.comm.size
            first = run.start + self.comm.index * length
            pieces.append(slice(first, first + length))
        return pieces


WHOLE = Sharding(0, Comm("alone", (0,), 0, None, Recorder()))  # one rank: nothing sent or recorded


class FlatParams:
    """Data, gradients and optimizer state of some parameters, each kind in one flat buffer.

    A stage has one FlatParams for each set of groups over which gradients are partial, so that a
    sum over a group is a sum of whole buffers. Each Param is a view into all buffers, except into
    those that are sharded.

    With 16-bit data, gradients and master weights are float32, because an update is often too small
    to change a 16-bit number. Otherwise the master weights are the data.

    Units are stored from the last to the first, in the order in which their gradients are
    completed, and inside each unit parameters with decay come first. An optimizer update thus
    consists of two long runs per unit, and a bucket of gradients is a slice. Each unit's run is
    padded with zeros to a multiple of the number of ranks that shard it. A buffer is either whole,
    in this order, or it holds only the pieces of this rank, one after another.

    groups: names of the groups over which the gradients are summed; the last one is the data group.
    sign_rate: see `Param`. size: elements of all parameters, without padding. total: with padding.
    units: {unit: slice}, in the order of the buffers. segments: the runs that are sharded one by
    one; own: this rank's piece of each. updates: for each segment, (decay, slice of its own piece)
    of each run. counted: (whether this rank counts it in norms, segment, slice of its own piece) of
    each run; those that it does not count are copies. moments: {kind: buffer}, made by the
    optimizer. summed: for each segment, the array that holds this rank's piece of the gradient once
    it is summed over all ranks.
    """

    def __init__(
        self,
        ops: Any,
        params: Iterable[Param],
        sharding: Sharding = WHOLE,
        groups: tuple[str, ...] = (),
        sign_rate: float = 0.0,
    ):
        self.ops, self.sharding, self.groups = ops, sharding, groups
        self.sign_rate = sign_rate
        self.params = sorted(params, key=lambda param: (-param.unit, not param.decay))
        largest = max(self.params, key=lambda p: p.size).name if self.params else "none"
        # for the error that reports a lack of memory
        self.name = f"{largest} and {len(self.params) - 1} smaller tensors"
        self.size = sum(param.size for param in self.params)
        self._number()
        self.moments: dict[str, Array] = {}
        self.rounds = ops.dtype != ops.statistics  # data is a rounded copy of the masters
        self.data = self.master = self._zeros("data", ops.dtype, "weights")
        self.grad = self._zeros("grad", ops.statistics, "gradients")
        if self.rounds:
            self.master = self._zeros("master", ops.statistics, "optimizer")
        for kind in ("data", "grad", "master"):
            if self.shares(kind):
                self.displace(kind, slice(0, self.total))
            else:
                self.place(kind, getattr(self, kind))
        self.summed = (
            self.pieces("grad")
            if self.shares("grad")
            else [
                self.grad[whole.run.start : whole.run.start + own.stop - own.start]
                for whole, own in zip(self.segments, self.own, strict=True)
            ]
        )

    def _number(self) -> None:
        """Compute the place of each parameter, the runs, and the segments."""
        self.starts: dict[Param, int] = {}
        start, unit = 0, None
        for param in self.params:
            if param.unit != unit:
                start, unit = padded(start, self.sharding.comm.size), param.unit
            self.starts[param] = start
            start += param.size
        self.total = padded(start, self.sharding.comm.size)
        self.units = dict(self._runs(attrgetter("unit")))
        self.segments = self.sharding.segments(self.units, self.total)
        self.own = self.sharding.own(self.segments)
        self.packed = consecutive_slices([own.stop - own.start for own in self.own])
        self.updates: list[list[tuple[bool, slice]]] = [[] for _ in self.segments]
        for decay, segment, place in self._within_own(self._runs(attrgetter("decay"))):
            self.updates[segment].append((decay, place))
        self.counted = list(self._within_own(self._runs(attrgetter("owner"))))

    def _zeros(self, kind: str, dtype: Any, label: str) -> Array:
        """Return a new buffer of a kind: whole, or as large as this rank's pieces.

        Comm: perhaps a window, by every member of the group that sums it.
        """
        data = self.sharding.data
        if data is not None and self.sharding.travels(kind):
            return data.zeros(self.ops, (self.total,), dtype, label)
        size = self.total // self.sharding.comm.size if self.shares(kind) else self.total
        return self.ops.zeros((size,), dtype, label=label)

    def add_moment(self, kind: str) -> None:
        """Allocate the buffer of an optimizer's moment, filled with zeros."""
        self.moments[kind] = self._zeros(kind, self.ops.statistics, "optimizer")

    @property
    def state(self) -> dict[str, Array]:
        """{kind: buffer} of everything that an update reads and changes."""
        return {"master": self.master, **self.moments}

    def shares(self, kind: str) -> bool:
        """Return whether a kind of buffer is sharded, so that this rank has only its own pieces."""
        same = kind == "master" and not self.rounds
        return self.sharding.shares("data" if same else kind)

    def place(self, kind: str, buffer: Array, run: slice | None = None) -> None:
        """Make `kind` of every Param in a run of the flat order a view of a buffer.

        run: what the buffer holds, by default all.
        """
        run = run or slice(0, self.total)
        for param in self.params_in(run):
            param.place(kind, buffer, self.starts[param] - run.start)

    def freshen(self, run: slice) -> None:
        """Declare the gradients of the parameters in a run of the flat order to be zero."""
        for param in self.params_in(run):
            param.fresh = True

    def _runs(self, key: Callable[[Param], Any]) -> list[tuple[Any, slice]]:
        """Return (key value, slice) of each contiguous run of parameters with equal key(param).

        The padding after a parameter belongs to its run.
        """
        found, edges, number = [], [*self.starts.values(), self.total], 0
        for value, params in itertools.groupby(self.params, key):
            first, number = number, number + len(list(params))
            found.append((value, slice(edges[first], edges[number])))
        return found

    def _within_own(self, runs: list[tuple[Any, slice]]) -> Iterator[tuple[Any, int, slice]]:
        """Yield (value, segment, slice of its piece) of the parts of runs that this rank owns."""
        for value, run in runs:
            for segment, own in enumerate(self.own):
                first, stop = max(run.start, own.start), min(run.stop, own.stop)
                if first < stop:
                    yield value, segment, slice(first - own.start, stop - own.start)

    def params_in(self, run: slice) -> list[Param]:
        """Return the parameters in a run of the flat order."""
        return [param for param, start in self.starts.items() if run.start <= start < run.stop]

    def length(self, segment: int) -> int:
        """Return the number of elements of a segment."""
        run = self.segments[segment].run
        return len(range(run.start, run.stop))

    def title(self, segment: int) -> str:
        """Return the layer of a segment's first parameter, as in block3, to name a barrier."""
        name: str = self.params_in(self.segments[segment].run)[0].name
        return name.split(".", maxsplit=1)[0]

    def displace(self, kind: str, run: slice) -> None:
        """Take `kind` from every Param in a run of the flat order."""
        for param in self.params_in(run):
            param.displace(kind)

    def buffer(self, kind: str) -> Array:
        """Return the buffer of a kind: data, grad, master or a moment."""
        return self.moments[kind] if kind in self.moments else getattr(self, kind)

    def piece(self, kind: str, segment: int) -> Array:
        """Return this rank's piece of a segment in a buffer."""
        places = self.packed if self.shares(kind) else self.own
        return self.buffer(kind)[places[segment]]

    def pieces(self, kind: str) -> list[Array]:
        """Return this rank's piece of each segment in a buffer."""
        return [self.piece(kind, segment) for segment in range(len(self.segments))]

    def parts(self, param: Param, pieces: list[Array]) -> Iterator[tuple[int, Array]]:
        """Yield (first, values) of what this rank's pieces hold of a parameter.

        first: place of the values in the flattened array of its local shape.
        """
        start = self.starts[param]
        for own, piece in zip(self.own, pieces, strict=True):
            low, high = max(start, own.start), min(start + param.size, own.stop)
            if low < high:
                yield low - start, piece[low - own.start : high - own.start]

    def _held_of(self, param: Param, kind: str) -> Iterable[tuple[int, Array]]:
        """Return (first, values) of all that a buffer holds of a parameter; see `parts`."""
        if self.shares(kind):
            return self.parts(param, self.pieces(kind))
        start = self.starts[param]
        return [(0, self.buffer(kind)[start : start + param.size])]

    def held(self, kind: str) -> Iterator[tuple[Param, int, Array]]:
        """Yield (Param, first, values) of all that a buffer holds; see `parts`."""
        for param in self.params:
            for first, values in self._held_of(param, kind):
                yield param, first, values

    @property
    def weights(self) -> list[str]:
        """The kinds to fill with weights from outside; `publish` derives the others from them."""
        same = self.shares("master") == self.shares("data")
        return ["master"] if same else ["master", "data"]

    def keep(self, param: Param, x: Array) -> None:
        """Set what this rank holds of a parameter to its part of x, an array of the local shape."""
        flat = x.reshape(-1)
        for kind in self.weights:
            for first, view in self._held_of(param, kind):
                self.ops.copy(view, flat[first : first + view.size])

    def initialize(self, seed: int, spread: float = 0.0) -> None:
        """Set every parameter to its initial values; padding stays zero.

        spread: standard deviation around the constant of biases and norms. Training starts them at
        exactly 0 and 1, but a comparison needs a spread: a zero bias that is counted twice is still
        zero.
        """
        for kind in self.weights:
            for param, first, view in self.held(kind):
                if param.fill is not None and not spread:
                    self.ops.fill(view, param.fill)
                    continue
                values = param.initial_run(seed, spread, first, view.size, self.ops.statistics)
                self.ops.copy(view, self.ops.asarray(values))
        self.publish()

    def publish(self) -> None:
        """Round changed master weights to the data, where a rank holds the same part of both."""
        if self.rounds and self.weights == ["master"]:
            self.ops.copy(self.data, self.master)

    def gather(self, segment: int) -> Pending:
        """Start to all-gather a segment of whole data, of which each rank has updated its piece.

        Comm: one all_gather over the ranks that shard.
        """
        comm = self.sharding.comm
        parts = self.data[self.segments[segment].run].reshape(comm.size, -1)
        return comm.iall_gather(parts, "weights.bucket")


def flats_of(
    ops: Any, params: Iterable[Param], sharding: Sharding, comms: Comms
) -> list[FlatParams]:
    """Return a FlatParams for each set of groups over which gradients are partial, and each update.

    Those that only the data group sums come first, since their sums begin while passes still run.
    Each set has its own data group, which shards what `sharding` says.
    """
    sets: dict[tuple[tuple[str, ...], float], list[Param]] = {}
    for param in params:
        sets.setdefault((param.grad_groups, param.sign_rate), []).append(param)

    def shared(groups: tuple[str, ...]) -> Sharding:
        return sharding._replace(comm=comms[groups[-1]]) if sharding.level else sharding

    return [
        FlatParams(ops, sets[groups, rate], shared(groups), groups, rate)
        for groups, rate in sorted(sets, key=lambda one: (len(one[0]), one))
    ]


def padded(length: int, count: int) -> int:
    """Return `length`, rounded up to a multiple of `count`."""
    return -(-length // count) * count
