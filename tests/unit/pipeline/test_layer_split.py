"""Blocks cut into stages: none is lost, and of equal ones no split has a less busy busiest rank."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import LOOPED, counts

from mpipar import models
from mpipar.config.grid import GridConfig
from mpipar.config.model import ModelConfig
from mpipar.config.sections import Config
from mpipar.models import split as splits
from mpipar.models.split import UnitFlops, balanced_layers, stage_flops
from mpipar.pipeline.schedules.catalog import FAMILIES, make_schedule

PLACEMENTS = {"linear": "1f1b", "looped": "interleaved", "v": "zb-v"}
assert PLACEMENTS.keys() == {family.placement for family in FAMILIES.values()}


def loads(schedule, split, units):
    """FLOPs of each pipeline rank."""
    bounds = [0, *itertools.accumulate(split)]
    stages = [sum(units.blocks[a:b]) for a, b in itertools.pairwise(bounds)]
    stages[0] += units.entry
    stages[-1] += units.head
    return [
        sum(stages[stage] for stage in schedule.stages_by_rank[pp_rank])
        for pp_rank in range(schedule.pp_size)
    ]


def every_split(layers, num_stages):
    for cuts in itertools.combinations_with_replacement(range(layers + 1), num_stages - 1):
        bounds = (0, *cuts, layers)
        yield tuple(b - a for a, b in itertools.pairwise(bounds))


def balanced_and_best(schedule, units):
    """The split, and FLOPs of its busiest rank and of the least busy one that any split has."""
    split = balanced_layers(units, schedule.stages_by_rank)
    assert len(split) == schedule.num_stages
    assert sum(split) == len(units.blocks)
    best = min(
        max(loads(schedule, other, units))
        for other in every_split(len(units.blocks), schedule.num_stages)
    )
    return split, max(loads(schedule, split, units)), best


def assert_no_split_is_better(schedule, units):
    split, busiest, best = balanced_and_best(schedule, units)
    assert busiest == best, split


@given(
    counts(max_p=3, max_m=6),
    st.integers(1, 7),
    st.integers(0, 9),
    st.integers(1, 9),
    st.integers(0, 40),
)
@settings(max_examples=150, deadline=None)
def test_no_split_of_any_schedule_is_better(case, layers, entry, block, head):
    name, p, m, chunks = case
    chunks = min(chunks, 2) if name in LOOPED else None
    schedule = make_schedule(name, p, m, chunks)
    assert_no_split_is_better(schedule, UnitFlops(entry, (block,) * layers, head))


BLOCKS = st.lists(st.integers(1, 30), min_size=1, max_size=7) | st.builds(
    lambda one, other, layers: ([one, other] * layers)[:layers],
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 7),
)
UNITS = st.builds(UnitFlops, st.integers(0, 9), BLOCKS.map(tuple), st.integers(0, 40))


@given(counts(max_p=3, max_m=6), UNITS)
@settings(max_examples=200, deadline=None)
def test_a_stage_of_unequal_blocks_keeps_its_share_to_within_a_block(case, units):
    """Its share is what it would have if all blocks cost the same."""
    name, p, m, chunks = case
    schedule = make_schedule(name, p, m, min(chunks, 2) if name in LOOPED else None)
    split = balanced_layers(units, schedule.stages_by_rank)
    assert (len(split), sum(split)) == (schedule.num_stages, len(units.blocks))
    equal = splits.even_split(units, list(map(tuple, schedule.stages_by_rank)))
    mean = sum(units.blocks) / len(units.blocks)
    bounds = [0, *itertools.accumulate(split)]
    for (first, last), count in zip(itertools.pairwise(bounds), equal, strict=True):
        assert abs(sum(units.blocks[first:last]) - mean * count) <= max(units.blocks) + 1e-9


@pytest.mark.parametrize(
    ("name", "blocks", "expected"),
    [
        ("1f1b", (1, 9) * 3, (3, 3)),
        ("1f1b", (9, 9, 1, 1, 1, 1), (1, 5)),
        ("1f1b", (1, 1, 1, 1, 9, 9), (5, 1)),
        ("interleaved", (1, 1, 9, 9, 1, 1, 1, 1), (2, 1, 1, 4)),
    ],
)
def test_a_split_goes_by_the_costs_of_its_blocks(name, blocks, expected):
    schedule = make_schedule(name, 2, 4, 2 if name in LOOPED else None)
    assert balanced_layers(UnitFlops(0, blocks, 0), schedule.stages_by_rank) == expected


def test_a_split_that_ignores_costs_is_caught(monkeypatch):
    plain = balanced_layers

    def ignoring(units, stages_by_rank):
        blocks = (sum(units.blocks) / len(units.blocks),) * len(units.blocks)
        return plain(units._replace(blocks=blocks), stages_by_rank)

    monkeypatch.setitem(globals(), "balanced_layers", ignoring)
    with pytest.raises(AssertionError, match=r"\(3, 3\)"):
        assert_no_split_is_better(make_schedule("1f1b", 2, 4), UnitFlops(0, (9, 9, 1, 1, 1, 1), 0))


def test_a_split_that_is_given_is_taken():
    config = Config(model=ModelConfig(layers=6), grid=GridConfig(pp=2, stage_layers=(6, 0)))
    assert models.layer_split(config, make_schedule("1f1b", 2, 8)) == (6, 0)


def test_flops_of_units():
    """A head costs in proportion to its vocabulary; a block costs its products."""
    one = ModelConfig(layers=1, d_model=8, ffn=24, heads=2, seq_len=6, vocab_size=10)
    more = models.unit_flops(replace(one, vocab_size=30))
    assert more.head == 3 * models.unit_flops(one).head == 2 * 8 * 30
    assert more[:2] == models.unit_flops(one)[:2]
    assert models.unit_flops(one) == (0, (2 * (4 * 8 * 8 + 2 * 8 * 24) + 4 * 6 * 8,), 160)


def test_flops_of_stages():
    assert stage_flops(UnitFlops(3, (1, 2, 4), 5), (2, 0, 1)) == [(6, 0), (0, 0), (4, 5)]
