"""Muon: the momentum of each hidden matrix is made orthogonal before it changes the weights.

    M = 0.95 M + G;   O = orthogonalized(G + 0.95 M)
    W = W - lr (0.2 sqrt(max(rows, columns)) O + weight_decay W)

Five Newton-Schulz steps bring the singular values of a matrix close to 1. They need the whole
matrix: orthogonalized shard by shard, it would be another optimizer. So each matrix has a *home*
among the ranks that hold its pipeline stage, the group `muon` (dp x cp x tp). What tp, experts or
ZeRO cut is gathered there, and the results go to every rank that holds a part:

    muon.gather    one all_to_allv: each number goes home once, however many ranks have it
    muon.scatter   one all_to_allv: each rank gets the results for all that it updates

The largest matrix gets its home first, and each one goes to the rank that has least to do so far.
q, k and v are three matrices, and each matrix of an expert is one. Embeddings, head, norms, biases
and routers take AdamW's rule. Sources: Jordan et al. (Muon, 2024); arXiv 2502.16982 for scale and
decay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import ClassVar

from mpipar.comm.grid import Grid, consecutive_slices
from mpipar.comm.groups import Comms
from mpipar.config.train import TrainConfig
from mpipar.layers.flat import FlatParams, shared_run
from mpipar.layers.param import Param
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array
from mpipar.train.optim import Sgd

MOMENTUM = 0.95
STEPS, A, B, C = 5, 3.4445, -4.7750, 2.0315
SCALE = 0.2  # the usual root mean square of AdamW's updates
EPS = 1e-7  # the least that a matrix is divided by

Places = dict[str, int]  # {group: place}
Views = list[tuple[int, Array]]  # (group rank, what travels to or from there)
Route = tuple[int, int, int, slice]  # (group rank, unit, shard, run of its numbers)


class Unit:
    """What has one home: a matrix, or the three of a packed q, k and v.

    It is a run of each of a Param's shards, `number` of those that are side by side there, as
    experts are. at: the places of the ranks that hold it, if others hold other experts.
    """

    def __init__(self, grid: Grid, flat: FlatParams, param: Param, number: int, at: Places):
        lead = counting(param)
        self.flat, self.param, self.at = flat, param, at
        self.shape, self.local_shape = param.shape[lead:], param.local_shape[lead:]
        self.size = math.prod(self.local_shape)
        self.run = slice(number * self.size, (number + 1) * self.size)  # of a shard's numbers
        cuts = [group for group in param.placement if group not in at]
        self.shards = [{**at, **places} for places in grid.group_ranks(cuts)]  # their places
        self.sharding = flat.groups[-1:] if flat.level else ()  # the group that shards a shard
        self.groups = (*param.placement, *self.sharding)
        axes = zip(param.axes[lead:], self.shape, strict=True)
        self.sizes = {  # in the order of the dimensions: i inputs, o outputs, s matrices
            letter: math.prod(length for _, length in run)
            for letter, run in groupby(axes, itemgetter(0))
        }
        self.count = self.sizes.get("s", 1)
        low, high = sorted((self.sizes["i"], self.sizes["o"]))
        self.flops = self.count * STEPS * (4 * low**2 * high + 2 * low**3)

    def routes(self, peer: int, k: int, places: Places) -> Iterator[Route]:
        """Yield the Routes of what the ranks at some places update, for unit number k."""
        shard = self.shards.index({group: places[group] for group in self.param.placement})
        piece = next((places[group] for group in self.sharding), 0)
        for held in self.flat.runs_of(self.param, piece):
            if (run := shared_run(held, self.run)) is not None:
                yield peer, k, shard, run

    def joints(self, grid: Grid, whole: Array, room: Array) -> Iterator[tuple[Array, Array]]:
        """Yield (view of the whole, view of the shard) with the same numbers, without padding."""
        for number, places in enumerate(self.shards):
            box = self.param.box_at(grid, places)[-len(self.shape) :]
            part = room[number].reshape(self.local_shape)
            yield (
                whole[tuple(slice(first, stop) for first, stop in box)],
                part[tuple(slice(stop - first) for first, stop in box)],
            )

    def matrices(self, whole: Array) -> list[Array]:
        """Return its matrices as views of an array of its shape."""
        first, *_, last = self.sizes.values()
        x = whole.reshape(first, self.count, last)
        return [x[:, number] for number in range(self.count)]


def counting(param: Param) -> int:
    """Return how many of a Param's first dimensions count units."""
    return len(param.axes) - len(param.axes.lstrip("s"))


def orthogonalized(ops: Ops, x: Array) -> Array:
    """Return about U V^T of x = U S V^T (R, C): all singular values come close to 1.

    The norm of x is at most 1, and R at most C. Each step applies A s + B s^3 + C s^5 to them.
    """
    for _ in range(STEPS):
        gram = ops.matmul_nt(x, x)  # (R, R)
        square = ops.matmul(gram, gram)
        inner = ops.accumulate(ops.scale(square, C), ops.scale(gram, B))
        x = ops.accumulate(ops.matmul(inner, x), ops.scale(x, A))
    return x


class Muon(Sgd):
    """The rule of hidden matrices; see the head of this file."""

    kinds: ClassVar[dict[str, str]] = {"momentum": "momentum"}

    def __init__(self, ops: Ops, flats: Sequence[FlatParams], config: TrainConfig, comms: Comms):
        super().__init__(ops, flats, config, comms)
        self.comm, self.grid = comms["muon"], comms.grid
        self.exact: Ops = getattr(ops, "exact", ops)  # its products don't round to 16 bits
        self.units = list(self.all_units())
        self.homes = self.all_homes()  # of each unit, a group rank
        self.own = [k for k, home in enumerate(self.homes) if home == self.comm.group_rank]
        views = list(self.views())
        self.parts = [(self.homes[k], view) for k, view in views]
        # Of copies, one rank sends its part home.
        self.sent = [
            (self.homes[k], view)
            for k, view in views
            if self.source(k, self.places(self.units[k].groups, self.comm.group_rank))
            == self.comm.group_rank
        ]
        self.arriving = list(self.all_sources())
        self.leaving = list(self.all_holders())

    def all_units(self) -> Iterator[Unit]:
        """Yield the units of all matrices of the group, in the same order on each of its ranks."""
        for flat in self.flats:
            for param in flat.params:
                lead = counting(param)
                spread = [group for group, axis in param.placement.items() if axis < lead]
                for at in self.grid.group_ranks(spread):
                    for number in range(math.prod(param.local_shape[:lead])):
                        yield Unit(self.grid, flat, param, number, at)

    def all_homes(self) -> list[int]:
        """Return the homes: from the largest unit on, the holder that has least to do so far."""
        homes, loads = [0] * len(self.units), [0] * self.comm.size
        holders = {str(unit.at): self.holders(unit) for unit in self.units}
        for k in sorted(range(len(homes)), key=lambda k: -self.units[k].flops):
            homes[k] = min(holders[str(self.units[k].at)], key=loads.__getitem__)
            loads[homes[k]] += self.units[k].flops
        return homes

    def places(self, groups: Iterable[str], group_rank: int) -> dict[str, int]:
        """Return where a rank of the group is in other groups."""
        return {
            group: self.grid.group_rank_of(self.comm.ranks[group_rank], group) for group in groups
        }

    def holders(self, unit: Unit) -> list[int]:
        """Return the group ranks that hold a part of a unit."""
        ranks = range(self.comm.size)
        return [one for one in ranks if self.places(unit.at, one) == unit.at]

    def source(self, k: int, places: Places) -> int:
        """Return which of the ranks at some places sends a part home: of copies the nearest."""
        home = replace(self.grid, world_rank=self.comm.ranks[self.homes[k]])
        return self.comm.ranks.index(home.rank_at(**places))

    def views(self) -> Iterator[tuple[int, Array]]:
        """Yield (unit, view) of what this rank updates: gradients that become updates."""
        for k, unit in enumerate(self.units):
            if self.places(unit.at, self.comm.group_rank) == unit.at:
                for first, values in unit.flat.parts(unit.param, unit.flat.reduced_grads):
                    held = slice(first, first + values.size)
                    if (run := shared_run(unit.run, held)) is not None:
                        yield k, values[run]

    def all_sources(self) -> Iterator[Route]:
        """Yield where the numbers of this rank's own units come from, those of copies once."""
        for k in self.own:
            unit = self.units[k]
            for shard in unit.shards:
                for piece in self.grid.group_ranks(unit.sharding):
                    yield from unit.routes(self.source(k, shard | piece), k, shard | piece)

    def all_holders(self) -> Iterator[Route]:
        """Yield where the results of this rank's own units go: to all that hold a part."""
        for k in self.own:
            unit = self.units[k]
            for peer in self.holders(unit):
                yield from unit.routes(peer, k, self.places(unit.groups, peer))

    def prepare(self) -> None:
        """Replace the gradients of all matrices by their momentum, orthogonalized and scaled.

        Comm: one all_to_allv of momentum to its homes, and one of the results, over muon.
        """
        ops = self.ops
        for flat in self.flats:
            for grad, momentum in zip(flat.reduced_grads, flat.pieces("momentum"), strict=True):
                ops.accumulate(ops.scale(momentum, MOMENTUM), grad)
                ops.sgd_step(grad, momentum, -MOMENTUM)  # Nesterov: one step ahead
        rooms = {
            k: ops.empty((len(unit.shards), unit.size), ops.accum_dtype, "buffers")
            for k, unit in ((k, self.units[k]) for k in self.own)
        }
        arriving = [(peer, rooms[k][shard][run]) for peer, k, shard, run in self.arriving]
        self.exchange(self.sent, arriving, "muon.gather")
        self.orthogonalize(rooms)
        leaving = [(peer, rooms[k][shard][run]) for peer, k, shard, run in self.leaving]
        self.exchange(leaving, self.parts, "muon.scatter")

    def exchange(self, sent: Views, received: Views, name: str) -> None:
        """Copy views to and from all ranks of the group. Comm: one all_to_allv, if it has units."""
        if not self.units:
            return
        counts = [[0] * self.comm.size, [0] * self.comm.size]
        for views, own in zip((sent, received), counts, strict=True):
            for peer, view in views:
                own[peer] += view.size
        x = self.ops.empty((sum(counts[0]),), self.ops.accum_dtype, "buffers")
        for part, view in by_peer(x, sent):
            self.ops.copy(part, view)
        y, _ = self.comm.all_to_allv(x, counts[0], name, counts[1])
        for part, view in by_peer(y, received):
            self.ops.copy(view, part)

    def orthogonalize(self, rooms: Mapping[int, Array]) -> None:
        """Replace all shards of this rank's own units. rooms: {unit: (shards, numbers of each)}."""
        ops, wholes = self.ops, {}
        for k, room in rooms.items():
            wholes[k] = ops.empty(self.units[k].shape, ops.accum_dtype, "buffers")
            for whole, part in self.units[k].joints(self.grid, wholes[k], room):
                ops.copy(whole, part)
        found = [matrix for k, whole in wholes.items() for matrix in self.units[k].matrices(whole)]
        squares = ops.to_floats([ops.square_sum(matrix) for matrix in found])
        for matrix, square in zip(found, squares, strict=True):
            wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
            x = ops.empty(wide.shape, ops.accum_dtype, "buffers")
            ops.copy(x, wide)
            x = orthogonalized(self.exact, ops.scale(x, 1 / max(math.sqrt(square), EPS)))
            ops.copy(wide, ops.scale(x, SCALE * math.sqrt(max(wide.shape))))
        for k, room in rooms.items():
            for whole, part in self.units[k].joints(self.grid, wholes[k], room):
                ops.copy(part, whole)

    def change(self, master: Array, grad: Array, lr: float) -> None:
        self.ops.scale(master, 1.0 - lr * self.config.weight_decay)
        super().change(master, grad, lr)


def by_peer(x: Array, views: Views) -> Iterator[tuple[Array, Array]]:
    """Yield (part of x, view) of the views of each peer, which are side by side in x."""
    ordered = sorted(views, key=itemgetter(0))
    runs = consecutive_slices([view.size for _, view in ordered])
    for run, (_, view) in zip(runs, ordered, strict=True):
        yield x[run], view
