"""The comparison with one rank must fail for every known bug: each is planted here once."""

import pytest
from small_model import assert_equals_one_rank, small_config

from mpipar.learn.twins import DP, PP, TP, TWINS

pytestmark = pytest.mark.ranks(2)
CASES = [(number, layout) for number, twin in TWINS.items() for layout in twin.layouts]


def sizes(layout):
    """(dp, pp, tp)."""
    return tuple(layout.get(axis, 1) for axis in ("dp", "pp", "tp"))


def test_unbroken_passes():
    for layout in (DP, PP, TP):
        assert_equals_one_rank(small_config(sizes(layout)))


@pytest.mark.parametrize(("number", "layout"), CASES)
def test_a_twin_is_caught(number, layout):
    twin = TWINS[number]
    with twin.plant(), pytest.raises(AssertionError, match=r"tensors differ"):
        assert_equals_one_rank(small_config(sizes(layout), schedule=twin.schedule))
