"""Devices of several kinds, and stages of unequal length: which get how many blocks, and why.

Wholes have no published row beside them. So random clusters show that an answer is never shorter
than its own bounds, and that a change moves it in the right direction.
"""

import itertools
import json
import math
import random
from dataclasses import replace

import pytest
from in_process import printed, refusal

from mpipar.plan.block_time import BlockTimes, Times, block_times
from mpipar.plan.cluster import MACHINES, STACKS, load_cluster
from mpipar.plan.footprint import GIB, most_blocks, rank_footprints
from mpipar.plan.layout import Layout, blocks_of_stages
from mpipar.plan.pipeline_time import balanced, bound, timeline
from mpipar.plan.report import alone_seconds, candidate_words
from mpipar.plan.search import Kind, Question, in_order, placed, search, shortest, simulated
from mpipar.plan.shape import Shape
from mpipar.plan.splits import shares
from mpipar.plan.step_time import message_bytes, step_time

SHAPE = Shape(24, 2048, 8192, 16, 16, 128, 50304, 2048)
SMALL = Shape(8, 1024, 4096, 16, 16, 64, 50304, 1024)
A100, H100 = load_cluster("a100-80"), load_cluster("h100")
STACK = STACKS["megatron"]
LAYOUT = Layout(dp=2, pp=4, num_microbatches=16, zero=1)
WORDS = (
    "plan",
    "gpt2-xl",
    "--machine",
    "a100-80:4,h100:4",
    "--ranks",
    "8",
    "--batch-size",
    "32",
    "--cp",
    "1",
    "--zero",
    "1",
)


def question_of(*kinds, shape=SHAPE, batch_size=32, **fixed):
    return Question(shape, kinds, STACK, batch_size, {"cp": 1, "zero": 1} | fixed)


def block_of(seconds, head=0.0):
    return BlockTimes(Times(seconds), Times(), Times(), Times(), Times(head))


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("most", [(9, 9, 9), (2, 9, 9), (9, 1, 9), (3, 3, 3)])
@pytest.mark.parametrize(("m", "longer"), [(3, 1.12), (12, 1.0), (64, 1.0)])
def test_shares_are_the_best_of_all(most, waits, m, longer):
    """Brute force: no other number of blocks on the stages makes the passes shorter.

    With few microbatches it may be better to give a slow first rank less than it can do.
    """
    layout, head = Layout(pp=3, num_microbatches=m), 1.1
    blocks = [block_of(one, head) for one in (1.0, 0.4, 0.7)]

    def seconds(counts):
        busy = [count * block.total for count, block in zip(counts, blocks, strict=True)]
        before = [waits * one for one in (0.0, busy[0], busy[0] + busy[1])]
        return max(
            m * (one + (place == 2) * head) + before[place] for place, one in enumerate(busy)
        )

    found = shares(9, layout, blocks, list(most), waits)
    every = [
        counts
        for counts in itertools.product(*(range(1, one + 1) for one in most))
        if sum(counts) == 9
    ]
    assert found in every
    assert seconds(found) <= longer * min(map(seconds, every)) * (1 + 1e-12)


def test_no_split_takes_less_than_balanced_passes():
    rng = random.Random(3)
    for _ in range(50):
        layout = Layout(
            pp=rng.choice((2, 3)),
            num_microbatches=rng.choice((3, 12)),
            schedule=rng.choice(("1f1b", "zb-h1")),
        )
        kinds = [block_of(rng.uniform(0.2, 1.0), rng.uniform(0.0, 2.0)) for _ in range(layout.pp)]
        least = balanced(7, layout, kinds)
        every = [
            counts for counts in itertools.product(range(8), repeat=layout.pp) if sum(counts) == 7
        ]
        assert least <= min(bound(layout, kinds, counts) for counts in every) * (1 + 1e-12)


@pytest.mark.parametrize("room", [20.0, 12.0, 9.0, 3.0])
def test_the_shortest_step_is_the_first_answer_of_a_search(room):
    question = question_of(Kind(A100, 8, room))
    best = search(question, 1).best
    assert shortest(question) == (pytest.approx(best[0].step.total) if best else None)


@pytest.mark.parametrize(
    "changes", [{}, {"recompute": "block"}, {"zero": 3}, {"schedule": "zb-h1"}]
)
def test_the_most_blocks_are_those_that_fit(changes):
    layout = LAYOUT._replace(**changes)
    gib = [9.0, 7.0, 6.5, 12.0]
    most = most_blocks(SHAPE, layout, STACK, gib)
    assert min(most) >= 1
    for more, fits in ((0, True), (1, False)):
        counts = tuple(one + more for one in most)
        memory = rank_footprints(SHAPE, layout, STACK, counts, range(4))
        for one, room in zip(memory, gib, strict=True):
            assert (one.total <= room * GIB) == fits


def test_equal_devices_get_unequal_stages_where_the_head_is_heavy():
    """Even stages wait for the last one, which has the head of a large vocabulary."""
    shape = replace(SHAPE, vocab=400_000)
    question = question_of(Kind(A100, 8, 76.0), shape=shape, pp=4, dp=2, tp=1, schedule="1f1b")
    best = search(question, 1).best[0]
    assert best.counts[-1] == min(best.counts) < max(best.counts)
    even = step_time(shape, best.layout, A100, STACK, timeline)
    assert best.step.total < 0.95 * even.total


def test_an_uneven_split_fits_where_an_even_one_does_not():
    """The first stage keeps most microbatches."""
    fixed = {"pp": 4, "dp": 2, "tp": 1, "schedule": "1f1b", "recompute": "none", "rows": 1}
    even = rank_footprints(SHAPE, LAYOUT, STACK, blocks_of_stages(24, 4), range(4))
    room = even[0].total / GIB - 0.1
    best = search(question_of(Kind(A100, 8, room), **fixed), 1).best[0]
    assert best.counts[0] < 6
    memory = rank_footprints(SHAPE, best.layout, STACK, best.counts, range(4))
    assert max(one.total for one in memory) <= room * GIB
    less = 0.6 * sum(one.total for one in even) / 4 / GIB  # than any split of the blocks needs
    assert search(question_of(Kind(A100, 8, less), **fixed), 1).best == []


def test_more_memory_never_makes_a_step_longer():
    """With room for any split, an early stage that hides its wait may get less than it could do."""
    fixed = {"pp": 2, "tp": 1, "dp": 4, "schedule": "1f1b"}
    shape = Shape(48, 1600, 6400, 25, 25, 64, 50257, 1024)
    steps = [
        search(question_of(Kind(H100, 8, gib), shape=shape, batch_size=24, **fixed), 1)
        .best[0]
        .step.total
        for gib in (12.0, 19.0, 23.0, 76.0)
    ]
    assert steps == sorted(steps, reverse=True)


def test_each_kind_alone_may_have_any_axes():
    kinds = (Kind(A100, 8, 76.0), Kind(H100, 8, 76.0))
    alone = alone_seconds(question_of(*kinds, dp=8, pp=2, tp=1))
    assert all(alone.values())


def test_kinds_need_names_of_their_own(tmp_path):
    text = (MACHINES / "h100.toml").read_text()
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.toml").write_text(text)
    machines = ",".join(f"{tmp_path / folder / 'x.toml'}:4" for folder in ("one", "two"))
    wrong = refusal("plan", "gpt2", "--machine", machines, "--ranks", "8")
    assert "several kinds are named x; give each file a name of its own" in str(wrong)


def test_two_kinds_that_are_alike_are_one_kind():
    (one,) = (
        found
        for found in placed(question_of(Kind(A100, 8, 76.0)), LAYOUT, (Kind(A100, 8, 76.0),))
        if found.counts == blocks_of_stages(24, 4)
    )
    kinds = (Kind(A100, 4, 76.0), Kind(A100, 4, 76.0))
    two = next(placed(question_of(*kinds), LAYOUT, kinds))
    assert two._replace(kinds=one.kinds) == one


def test_the_faster_kind_gets_more_and_everything_fits():
    kinds = (Kind(A100, 4, 76.0), Kind(H100, 4, 30.0))
    plan = search(question_of(*kinds), 3)
    for one in plan.best:
        assert sum(one.counts) == SHAPE.layers
        even = step_time(SHAPE, one.layout, one.clusters, STACK, timeline)
        assert one.step.total <= even.total
        memory = rank_footprints(SHAPE, one.layout, STACK, one.counts, range(one.layout.pp))
        for kind, held in zip(one.by_rank, memory, strict=True):
            assert held.total <= kind.gib * GIB
        fast = [
            count
            for count, kind in zip(one.counts, one.by_rank, strict=True)
            if kind.cluster is H100
        ]
        assert max(fast) == max(one.counts)
    assert plan.rejected["a stage would have two kinds of devices"] > 0


def random_cluster(rng, name):
    """A machine with rates between those of a small and of a large one."""
    by = rng.uniform(0.3, 2.0)
    return replace(
        A100,
        name=name,
        product_tflops=A100.product_tflops * by,
        ceiling_tflops=A100.ceiling_tflops * by,
        attention_tflops=A100.attention_tflops * by,
        hbm_gbytes_s=A100.hbm_gbytes_s * rng.uniform(0.3, 2.0),
    ).with_links(rng.uniform(0.05, 2.0), rng.uniform(0.02, 2.0))


def random_answer(seed):
    """(question, a candidate with its simulated step) over random kinds and a random layout."""
    rng = random.Random(seed)
    each, tp = rng.choice((2, 4)), rng.choice((1, 2))
    kinds = tuple(Kind(random_cluster(rng, name), each * 2, 76.0) for name in ("one", "two"))
    layout = Layout(
        dp=each // tp,
        pp=4,
        tp=tp,
        rows=rng.choice((1, 2)),
        num_microbatches=rng.choice((4, 9)),
        zero=rng.choice((0, 1, 3)),
        schedule=rng.choice(("1f1b", "zb-h1")),
        recompute=rng.choice(("none", "block")),
    )
    question = question_of(*kinds, shape=SMALL)
    *_, one = placed(question, layout, kinds)
    return question, simulated(question, one)


@pytest.mark.parametrize("seed", range(24))
def test_a_step_is_at_least_its_bounds(seed):
    """No device computes faster than its peak, and no wire carries more than its rate."""
    question, one = random_answer(seed)
    layout, stack = one.layout, question.stack
    flops = SMALL.step_flops(layout.dp * layout.rows * layout.num_microbatches, "causal")
    rate = sum(
        kind.ranks * max(kind.cluster.ceiling_tflops, kind.cluster.attention_tflops)
        for kind in question.kinds
    )
    assert one.step.total > flops / (rate * 1e12)
    busiest = max(
        layout.num_microbatches * count * block_times(SMALL, layout, cluster, stack).total
        for count, cluster in zip(one.counts, one.clusters, strict=True)
    )
    assert one.step.total >= busiest
    fastest = max(max(link.gbytes_s for link in cluster.links) for cluster in one.clusters)
    # There and back through all stages, by links that are as fast as any here.
    assert one.step.hops >= 2 * 3 * message_bytes(SMALL, layout, stack) / (fastest * 1e9)
    assert min(one.step) >= -1e-12


@pytest.mark.parametrize("seed", range(8))
def test_a_faster_device_or_link_never_makes_a_step_longer(seed):
    question, one = random_answer(seed)

    def step(change):
        kinds = tuple(change(place, kind) for place, kind in enumerate(one.kinds))
        *_, found = placed(question._replace(kinds=kinds), one.layout, kinds)
        return simulated(question, found).step.total

    whole = step(lambda _, kind: kind)
    assert math.isclose(whole, one.step.total)
    for place in (0, 1):
        for faster in (
            lambda c: c.with_links(inner=1.5),
            lambda c: c.with_links(outer=1.5),
            lambda c: replace(c, hbm_gbytes_s=1.5 * c.hbm_gbytes_s),
        ):
            changed = step(
                lambda at, kind, faster=faster, place=place: (
                    kind._replace(cluster=faster(kind.cluster)) if at == place else kind
                )
            )
            # Blocks move to the faster kind in whole numbers.
            assert changed <= whole * 1.002, place


def test_the_order_of_two_kinds_does_not_change_the_answer():
    """The search tries both orders; a slow link costs the kind most whose messages cross it."""
    kinds = Kind(A100, 4, 76.0), Kind(H100, 4, 76.0)
    one, two = (
        search(question_of(*order, shape=SMALL), 1).best[0] for order in (kinds, kinds[::-1])
    )
    assert one.step == two.step
    slow = [
        search(
            question_of(
                *(
                    kind._replace(
                        cluster=kind.cluster.with_links(*(0.05, 0.05) if place == at else (1, 1))
                    )
                    for at, kind in enumerate(kinds)
                ),
                shape=SMALL,
            ),
            1,
        )
        .best[0]
        .step.total
        for place in (0, 1)
    ]
    assert min(slow) > one.step.total


def test_layouts_of_equal_steps_share_a_line():
    kinds = (Kind(A100, 8, 76.0),)
    one = next(placed(question_of(*kinds), LAYOUT, kinds))
    lean = one._replace(layout=LAYOUT._replace(dp=4, pp=2), used=one.used / 2)
    slower = one._replace(step=one.step._replace(update=one.step.update + 1.0))
    found = in_order({1: slower, 2: one, 3: lean})
    assert [each.used for each in found] == [lean.used, slower.used]
    assert [each.twins for each in found] == [(LAYOUT,), ()]
    assert candidate_words(found[0]).endswith("equal: dp 2 x pp 4 x tp 1")


def test_the_command_says_what_an_even_split_loses():
    text = printed(*WORDS)
    for words in (
        "on 4 x a100-80 + 4 x h100",
        "an even split of the blocks takes",
        "% longer",
        "--stage-layers ",
        "the machine's figures",
        "h100 alone",
        "; blocks ",
        "the hosts must come in this order: ranks 0 to 3 on ",
    ):
        assert words in text
    found = json.loads(printed(*WORDS, "--json"))
    assert found["layouts"][0]["step_s"] <= found["even_split_s"]
    assert found["layouts"][0]["step_s"] <= min(found["alone_s"].values())
    assert sum(found["layouts"][0]["stage_layers"]) == 48


@pytest.mark.parametrize(
    ("machine", "problem"),
    [
        ("a100-80:4,h100:x", "as a100-80:4,h100:4"),
        ("a100-80:4", "as a100-80:4,h100:4"),
        ("a100-80:4,a100-80:4", "as a100-80:4,h100:4"),
        ("a100-80:4,h100:8", "have 12 devices"),
        ("a100-80:4,h10:4", "did you mean h100?"),
    ],
)
def test_kinds_that_cannot_be_are_refused(machine, problem):
    assert problem in str(refusal(*WORDS[:3], machine, *WORDS[4:]))


def test_what_is_for_one_kind_is_refused():
    assert "--memory-limit: applies to a single" in str(refusal(*WORDS, "--memory-limit", "40G"))
