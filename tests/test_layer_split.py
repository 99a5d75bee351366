"""Blocks cut into stages: none is lost, and no split has a less busy busiest rank."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import LOOPED, counts

from mpipar import models
from mpipar.config.grid import GridConfig
from mpipar.config.model import ConvnetConfig, DecoderConfig
from mpipar.config.sections import Config
from mpipar.models.stage import UnitFlops, balanced_layers, stage_parts
from mpipar.pipeline.schedules.catalog import FAMILIES, make_schedule

PLACEMENTS = {"linear": "1f1b", "looped": "interleaved", "v": "zb-v", "mirror": "dualpipe"}
assert PLACEMENTS.keys() == {family.placement for family in FAMILIES.values()}


def loads(schedule, split, units):
    """FLOPs of each pipeline rank."""
    stages = [count * units.block for count in split]
    stages[0] += units.entry
    stages[-1] += units.head
    return [sum(stages[stage] for stage in schedule.stages_of(pp_rank))
            for pp_rank in range(schedule.pp_size)]


def every_split(layers, num_stages):
    for cuts in itertools.combinations_with_replacement(range(layers + 1), num_stages - 1):
        bounds = (0, *cuts, layers)
        yield tuple(b - a for a, b in itertools.pairwise(bounds))


def assert_no_split_is_better(schedule, layers, units):
    split = balanced_layers(layers, units, schedule.stages_by_rank)
    assert len(split) == schedule.num_stages
    assert sum(split) == layers
    best = min(max(loads(schedule, other, units))
               for other in every_split(layers, schedule.num_stages))
    assert max(loads(schedule, split, units)) == best, split


@pytest.mark.parametrize("name", PLACEMENTS.values())
@pytest.mark.parametrize("layers", [1, 2, 4, 6, 7])
@pytest.mark.parametrize("head", [0, 1, 8, 25, 90])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 4])
def test_no_split_has_a_less_busy_busiest_rank(name, layers, head, pp_size):
    if name != "dualpipe" or pp_size % 2 == 0:
        schedule = make_schedule(name, pp_size, 2 * pp_size)
        for entry in (0, 3, 15):
            assert_no_split_is_better(schedule, layers, UnitFlops(entry, 10, head))


@given(counts(max_p=3, max_m=6), st.integers(1, 7), st.integers(0, 9), st.integers(1, 9),
       st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_no_split_of_any_schedule_is_better(case, layers, entry, block, head):
    name, p, m, chunks = case
    chunks = min(chunks, 2) if name in LOOPED else None
    schedule = make_schedule(name, p, m, chunks)
    assert_no_split_is_better(schedule, layers, UnitFlops(entry, block, head))


@pytest.mark.parametrize(("name", "pp_size", "layers", "expected"), [
    ("1f1b", 4, 8, (2, 2, 2, 2)),
    ("1f1b", 4, 6, (1, 2, 2, 1)),
    ("zb-v", 2, 6, (2, 2, 1, 1)),
    ("zb-v", 4, 8, (1,) * 8),
    ("interleaved", 2, 6, (2, 2, 1, 1)),
    ("dualpipe", 2, 6, (3, 3)),
    ("dualpipe", 4, 7, (2, 2, 2, 1)),
    ("zb-v", 3, 2, (0, 1, 1, 0, 0, 0)),
])
def test_default_splits_of_the_small_decoder(name, pp_size, layers, expected):
    """6 blocks of zb-v on two ranks: each has three.

    Stages of equal cost would give one rank four. A head that costs a part of a block lies on the
    last stage.
    """
    model = DecoderConfig(layers=layers, d_model=128, seq_len=64, vocab_size=256)
    config = Config(model=model, grid=GridConfig(pp=pp_size))
    assert models.layer_split(config, make_schedule(name, pp_size, 8)) == expected


def test_a_split_that_is_given_is_taken():
    config = Config(model=DecoderConfig(layers=6), grid=GridConfig(pp=2, stage_layers=(6, 0)))
    assert models.layer_split(config, make_schedule("1f1b", 2, 8)) == (6, 0)


@pytest.mark.parametrize(("one", "wider"), [
    (DecoderConfig(layers=1, d_model=8, ffn=24, heads=2, seq_len=6, vocab_size=10),
     {"vocab_size": 30}),
    (ConvnetConfig(layers=1, channels=8, ffn=24, classes=10), {"classes": 30}),
], ids=["decoder", "convnet"])
def test_flops_of_units(one, wider):
    """A head costs in proportion to its classes; a decoder's block costs its products."""
    model = models.model_of(one)
    more = model.unit_flops(replace(one, **wider))
    assert more.head == 3 * model.unit_flops(one).head == 2 * 8 * 30
    assert more[:2] == model.unit_flops(one)[:2]
    if one.model == "decoder":
        assert model.unit_flops(one) == (0, 2 * (4 * 8 * 8 + 2 * 8 * 24) + 4 * 6 * 8, 160)


def test_every_block_is_in_exactly_one_stage():
    split = (2, 0, 3)
    stages = [stage_parts(stage, split) for stage in range(3)]
    assert [block for blocks, _, _ in stages for block in blocks] == [0, 1, 2, 3, 4]
    assert [(first, last) for _, first, last in stages] == [
        (True, False), (False, False), (False, True)]
