"""Rank arithmetic: where a rank stands in the grid pp x dp x cp x tp, and who is in its groups.

By default `world_rank = ((pp_rank*dp_size + dp_rank)*cp_size + cp_rank)*tp_size + tp_rank`. The
axis with the most traffic (tp) is innermost. So its groups are neighbours and cross the slowest
links least. `order` names the axes from outermost to innermost. There is no MPI here, so every rank
of every layout can be asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise, product

AXES = ("pp", "dp", "cp", "tp")


def share(length: int, parts: int) -> int:
    """Length of each of `parts` equal pieces of an axis; the last ones are padded."""
    return -(-length // parts)


def piece(length: int, parts: int, index: int) -> slice:
    """Where piece `index` lies on an axis of `length`, without its padding (perhaps empty)."""
    width = share(length, parts)
    return slice(min(index * width, length), min((index + 1) * width, length))


# Pieces of a row that a rank of a context-parallel group holds. With causal attention a query at
# the end has many more keys than one at the start. Two pieces, one from each end, even that out.
PIECES_PER_RANK = {"ring": 2, "gather": 2, "ulysses": 1}


def token_pieces(tokens: int, method: str, parts: int, index: int) -> tuple[slice, ...]:
    """Where the tokens of rank `index` of `parts` lie in a row, ascending.

    method: of attention over the group (--cp-attention). With two pieces for each rank, rank i
    holds the i-th piece from the start and the i-th from the end (a zig-zag).
    """
    per_rank = PIECES_PER_RANK[method]
    count = parts * per_rank
    assert tokens % count == 0, (tokens, count)
    places = (index, count - 1 - index)[:per_rank]
    return tuple(piece(tokens, count, place) for place in places)


def held_and_whole(tokens: int, method: str, parts: int, index: int) -> list[tuple[slice, slice]]:
    """(where a rank holds a piece of its tokens, where that lies in the row) of each piece."""
    pieces = token_pieces(tokens, method, parts, index)
    return list(zip(runs([one.stop - one.start for one in pieces]), pieces, strict=True))


def runs(lengths) -> list[slice]:
    """Slices of these lengths, one behind the other."""
    ends = list(accumulate(lengths, initial=0))
    return [slice(start, stop) for start, stop in pairwise(ends)]


@dataclass(frozen=True)
class Grid:
    """One rank's place in a grid of `pp_size * dp_size * cp_size * tp_size` ranks."""

    world_rank: int
    pp_size: int = 1
    dp_size: int = 1
    cp_size: int = 1
    tp_size: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self):
        assert sorted(self.order) == sorted(AXES), (self.order, AXES)
        assert 0 <= self.world_rank < self.world_size, (self.world_rank, self.world_size)

    @classmethod
    def of(cls, config, world_rank: int) -> Grid:
        """The place of `world_rank` in the layout of a resolved GridConfig."""
        order = tuple(config.rank_order.split(","))
        return cls(world_rank, config.pp, config.dp, config.cp, config.tp, order)

    @property
    def world_size(self) -> int:
        return self.pp_size * self.dp_size * self.cp_size * self.tp_size

    def axis_size(self, axis: str) -> int:
        return getattr(self, f"{axis}_size")

    def axis_rank(self, axis: str) -> int:
        """This rank's coordinate along `axis`."""
        stride = 1
        for name in reversed(self.order):
            if name == axis:
                return self.world_rank // stride % self.axis_size(axis)
            stride *= self.axis_size(name)
        raise AssertionError(axis)

    @property
    def pp_rank(self) -> int:
        return self.axis_rank("pp")

    @property
    def dp_rank(self) -> int:
        return self.axis_rank("dp")

    @property
    def cp_rank(self) -> int:
        return self.axis_rank("cp")

    @property
    def tp_rank(self) -> int:
        return self.axis_rank("tp")

    def at(self, **coordinates: int) -> int:
        """World rank of the place that differs from this one in the given coordinates, e.g.
        at(pp=0).
        """
        world_rank = 0
        for axis in self.order:
            coordinate = coordinates.get(axis, self.axis_rank(axis))
            world_rank = world_rank * self.axis_size(axis) + coordinate
        return world_rank

    def places(self, axes) -> list[dict[str, int]]:
        """Every {axis: coordinate} on the given axes, the first axis outermost."""
        ranges = [range(self.axis_size(axis)) for axis in axes]
        return [dict(zip(axes, place, strict=True)) for place in product(*ranges)]

    def group(self, *axes: str) -> tuple[int, ...]:
        """World ranks of the places that differ from this one in `axes` alone, in the order of
        `places`.
        """
        return tuple(self.at(**place) for place in self.places(axes))

    def partition(self, axis: str, groups) -> list[tuple[int, ...]]:
        """World ranks of groups of coordinates along `axis`.

        Each group appears once for every place on the other axes.
        """
        others = self.places([other for other in AXES if other != axis])
        return [tuple(self.at(**place, **{axis: i}) for i in sorted(group))
                for group in groups for place in others]

    def describe(self) -> str:
        """The place on the axes that have several ranks, as in `pp1 tp0`."""
        return " ".join(f"{axis}{self.axis_rank(axis)}" for axis in AXES
                        if self.axis_size(axis) > 1) or "one rank"
