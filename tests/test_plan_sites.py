"""Sites joined by a slow link: what crosses it, by hand."""

import math

import pytest
from in_process import printed, refusal

from mpipar.plan.cluster import STACKS, load_cluster
from mpipar.plan.layout import Layout
from mpipar.plan.search import Kind, Question, placed
from mpipar.plan.shape import Shape
from mpipar.plan.sites import Sites, boundaries, crossings, needed_gbits
from mpipar.plan.step_time import step_time

SHAPE = Shape(32, 4096, 16384, 32, 32, 128, 50304, 2048)
LAYOUT = Layout(dp=4, pp=4, tp=2, num_microbatches=16)
KINDS = (Kind(load_cluster("a100-80"), 32, 80.0),)
QUESTION = Question(SHAPE, KINDS, STACKS["megatron"].unfused(), 64, {})
ONE = next(placed(QUESTION, LAYOUT, KINDS))._replace(
    step=step_time(SHAPE, LAYOUT, KINDS[0].cluster, QUESTION.stack)
)


def across(axis, *sites):
    """The Crossing of an axis between sites: their number, Gbit/s, milliseconds."""
    return {one.axis: one for one in crossings(QUESTION, ONE, Sites(*sites))}[axis]


def test_bytes_by_hand():
    dp = across("dp", 2, 400.0, 10.0)
    assert dp.sent == SHAPE.parameters * 2  # 2 bytes, half of it twice
    assert math.isclose(dp.seconds, dp.sent / 50e9 + 0.02)
    assert across("pp", 2, 400.0, 10.0).sent == 16 * 4 * 2048 * 4096 * 2


def test_an_axis_crosses_only_if_its_ranks_divide():
    odd = ONE._replace(layout=LAYOUT._replace(dp=3, pp=4))
    assert [one.axis for one in crossings(QUESTION, odd, Sites(2, 400.0, 0.0))] == ["pp"]
    assert crossings(QUESTION, odd, Sites(5, 400.0, 0.0)) == []


def test_stages_cross_wherever_the_next_one_is_in_another_site():
    """Chunks go round: from the last rank to the first one, too. A fold turns at the last rank."""
    linear = LAYOUT._replace(pp=4)
    assert boundaries(linear, 2) == (1, 1)
    assert boundaries(linear, 4) == (3, 2)  # a site in the middle sends both ways
    assert boundaries(linear._replace(schedule="interleaved", chunks=3), 2) == (5, 5)
    assert boundaries(linear._replace(schedule="zb-v", chunks=2), 2) == (2, 2)
    looped = ONE._replace(layout=linear._replace(schedule="interleaved", chunks=3))
    found = {one.axis: one for one in crossings(QUESTION, looped, Sites(2, 400.0, 0.0))}
    assert found["pp"].sent == 5 * across("pp", 2, 400.0, 0.0).sent


def test_what_more_than_gradients_would_cross_is_not_offered():
    ring = ONE._replace(layout=LAYOUT._replace(dp=1, cp=2, pp=1))
    assert crossings(QUESTION, ring, Sites(2, 400.0, 0.0)) == []
    experts = ONE._replace(layout=LAYOUT._replace(dp=4, pp=1, ep=4))
    assert crossings(QUESTION, experts, Sites(2, 400.0, 0.0)) == []


def test_sharded_weights_travel_for_each_microbatch():
    sharded = ONE._replace(layout=LAYOUT._replace(zero=3))
    found = {one.axis: one for one in crossings(QUESTION, sharded, Sites(2, 400.0, 0.0))}["dp"]
    assert found.sent == 16 * 3 * SHAPE.parameters  # half of 2 bytes, three times a microbatch
    assert found.exposed > 3 * ONE.step.total


@pytest.mark.parametrize("axis", ["dp", "pp"])
def test_a_faster_link_costs_less_and_more_sites_carry_more(axis):
    exposed = [across(axis, 2, gbits, 0.0).exposed for gbits in (1.0, 10.0, 100.0, 1e6)]
    assert exposed == sorted(exposed, reverse=True)
    assert exposed[-1] < 1e-3  # a fast one costs nothing but its latency
    assert across(axis, 4, 100.0, 1.0).exposed > across(axis, 2, 100.0, 1.0).exposed
    gbits = needed_gbits(QUESTION, ONE, Sites(2, 1.0, 0.0), axis)
    assert math.isclose(across(axis, 2, gbits, 0.0).exposed, 0.05 * ONE.step.total, rel_tol=0.01)
    assert needed_gbits(QUESTION, ONE, Sites(2, 1.0, 1e5), axis) == math.inf


def test_the_command_says_which_axis_crosses():
    words = (
        "plan",
        "gpt2-medium",
        "--machine",
        "a100-80",
        "--ranks",
        "16",
        "--batch-size",
        "64",
        "--pp",
        "2",
        "--tp",
        "2",
        "--rows",
        "2",
        "--schedule",
        "1f1b",
        "--cp",
        "1",
    )
    text = printed(*words, "--sites", "2:10:5")
    assert "2 sites with 10 Gbit/s and 5 ms between them" in text
    for wrong in ("2:x:1", "1:10:5", "2:0:5", "2:10"):
        assert f"--sites {wrong}" in str(refusal(*words, "--sites", wrong))
