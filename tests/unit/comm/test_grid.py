"""Groups of the grid: along one axis, over several, and any groups of coordinates along one."""

from itertools import combinations

import pytest

from mpipar.comm.grid import AXES, Grid
from mpipar.comm.groups import Comms
from mpipar.ops import make

SIZES = {"pp": 4, "dp": 2, "cp": 3, "tp": 2}
ORDERS = [AXES, ("tp", "cp", "dp", "pp")]
WORLD_SIZE = 48


def grids(order):
    return [Grid(rank, SIZES, order) for rank in range(WORLD_SIZE)]


def assert_partition(groups):
    assert sorted(rank for group in groups for rank in group) == list(range(WORLD_SIZE))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_group_over_several_axes_has_every_place_that_differs_in_them(order):
    everywhere = grids(order)
    for count in range(len(AXES) + 1):
        for axes in combinations(AXES, count):
            rest = [axis for axis in AXES if axis not in axes]
            for grid in everywhere:
                same = {
                    other.world_rank
                    for other in everywhere
                    if all(other.group_rank(axis) == grid.group_rank(axis) for axis in rest)
                }
                group = grid.group(*axes)
                assert set(group) == same
                places = [
                    tuple(everywhere[rank].group_rank(axis) for axis in axes) for rank in group
                ]
                assert places == sorted(places)
            assert_partition({grid.group(*axes) for grid in everywhere})


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_groups_along_one_axis_are_repeated_at_every_place_of_the_others(order):
    everywhere = grids(order)
    groups = everywhere[0].partition("pp", [(3, 0), (1, 2)])
    assert_partition(groups)
    assert groups == everywhere[17].partition("pp", [(3, 0), (1, 2)])
    assert {tuple(everywhere[rank].group_rank("pp") for rank in group) for group in groups} == {
        (0, 3),
        (1, 2),
    }
    for group in groups:
        rest = {tuple(everywhere[rank].group_rank(axis) for axis in AXES[1:]) for rank in group}
        assert len(rest) == 1


def test_comms_take_any_partition_of_the_world_and_who_is_in_none_is_alone():
    ops = make("shapes", "float32")
    for rank in range(WORLD_SIZE):
        grid = Grid(rank, SIZES)
        comms = Comms(grid, ops, None, partitions={"ends": [(0, 47)]})
        assert comms["data"].ranks == grid.group("dp", "cp")
        assert comms["data"].group_rank == grid.group_rank("dp") * 3 + grid.group_rank("cp")
        assert comms.groups["ends"].ranks == ((0, 47) if rank in (0, 47) else (rank,))
        assert comms.groups["world"].size == WORLD_SIZE
    assert Comms.solo(ops)["tp"].ranks == (0,)
    assert Comms.solo(ops, Grid(5, SIZES))["tp"].ranks == (4, 5)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_group_that_is_divided_has_runs_of_neighbours(order):
    sizes = {"pp": 2, "dp": 2, "tp": 6, "kv": 2}
    everywhere = [Grid(rank, sizes, order) for rank in range(24)]
    for grid in everywhere:
        tp, kv, heads = map(grid.group, ("tp", "kv", "kv_heads"))
        assert grid.world_rank in {*kv} & {*heads}
        first = 2 * (grid.group_rank("tp") // 2)
        assert kv == tp[first : first + 2]
        assert heads == tp[grid.group_rank("tp") % 2 :: 2]
        assert (grid.group_rank("kv_heads"), grid.group_rank("kv")) == divmod(
            grid.group_rank("tp"), 2
        )
        assert grid.rank_at(tp=0, kv_heads=2) == tp[4]
        assert grid.remaining_group("tp", {"kv_heads": 0}) == ("kv",)


def test_what_is_left_of_a_group():
    whole, divided = Grid(0, {"tp": 4}), Grid(0, {"tp": 4, "kv": 2})
    for grid in (whole, divided):
        assert grid.remaining_group("tp", {}) == ("tp",)
        assert grid.remaining_group("tp", {"tp": 1}) == ()
        assert grid.remaining_group("data", {"tp": 1}) == ("data",)
    # Also where that is this rank alone: a gradient has a data group, of whatever size.
    assert whole.remaining_group("tp", {"kv_heads": 0}) == ("kv",)
    assert whole.group("kv") == (0,)
    assert whole.group("kv_heads") == whole.group("tp")


def test_experts_divide_the_ranks_that_read_other_data():
    """Experts are distributed over dp x cp neighbours; those that hold the same ones are apart."""
    grid = Grid(5, {"dp": 4, "cp": 2, "tp": 2, "expert": 4})  # data rank 2 of 8, tp rank 1
    assert grid.group("expert") == (1, 3, 5, 7)
    assert grid.group("expert_data") == (5, 13)
    assert (grid.group_rank("expert"), grid.group_rank("expert_data")) == (2, 0)
    assert grid.remaining_group("data", {"expert": 0, "tp": 1}) == ("expert_data",)
    assert grid.alias_of("expert_data") == "expert_data"
    assert Grid(5, {"dp": 8}).alias_of("expert_data") == "dp"
    assert Grid(5, {"dp": 4, "cp": 2}).alias_of("expert_data") == "data"


def test_data_is_dp_where_rows_are_not_cut():
    ops = make("shapes", "float32")
    assert Comms.solo(ops, Grid(0, {"dp": 2}))["data"].axis == "dp"
    assert Comms.solo(ops, Grid(0, {"dp": 2, "cp": 2}))["data"].axis == "data"
    assert "data" not in Comms.solo(ops, Grid(0, {"dp": 2})).groups
