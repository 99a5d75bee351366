"""Groups of the grid: along one axis, over several, and any groups of coordinates along one."""

from itertools import combinations

import pytest

from mpipar.comm.grid import AXES, Grid
from mpipar.comm.group import Comms
from mpipar.ops import make

SIZES = {"pp_size": 4, "dp_size": 2, "cp_size": 3, "tp_size": 2}
ORDERS = [AXES, ("tp", "cp", "dp", "pp")]
WORLD_SIZE = 48


def grids(order):
    return [Grid(rank, **SIZES, order=order) for rank in range(WORLD_SIZE)]


def assert_partition(groups):
    assert sorted(rank for group in groups for rank in group) == list(range(WORLD_SIZE))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_group_over_several_axes_has_every_place_that_differs_in_them(order):
    everywhere = grids(order)
    for count in range(len(AXES) + 1):
        for axes in combinations(AXES, count):
            rest = [axis for axis in AXES if axis not in axes]
            for grid in everywhere:
                same = {other.world_rank for other in everywhere
                        if all(other.axis_rank(axis) == grid.axis_rank(axis) for axis in rest)}
                group = grid.group(*axes)
                assert set(group) == same
                places = [tuple(everywhere[rank].axis_rank(axis) for axis in axes)
                          for rank in group]
                assert places == sorted(places)
            assert_partition({grid.group(*axes) for grid in everywhere})


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_groups_along_one_axis_are_repeated_at_every_place_of_the_others(order):
    everywhere = grids(order)
    groups = everywhere[0].partition("pp", [(3, 0), (1, 2)])
    assert_partition(groups)
    assert groups == everywhere[17].partition("pp", [(3, 0), (1, 2)])
    assert {tuple(everywhere[rank].pp_rank for rank in group) for group in groups} == {
        (0, 3), (1, 2)}
    for group in groups:
        rest = {tuple(everywhere[rank].axis_rank(axis) for axis in AXES[1:]) for rank in group}
        assert len(rest) == 1


def test_comms_take_any_partition_of_the_world_and_who_is_in_none_is_alone():
    ops = make("shapes", "float32")
    for rank in range(WORLD_SIZE):
        grid = Grid(rank, **SIZES)
        data = sorted({other.group("dp", "cp") for other in grids(AXES)})
        comms = Comms(grid, ops, None, partitions={"data": data, "ends": [(0, 47)]})
        assert comms.by_axis["data"].ranks == grid.group("dp", "cp")
        assert comms.by_axis["data"].index == grid.dp_rank * 3 + grid.cp_rank
        assert comms.groups["ends"].ranks == ((0, 47) if rank in (0, 47) else (rank,))
        assert comms.groups["world"].size == WORLD_SIZE
    assert Comms.solo(ops).tp.ranks == (0,)
    assert Comms.solo(ops, Grid(5, **SIZES)).tp.ranks == (4, 5)
