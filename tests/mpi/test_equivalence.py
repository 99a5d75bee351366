"""Every layout equals one rank to 1e-12 after a plain SGD step.

Loss, norm, every gradient and every weight are compared.
"""

import itertools
from dataclasses import replace

import pytest
from small_model import (
    EMPTY_STAGES,
    LAYOUTS,
    MODEL,
    WORLD,
    assert_equals_known,
    slow_unless,
    small_config,
    with_sync_sends,
)

HERE = LAYOUTS[WORLD.size]
pytestmark = pytest.mark.usefixtures("poisoned_memory")
SIMPLE = {"naive": 1, "gpipe": 2, "1f1b": 5}  # each with its number of microbatches by default


@pytest.mark.parametrize(("layout", "schedule", "num_microbatches"), slow_unless(
    lambda _, schedule, num_microbatches: SIMPLE[schedule] == num_microbatches,
    itertools.product(HERE, SIMPLE, SIMPLE.values())), ids=str)
def test_layout_equals_one_rank(layout, schedule, num_microbatches):
    assert_equals_known(small_config(layout, num_microbatches, schedule=schedule))


@pytest.mark.parametrize("change", [{"tied": False}, {"norm": "rms"}], ids=str)
@pytest.mark.parametrize("layout", HERE, ids=str)
def test_another_model_equals_one_rank(layout, change):
    assert_equals_known(small_config(layout, model=replace(MODEL, **change)))


@pytest.mark.parametrize("layout", HERE, ids=str)
@pytest.mark.parametrize("ffn_cut", ["gather", "reduce"])
def test_ffn_of_two_products_that_stand_alone_equals_one_rank(layout, ffn_cut):
    assert_equals_known(small_config(layout, model=replace(MODEL, ffn_cut=ffn_cut)))


@pytest.mark.parametrize("layout", HERE, ids=str)
def test_synchronous_sends_equal_one_rank(layout):
    assert_equals_known(with_sync_sends(small_config(layout, 5)))


@pytest.mark.parametrize("layout", HERE, ids=str)
def test_other_rank_order_equals_one_rank(layout):
    assert_equals_known(small_config(layout, rank_order="tp,cp,dp,pp"))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("last", [0, 1, 2])
def test_uneven_stages_equal_one_rank(last):
    split = {2: (5 - last, last), 4: (2, 3 - last, 0, last)}[WORLD.size]
    assert_equals_known(small_config((1, WORLD.size, 1), stage_layers=split))


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.parametrize(("schedule", "split"), EMPTY_STAGES, ids=str)
@pytest.mark.parametrize("layout", [one for one in HERE if one[1] == 2], ids=str)
def test_stages_without_blocks_equal_one_rank(layout, schedule, split):
    """An empty stage passes on the array that it received."""
    config = small_config(layout, 4, schedule=schedule, stage_layers=split)
    assert_equals_known(with_sync_sends(config))
