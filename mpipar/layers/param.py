"""Parameters: global name, logical shape, placement, and initial values that no layout changes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, NoReturn, Protocol

import numpy as np

from mpipar.comm.grid import Grid, chunk_size, chunk_slice
from mpipar.comm.groups import Comms
from mpipar.errors import UsageError
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array, Dtype

Box = tuple[tuple[int, int], ...]  # (start, stop) on each dimension of a tensor, without padding


class Copies(NamedTuple):
    """Copies of a tensor on other pipeline ranks.

    groups: the groups over which the gradients of all copies are summed. owner: whether this rank's
    copy is the one that counts in norms and files.
    """

    groups: tuple[str, ...] = ()
    owner: bool = True


ALONE = Copies()


class ParamContext(Protocol):
    """What a Param and a linear layer need from a `Context`."""

    @property
    def comms(self) -> Comms: ...
    @property
    def ops(self) -> Ops: ...


class Param:
    """One tensor of the model, or this rank's shard of it.

    name: global name, the same on every layout. shape: logical N-d shape of the whole tensor.
    placement: {group of ranks: the dimension of the shape that it cuts}. Ranks of tp that it does
    not name hold replicas, and so do the other ranks of tp if only a part of it, such as kv_heads,
    cuts the tensor. std: standard deviation of the initial normal values. fill: a constant to start
    from instead. decay: whether weight decay applies, as it does to matrices and embeddings, but
    not to biases and norms. partial_groups: groups whose ranks each compute a part of the gradient.
    copies: see `Copies`. multiple: the length of a shard is a multiple of this on each dimension
    that is cut, padded with zeros. role: numbers, matrices or signs, which determines its update
    rule, see `config.train.OPTIMIZERS`. axes: of a hidden matrix, what each dimension is: i inputs,
    o outputs, s one of several matrices that are side by side; "" for all others.

    grad_groups: names of all groups over which the gradient is still partial after the step's last
    backward pass. The last one is the data group, whose ranks read different data. copy_groups: the
    groups besides it whose ranks hold copies. owner: false for replicas and tied copies, which
    norms and files must not count again. box: (start, stop) of this shard on each dimension,
    without padding. shard: its number among the tensor's shards. unit: the unit of the stage that
    it belongs to, counted from the first; the stage sets it. data, grad, master: views into the
    flat buffers of a stage, which `FlatParams` binds. Layers read data; the optimizer and files
    use master. A buffer that is sharded across ranks is None here.
    """

    data: Array
    grad: Array
    master: Array

    def __init__(
        self,
        context: ParamContext,
        name: str,
        shape: Iterable[int],
        *,
        placement: Mapping[str, int] | None = None,
        std: float = 0.0,
        fill: float | None = None,
        decay: bool = True,
        partial_groups: tuple[str, ...] = (),
        copies: Copies = ALONE,
        multiple: int = 1,
        role: str = "numbers",
        axes: str = "",
    ) -> None:
        grid = context.comms.grid
        self.name = name
        self.shape = tuple(shape)
        self.placement = dict(placement or {})
        assert len({*self.placement.values()}) == len(self.placement), (name, placement)
        self.std, self.multiple, self.axes = std, multiple, axes
        self.role = "matrices" if axes else role
        self.fill = fill
        self.decay = decay
        replicas = grid.remaining_group("tp", self.placement)
        data = tuple(
            context.comms[group].axis for group in grid.remaining_group("data", self.placement)
        )
        partial = [group for group in partial_groups if grid.size(group) > 1]
        self.grad_groups: tuple[str, ...] = (*partial, *copies.groups, *data)
        self.copy_groups = (*copies.groups, *replicas)
        self.owner = copies.owner and all(grid.group_rank(group) == 0 for group in replicas)
        local, self.shard = list(self.shape), 0
        for group, dimension in self.placement.items():
            local[dimension] = chunk_size(local[dimension], grid.size(group), multiple)
            self.shard = self.shard * grid.size(group) + grid.group_rank(group)
        self.local_shape, self.size = tuple(local), math.prod(local)
        self.box = self.box_at(grid, {group: grid.group_rank(group) for group in self.placement})
        self.unit = 0
        # By kind: the flat buffer that this is a view of, and where it starts there.
        self.bound: dict[str, tuple[Array, int]] = {}

    def __getattr__(self, kind: str) -> NoReturn:
        """Explain what is missing; called for attributes that have not been set."""
        if kind not in ("data", "grad", "master"):
            raise AttributeError(f"Param has no attribute {kind!r}")
        raise UsageError(
            f"{self.name}: has no {kind} yet; before a layer computes, call"
            " mpipar.FlatParams(ops, layer.params).initialize(seed)"
        )

    def bind(self, kind: str, buffer: Array, start: int) -> None:
        """Make data, grad or master a view of a flat buffer, starting at `start`."""
        self.bound[kind] = buffer, start
        setattr(self, kind, buffer[start : start + self.size].reshape(self.local_shape))

    def unbind(self, kind: str) -> None:
        """Remove data, grad or master: no rank holds it whole."""
        self.bound.pop(kind, None)
        setattr(self, kind, None)

    def box_at(self, grid: Grid, places: Mapping[str, int]) -> Box:
        """Return (start, stop) on each dimension, for the shard at some places of its groups."""
        found = [(0, length) for length in self.shape]
        for group, dimension in self.placement.items():
            part = chunk_slice(
                self.shape[dimension], grid.size(group), places[group], self.multiple
            )
            found[dimension] = part.start, part.stop
        return tuple(found)

    def shards(self, grid: Grid) -> list[dict[str, int]]:
        """Return the places of every shard of the tensor on a grid, in the order of their numbers.

        The last group varies fastest.
        """
        return grid.group_ranks(tuple(self.placement))

    def initial_run(self, seed: int, spread: float, first: int, count: int, dtype: Dtype) -> Array:
        """Return `count` initial values, flat, from place `first` of the shard; padding is zero."""
        width = math.prod(self.local_shape[1:])
        rows = slice(first // width, -(-(first + count) // width))
        values: Array = np.zeros((rows.stop - rows.start, *self.local_shape[1:]), dtype)
        inside = values[(slice(None), *(slice(stop - start) for start, stop in self.box[1:]))]
        for row, one in self.initial_rows(seed, spread, rows):
            inside[row - rows.start] = one
        return values.reshape(-1)[first - rows.start * width :][:count]

    def initial_rows(
        self, seed: int, spread: float = 0.0, rows: slice = slice(None)
    ) -> Iterator[tuple[int, Array]]:
        """Yield (local row, values) for first-axis rows of this shard, without padding.

        rows: slice of the rows to make; all by default.

        The values are normal with deviation `std`. Those of biases and norms have deviation
        `spread` around their constant.

        Row i of the whole tensor is a pure function of (seed, name, i): Philox is keyed by a hash
        of seed and name, and its counter is set to i << 64. Any layout thus starts from the same
        model, and no rank ever makes more than one row of a tensor it does not own.
        """
        key = int.from_bytes(hashlib.sha256(f"{seed}:{self.name}".encode()).digest()[:16], "little")
        (first, stop), *others = self.box
        inside = tuple(slice(*bounds) for bounds in others)
        bits = np.random.Philox(key=key)
        generator, state = np.random.Generator(bits), bits.state
        for row in range(first, stop)[rows]:
            state["state"]["counter"][1] = row  # the counter is row << 64: rows cannot overlap
            bits.state = state
            values = np.asarray(generator.standard_normal(self.shape[1:]))[inside]
            yield (
                row - first,
                (values * self.std if self.fill is None else values * spread + self.fill),
            )
