"""Plans over several kinds of devices: who gets how many blocks, and what an even split loses."""

import itertools
import json
import math

import pytest
from in_process import printed, refusal

from mpipar.plan.block_time import BlockTimes, Times, block_times
from mpipar.plan.cluster import STACKS, load_cluster
from mpipar.plan.footprint import GIB
from mpipar.plan.layout import Layout, blocks_of_stages
from mpipar.plan.mixed import Kind, judged, search_mixed, shares
from mpipar.plan.pipeline_time import Pipelines
from mpipar.plan.search import Question
from mpipar.plan.shape import Shape
from mpipar.plan.step_time import step_time

SHAPE = Shape(24, 2048, 8192, 16, 16, 128, 50304, 2048)
A100, H100 = load_cluster("a100-80"), load_cluster("h100")
QUESTION = Question(SHAPE, A100, STACKS["megatron"], 8, 32, 76.0, {"cp": 1, "zero": 1})
LAYOUT = Layout(dp=2, pp=4, num_microbatches=16, zero=1)
WORDS = ("plan", "gpt2-xl", "--machine", "a100-80:4,h100:4", "--ranks", "8", "--batch-size", "32",
         "--cp", "1", "--zero", "1")


def block_of(seconds, head=0.0):
    return BlockTimes(Times(seconds), Times(), Times(), Times(), head)


@pytest.mark.parametrize("most", [(9, 9, 9), (2, 9, 9), (9, 1, 9), (3, 3, 3)])
def test_shares_are_the_best_of_all(most):
    """Brute force: no other number of blocks on the stages makes the slowest one shorter."""
    seconds, head = (1.0, 0.4, 0.7), 1.1
    blocks = [block_of(one, head) for one in seconds]

    def slowest(counts):
        return max(count * one + (place == 2) * head
                   for place, (count, one) in enumerate(zip(counts, seconds, strict=True)))

    found = shares(9, Layout(pp=3), blocks, list(most))
    every = [counts for counts in itertools.product(*(range(1, one + 1) for one in most))
             if sum(counts) == 9]
    assert found in every
    assert math.isclose(slowest(found), min(map(slowest, every)))
    assert shares(10, Layout(pp=3), blocks, [3, 3, 3]) is None


def test_two_kinds_that_are_alike_are_one_kind():
    kinds = (Kind(A100, 4, 76.0), Kind(A100, 4, 76.0))
    one = judged(QUESTION, LAYOUT, kinds, Pipelines())
    block = block_times(SHAPE, LAYOUT, A100, QUESTION.stack)
    assert sum(one.counts) == sum(blocks_of_stages(24, 4)) == 24
    assert block.head > 0
    alone = step_time(SHAPE, LAYOUT, A100, QUESTION.stack, Pipelines().simulated)
    assert math.isclose(one.even, alone.total, rel_tol=0.01)
    assert one.step.total <= one.even * 1.001


def test_the_faster_kind_gets_more_and_everything_fits():
    kinds = (Kind(A100, 4, 76.0), Kind(H100, 4, 30.0))
    plan = search_mixed(QUESTION, kinds, 3)
    for one in plan.best:
        assert sum(one.counts) == SHAPE.layers
        assert one.step.total <= one.even
        for kind, memory in zip(one.by_rank, one.memory, strict=True):
            assert memory.total <= kind.gib * GIB
        fast = [count for count, kind in zip(one.counts, one.by_rank, strict=True)
                if kind.cluster is H100]
        assert max(fast) == max(one.counts)
    assert plan.best[0].step.total < plan.alike
    assert plan.rejected["kinds need pp of 2 or more, and one stage on a rank"] > 0


def test_the_command_says_what_an_even_split_loses():
    text = printed(*WORDS)
    for words in ("on 4 x a100-80 + 4 x h100", "an even split of the blocks takes", "% longer",
                  "--stage-layers ", "the figures rest on", "h100 alone",
                  "the hosts must come in this order: ranks 0 to 3 on "):
        assert words in text
    found = json.loads(printed(*WORDS, "--json"))
    assert found["layouts"][0]["step_s"] <= found["layouts"][0]["even_split_s"]
    assert sum(found["layouts"][0]["stage_layers"]) == 48


@pytest.mark.parametrize(("machine", "problem"), [
    ("a100-80:4,h100:x", "as a100-80:4,h100:4"), ("a100-80:4", "as a100-80:4,h100:4"),
    ("a100-80:4,a100-80:4", "as a100-80:4,h100:4"), ("a100-80:4,h100:8", "have 12 devices"),
    ("a100-80:4,h10:4", "did you mean h100?")])
def test_kinds_that_cannot_be_are_refused(machine, problem):
    assert problem in str(refusal(*WORDS[:3], machine, *WORDS[4:]))


def test_what_is_for_one_kind_is_refused():
    text = str(refusal(*WORDS, "--sites", "2:400:10", "--memory-limit", "40G"))
    assert "--sites: is for one kind" in text
    assert "--memory-limit: is for one kind" in text
