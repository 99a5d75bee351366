"""Flat buffers: all parameters of a stage in one array per kind.

What ZeRO shards of them is in `train/zero.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import TypeAlias, TypeVar

from mpipar.comm.group import Comm, Pending
from mpipar.comm.groups import Comms
from mpipar.layers.param import Param
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, Dtype

Value = TypeVar("Value")
Runs: TypeAlias = list[tuple[Value, slice]]


class FlatParams:
    """Data, gradients and optimizer state of some parameters, each kind in one flat buffer.

    A stage has one FlatParams for each set of groups over which gradients are partial, so that a
    sum over a group is a sum of whole buffers. Each Param is a view into all buffers.

    With 16-bit data, gradients and master weights are float32, because an update is often too small
    to change a 16-bit number. Otherwise the master weights are the data.

    Units are stored from the last to the first, in the order in which their gradients are
    completed, and inside each unit parameters with decay come first. An optimizer update thus
    consists of two long runs per unit, and a bucket of gradients is a slice.

    Who updates, adds up squares or reads and writes files does so piece by piece. Here a buffer is
    a single piece.
    """

    level = 0  # of ZeRO
    multiple = 1  # of which the length of each unit's run is one, with zeros at its end

    def __init__(
        self,
        ops: Ops,
        params: Iterable[Param],
        groups: tuple[str, ...] = (),
        group: Comm | None = None,
        rule: str = "sgd",
    ):
        self.ops = ops
        self.groups = groups  # over which gradients are summed; the last one is the data group
        self.further_groups = groups[:-1]
        self.group: Comm = group  # type: ignore[assignment]  # of data; None: nothing is summed
        self.rule = rule  # that updates the buffers
        self.params = sorted(params, key=lambda param: (-param.unit, not param.decay))
        largest = max(self.params, key=lambda p: p.size).name if self.params else "none"
        # for the error that reports a lack of memory
        self.name = f"{largest} and {len(self.params) - 1} smaller tensors"
        self.size = sum(param.size for param in self.params)  # without padding
        self.starts: dict[Param, int] = {}
        start, unit = 0, None
        for param in self.params:
            if param.unit != unit:
                start, unit = padded(start, self.multiple), param.unit
            self.starts[param] = start
            start += param.size
        self.total = padded(start, self.multiple)
        self.units: dict[int, slice] = dict(self.runs(attrgetter("unit")))  # in buffer order
        self.cut()
        self.moments: dict[str, Array] = {}  # made by the optimizer
        self.rounds = ops.dtype != ops.accum_dtype  # data is a rounded copy of the masters
        self.data = self.master = self.zeros("data", ops.dtype, "weights")
        self.grad = self.zeros("grad", ops.accum_dtype, "gradients")
        if self.rounds:
            self.master = self.zeros("master", ops.accum_dtype, "optimizer")
        for kind in ("data", "grad", "master"):
            if self.is_sharded(kind):
                self.unbind(kind, slice(0, self.total))
            else:
                self.bind(kind, getattr(self, kind))
        self.reduced_grads = self.sums()  # of each piece, once it is summed over all ranks

    def cut(self) -> None:
        """Determine pieces and their runs."""
        self.lengths = [self.total]  # of the runs in which pieces travel
        # For each piece, (whether weights decay, slice) of each of its runs.
        self.decay_runs: list[Runs[bool]] = [self.runs(attrgetter("decay"))]
        # (whether this rank counts it in norms, piece, slice) of each run; the others are copies.
        first = self.group is None or self.group.group_rank == 0
        self.norm_runs = [(own and first, 0, run) for own, run in self.runs(attrgetter("owner"))]

    def runs(self, key: Callable[[Param], Value]) -> Runs[Value]:
        """Return (key value, slice) of each contiguous run of parameters with equal key(param).

        The padding after a parameter belongs to its run.
        """
        found, edges, number = [], [*self.starts.values(), self.total], 0
        for value, params in itertools.groupby(self.params, key):
            first, number = number, number + len(list(params))
            found.append((value, slice(edges[first], edges[number])))
        return found

    def zeros(self, kind: str, dtype: Dtype, label: str) -> Array:
        """Return a new buffer of a kind. What travels is in the memory that its group prefers.

        Comm: perhaps a window, by every member of the group that sums it.
        """
        if kind == "grad" and self.group is not None:
            return self.group.zeros(self.ops, (self.total,), dtype, label)
        return self.ops.zeros((self.total,), dtype, label=label)

    def add_moment(self, kind: str) -> None:
        """Allocate the buffer of an optimizer's moment, filled with zeros."""
        self.moments[kind] = self.zeros(kind, self.ops.accum_dtype, "optimizer")

    @property
    def state(self) -> dict[str, Array]:
        """{kind: buffer} of everything that an update reads and changes."""
        return {"master": self.master, **self.moments}

    def is_sharded(self, kind: str) -> bool:
        """Return whether a kind of buffer is sharded, so that this rank has only its own pieces."""
        return False

    def bind(self, kind: str, buffer: Array, run: slice | None = None) -> None:
        """Make `kind` of every Param in a run of the flat order a view of a buffer.

        run: what the buffer holds, by default all.
        """
        run = run or slice(0, self.total)
        for param in self.params_in(run):
            param.bind(kind, buffer, self.starts[param] - run.start)

    def unbind(self, kind: str, run: slice) -> None:
        """Take `kind` from every Param in a run of the flat order."""
        for param in self.params_in(run):
            param.unbind(kind)

    def run_of(self, param: Param) -> slice:
        """Return where a parameter's numbers are in the flat order."""
        return slice(self.starts[param], self.starts[param] + param.size)

    def params_in(self, run: slice) -> list[Param]:
        """Return the parameters in a run of the flat order."""
        return [param for param, start in self.starts.items() if run.start <= start < run.stop]

    def buffer(self, kind: str) -> Array:
        """Return the buffer of a kind: data, grad, master or a moment."""
        return self.moments[kind] if kind in self.moments else getattr(self, kind)

    def pieces(self, kind: str) -> list[Array]:
        """Return the pieces of a buffer that this rank owns: all of it."""
        return [self.buffer(kind)]

    def sums(self) -> list[Array]:
        """Return where the summed gradients of this rank's pieces are."""
        return self.pieces("grad")

    def piece_of(self, param: Param) -> int:
        """Return in which of the runs of `lengths` a parameter begins."""
        return 0

    def parts(self, param: Param, pieces: list[Array]) -> Iterator[tuple[int, Array]]:
        """Yield (first, values) of what this rank's pieces hold of a parameter.

        first: place of the values in the flattened array of its local shape.
        """
        yield 0, pieces[0][self.run_of(param)]

    def runs_of(self, param: Param, piece: int) -> list[slice]:
        """Return which numbers of a parameter's shard are in the pieces of a rank of the group.

        piece: the place of that rank. What this rank holds of them is in `parts`.
        """
        return [slice(0, param.size)]

    def parts_of(self, param: Param, kind: str) -> Iterator[tuple[int, Array]]:
        """Yield (first, values) of all that a buffer holds of a parameter; see `parts`."""
        return self.parts(param, self.pieces(kind))

    def parts_in(self, kind: str) -> Iterator[tuple[Param, int, Array]]:
        """Yield (Param, first, values) of all that a buffer holds; see `parts`."""
        for param in self.params:
            for first, values in self.parts_of(param, kind):
                yield param, first, values

    @property
    def weights(self) -> list[str]:
        """The kinds to fill with weights from outside; `copy_master_to_params` makes the others."""
        return ["master"]

    def initialize(self, seed: int, spread: float = 0.0) -> None:
        """Set every parameter to its initial values; padding stays zero.

        spread: standard deviation around the constant of biases and norms. Training starts them at
        exactly 0 and 1, but a comparison needs a spread: a zero bias that is counted twice is still
        zero.
        """
        for kind in self.weights:
            for param, first, view in self.parts_in(kind):
                if param.fill is not None and not spread:
                    self.ops.fill(view, param.fill)
                    continue
                values = param.initial_run(seed, spread, first, view.size, self.ops.accum_dtype)
                self.ops.copy(view, self.ops.asarray(values))
        self.copy_master_to_params()

    def copy_master_to_params(self) -> None:
        """Round changed master weights to the data, where a rank holds the same part of both."""
        if self.rounds and self.weights == ["master"]:
            self.ops.copy(self.data, self.master)

    def gather(self, number: int) -> Pending:
        """Start to gather a run of data, of which each rank has updated its piece: see ZeRO 1."""
        raise AssertionError("every rank has all of it")


def flats_of(
    params: Iterable[Param],
    make: Callable[..., FlatParams],
    ops: Ops,
    comms: Comms,
    rules: Mapping[str, str],
) -> list[FlatParams]:
    """Return a FlatParams for each set of groups over which gradients are partial, and each rule.

    Those that only the data group sums come first, since their sums begin while passes still run.
    make: FlatParams, or a function that is called like it. rules: see `Context`.
    """
    sets: dict[tuple[tuple[str, ...], str], list[Param]] = {}
    for param in params:
        sets.setdefault((param.grad_groups, rules[param.role]), []).append(param)
    return [
        make(ops, sets[groups, rule], groups, comms[groups[-1]], rule)
        for groups, rule in sorted(sets, key=lambda one: (len(one[0]), one))
    ]


def padded(length: int, count: int) -> int:
    """Return `length`, rounded up to a multiple of `count`."""
    return -(-length // count) * count


def shared_run(one: slice, other: slice) -> slice | None:
    """Return what two runs share, counted from the start of the second, or None."""
    first, stop = max(one.start, other.start), min(one.stop, other.stop)
    return slice(first - other.start, stop - other.start) if first < stop else None
