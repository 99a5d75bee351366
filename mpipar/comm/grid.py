"""Rank arithmetic: a rank's place in the grid pp x dp x cp x tp, and the members of its groups.

By default `world_rank = ((pp*dp_size + dp)*cp_size + cp)*tp_size + tp`. The axis with the most
traffic (tp) is innermost, so that its groups are neighbours and cross the slowest links least.
`order` names the axes from outermost to innermost. There is no MPI here, so the answer can be
computed for every rank of every layout.

With `--islands` there are several such grids: a further axis, `island`, is outside all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

AXES = ("pp", "dp", "cp", "tp")
LAYOUT = (*AXES, "ep")  # what a layout names: ep divides dp x cp, and adds no ranks
ISLAND = "island"  # the outermost axis; its ranks meet once in --outer-interval steps
EVERY = (ISLAND, *AXES)


def chunk_size(length: int, parts: int, multiple: int = 1) -> int:
    """Return the length of each of `parts` equal chunks of an axis, a multiple of `multiple`.

    The last chunks are padded.
    """
    return -(-length // (parts * multiple)) * multiple


def chunk_slice(length: int, parts: int, index: int, multiple: int = 1) -> slice:
    """Return the slice of an axis that is chunk `index`, without its padding (perhaps empty)."""
    width = chunk_size(length, parts, multiple)
    return slice(min(index * width, length), min((index + 1) * width, length))


# Pieces of a row that a rank of a context-parallel group holds. With causal attention, a query at
# the end has many more keys than one at the start; two pieces, one from each end, balance that.
PIECES_PER_RANK = {"ring": 2, "gather": 2, "ulysses": 1}


def token_pieces(tokens: int, method: str, parts: int, index: int) -> tuple[slice, ...]:
    """Return the slices of a row whose tokens rank `index` of `parts` holds, ascending.

    method: of attention over the group (--cp-attention). With two pieces per rank, rank i holds the
    i-th piece from the start and the i-th from the end (a zig-zag).
    """
    per_rank = PIECES_PER_RANK[method]
    count = parts * per_rank
    assert tokens % count == 0, (tokens, count)
    places = (index, count - 1 - index)[:per_rank]
    return tuple(chunk_slice(tokens, count, place) for place in places)


def held_and_whole(tokens: int, method: str, parts: int, index: int) -> list[tuple[slice, slice]]:
    """Return (slice of the tokens a rank holds, slice of the row) for each of its pieces."""
    pieces = token_pieces(tokens, method, parts, index)
    held = consecutive_slices([one.stop - one.start for one in pieces])
    return list(zip(held, pieces, strict=True))


def consecutive_slices(lengths: Iterable[int]) -> list[slice]:
    """Return slices of these lengths, one after another from 0."""
    ends = list(accumulate(lengths, initial=0))
    return [slice(start, stop) for start, stop in pairwise(ends)]


class Part(NamedTuple):
    """A group that lies on some axes: `size` of their ranks, every `stride`-th.

    Ranks are counted in the order of the axes, the last one fastest.
    """

    axes: tuple[str, ...]
    stride: int
    size: int


# Groups that are not axes. Products of axes: the ranks of data hold the same shards, and read
# different rows or tokens; those of inner take a step together, which is all ranks of an island.
PRODUCTS = {"data": ("dp", "cp"), "inner": AXES}
# Divided groups: {runs of neighbours: (what is divided, the ranks at the same place of all runs)}.
# Where tp has more ranks than there are key and value heads, each run holds the same head. Of the
# ranks of data, each run holds all experts of a block, sharded over its ranks.
SUBGROUPS = {"kv": ("tp", "kv_heads"), "expert": ("data", "expert_data")}


@dataclass(frozen=True)
class Grid:
    """One rank's place in a grid of ranks.

    sizes: ranks on each axis, and in each run of a divided group; 1 if not given. parts: every
    group by its name, including the axes.
    """

    world_rank: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    order: tuple[str, ...] = AXES
    parts: Mapping[str, Part] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert sorted(self.order) == sorted(AXES), (self.order, AXES)
        assert self.sizes.keys() <= {*EVERY, *SUBGROUPS}, self.sizes
        parts = {axis: Part((axis,), 1, self.sizes.get(axis, 1)) for axis in EVERY}
        for name, axes in PRODUCTS.items():
            parts[name] = Part(axes, 1, math.prod(parts[axis].size for axis in axes))
        for run, (whole, others) in SUBGROUPS.items():
            divided, stride, size = parts[whole]
            length = self.sizes.get(run, 1)
            assert size % length == 0, (run, length, size)
            parts[run] = Part(divided, stride, length)
            parts[others] = Part(divided, stride * length, size // length)
        object.__setattr__(self, "parts", parts)
        assert 0 <= self.world_rank < self.world_size, (self.world_rank, self.world_size)

    @classmethod
    def of(cls, config: Any, world_rank: int) -> Grid:
        """Return the place of `world_rank` in the layout of a resolved GridConfig."""
        sizes = {axis: getattr(config, axis) for axis in AXES} | {"expert": config.ep}
        sizes |= {ISLAND: config.islands or 1, "dp": config.island_dp}
        return cls(world_rank, sizes, tuple(config.rank_order.split(",")))

    @property
    def world_size(self) -> int:
        return math.prod(self.size(axis) for axis in EVERY)

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes, from outermost to innermost."""
        return (ISLAND, *self.order)

    @property
    def replica(self) -> int:
        """This rank's number among the dp replicas of all islands."""
        return self.flat_index((ISLAND, "dp"), self.coordinates(self.world_rank))

    @property
    def layout(self) -> dict[str, int]:
        """The size of each axis as it is typed: dp counts the replicas of all islands."""
        sizes = {axis: self.size(axis) for axis in AXES}
        return sizes | {"dp": self.size(ISLAND) * sizes["dp"]}

    def size(self, group: str) -> int:
        """Return how many ranks an axis or another group has."""
        return self.parts[group].size

    def group_rank(self, group: str) -> int:
        """Return this rank's number in an axis or another group, counted from 0."""
        return self.group_rank_of(self.world_rank, group)

    def group_rank_of(self, world_rank: int, group: str) -> int:
        """Return a rank's number in its own group of this name."""
        axes, stride, size = self.parts[group]
        return self.flat_index(axes, self.coordinates(world_rank)) // stride % size

    def coordinates(self, world_rank: int) -> dict[str, int]:
        """Return a rank's place on each axis."""
        found = {}
        for axis in reversed(self.axes):
            world_rank, found[axis] = divmod(world_rank, self.size(axis))
        return found

    def flat_index(self, axes: tuple[str, ...], coordinates: dict[str, int]) -> int:
        """Return the number of coordinates on some axes, the last of which varies fastest."""
        number = 0
        for axis in axes:
            number = number * self.size(axis) + coordinates[axis]
        return number

    def rank_at(self, **places: int) -> int:
        """Return the world rank whose place differs from this one in the given groups: at(pp=0).

        Where groups overlap, the later one wins: at(tp=0, kv_heads=2).
        """
        coordinates = self.coordinates(self.world_rank)
        for group, place in places.items():
            axes, stride, size = self.parts[group]
            number = self.flat_index(axes, coordinates)
            number += (place - number // stride % size) * stride
            for axis in reversed(axes):
                number, coordinates[axis] = divmod(number, self.size(axis))
        return self.flat_index(self.axes, coordinates)

    def group_ranks(self, groups: Iterable[str]) -> list[dict[str, int]]:
        """Return every {group: place} on the given groups, the first group outermost."""
        ranges = [range(self.size(group)) for group in groups]
        return [dict(zip(groups, place, strict=True)) for place in product(*ranges)]

    def group(self, *groups: str) -> tuple[int, ...]:
        """Return the world ranks whose places differ from this one only in `groups`, in order."""
        return tuple(self.rank_at(**place) for place in self.group_ranks(groups))

    def remaining_group(self, whole: str, cut: Iterable[str]) -> tuple[str, ...]:
        """Return what remains of a group where a tensor is cut over the groups `cut`.

        That is the whole group if none of them is part of it. If it is divided, it is the other of
        its two parts, which may consist of this rank alone.
        """
        if whole in cut:
            return ()
        for run, (divided, others) in SUBGROUPS.items():
            if divided == whole and {run, others} & {*cut}:
                return tuple(part for part in (run, others) if part not in cut)
        return (whole,)

    def alias_of(self, group: str) -> str:
        """Return the axis or product with the same ranks as a group; else the group's own name.

        A product of axes is the same as its first axis if the others have one rank. What remains of
        a divided group is the whole of it if its runs have one rank. A single island is the world.
        """
        if group == "inner":
            return "world" if self.size(ISLAND) == 1 else group
        for run, (whole, others) in SUBGROUPS.items():
            if group == others and self.size(run) == 1:
                return self.alias_of(whole)
        first, *more = PRODUCTS.get(group, (group,))
        return first if all(self.size(axis) == 1 for axis in more) else group

    def groups(self) -> list[str]:
        """Return the names of all groups: axes, products of several, and parts of divided ones.

        Those that are the same as another one are left out.
        """
        divided = [name for run, (_, others) in SUBGROUPS.items() for name in (run, others)]
        return [*EVERY, *(name for name in (*PRODUCTS, *divided) if self.alias_of(name) == name)]

    def partition(self, axis: str, groups: Iterable[Iterable[int]]) -> list[tuple[int, ...]]:
        """Return the world ranks of groups of coordinates along `axis`.

        Each group appears once for every place on the other axes.
        """
        others = self.group_ranks([other for other in EVERY if other != axis])
        return [
            tuple(self.rank_at(**place, **{axis: i}) for i in sorted(group))
            for group in groups
            for place in others
        ]

    def describe(self) -> str:
        """Return the place on the axes with several ranks, as in `pp1 tp0`."""
        return (
            " ".join(f"{axis}{self.group_rank(axis)}" for axis in EVERY if self.size(axis) > 1)
            or "one rank"
        )
