"""Configuration: legal values, chosen values, and the messages about all others."""

import dataclasses
import math

import pytest
from config_helpers import changed, reading_of
from hypothesis import given
from hypothesis import strategies as st

from mpipar.config.layout import fitting, matching
from mpipar.config.presets import PRESETS
from mpipar.config.resolve import config_problems, resolve
from mpipar.config.sections import (
    CHOICES,
    FIELDS,
    SECTIONS,
    Config,
)
from mpipar.errors import DataError, EnvironmentProblem, UsageError


def usage_problems(config, world_size):
    with pytest.raises(UsageError) as caught:
        resolve(config, world_size)
    return caught.value.problems


# --- the fields themselves


def test_a_name_means_the_same_in_every_section():
    """Keys form one flat space: sections share no name."""
    assert sum(len(dataclasses.fields(part)) for part in SECTIONS.values()) == len(FIELDS)
    for choice, *values in CHOICES.values():
        legal = FIELDS[choice].metadata["choices"]
        assert set(values) < set(legal) if values else FIELDS[choice].default is None


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
def test_every_preset_resolves_for_every_number_of_ranks(preset, world_size):
    config, _ = resolve(reading_of("--preset", preset).config, world_size)
    grid = config.grid
    assert grid.dp * grid.pp * grid.cp * grid.tp == world_size
    assert config.train.batch_size % (grid.dp * grid.num_microbatches) == 0
    assert config.model.ffn == (PRESETS[preset].get("ffn") or 4 * config.model.width)
    assert resolve(config, world_size) == (config, [])


# --- the layout


@pytest.mark.parametrize(
    ("values", "world_size", "layout"),
    [
        *(
            ({}, dp * pp * tp, (dp, pp, tp))
            for dp, pp, tp in (
                (1, 1, 1),
                (1, 2, 1),
                (3, 1, 1),
                (1, 2, 2),
                (5, 1, 1),
                (3, 2, 1),
                (7, 1, 1),
                (2, 2, 2),
                (3, 2, 2),
                (4, 2, 2),
            )
        ),
        ({"dp": 4}, 4, (4, 1, 1)),
        ({"pp": 4}, 4, (1, 4, 1)),
        ({"tp": 4}, 4, (1, 1, 4)),
        ({"tp": 1}, 4, (2, 2, 1)),
        ({"pp": 1}, 4, (2, 1, 2)),
        ({"dp": 1}, 6, (1, 3, 2)),
        ({"pp": 2, "tp": 2}, 8, (2, 2, 2)),
        ({"tp": 2}, 8, (2, 2, 2)),
        ({"heads": 3, "d_model": 96}, 4, (2, 2, 1)),  # what cannot be cut is not
        ({"heads": 3, "d_model": 96, "layers": 1}, 4, (4, 1, 1)),
    ],
)
def test_layout_for_a_number_of_ranks(values, world_size, layout):
    """Axes that are given stay."""
    grid = resolve(changed(**values), world_size)[0].grid
    assert (grid.dp, grid.pp, grid.tp) == layout


@given(
    st.integers(1, 24),
    st.integers(1, 6),
    st.integers(0, 8),
    st.tuples(*[st.none() | st.integers(1, 6)] * 3),
)
def test_layouts_match_all_that_is_given(world_size, layers, heads, axes):
    found = matching(axes, world_size, layers, heads)
    for layout in found:
        assert math.prod(layout) == world_size
        assert heads % layout[2] == 0
        assert layout[1] <= layers
    assert sorted(found) == sorted(
        one
        for one in fitting(world_size, layers, heads)
        if all(axis in (None, size) for axis, size in zip(axes, one, strict=True))
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"seq_len": 63}, "--seq-len 63"),
        ({"cp_attention": "ulysses", "heads": 1}, "--kv-heads 1"),
    ],
)
def test_what_cp_cannot_cut_is_said_beside_ranks_that_do_not_fit(values, words):
    found = usage_problems(changed(cp=2, **values), 1)
    assert len(found) == 2
    assert "mpiexec -n 2" in found[0]
    assert words in found[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", math.nan), ("lr", -1.0), ("lr", 0.0), ("lr", math.inf), ("eps", 0.0),
        ("eps", 1e-46),  # 0 in float32
        ("beta1", 1.0), ("beta2", -0.1), ("clip", -1.0), ("weight_decay", math.nan),
        ("layers", 0), ("heads", -1), ("steps", -1), ("seed", -1), ("seed", 2**63),
        ("num_microbatches", 0), ("stage_layers", (3, 0)), ("batch_size", 0), ("vocab_size", 1),
        ("device", "gpu"), ("dtype", "float8"), ("optimizer", "adam"), ("ffn_cut", "row"),
        ("lr_schedule", "cosin"), ("all_reduce", "MPI"),
        ("d_model", 10**18), ("out", "\udcff"), ("log_interval", 0),
        ("preset", "tny"), ("loss_scale", 0.0), ("loss_scale", math.inf),
        ("loss_scale", 2.0**127), ("memory_limit", 0), ("memory_limit", 2**63),
    ],
)  # fmt: skip
def test_value_out_of_range_is_refused(name, value):
    choice = {"dtype": "float16"} if name.startswith("loss_scale") else {}
    found = config_problems(changed(**choice | {name: value}))
    assert len(found) == 1, found
    assert found[0].startswith("--" + name.replace("_", "-")), found


def test_a_relation_is_not_judged_by_a_value_that_is_none():
    found = config_problems(changed(ffn_cut="both", sequence_parallel=True))
    assert [text.split(":")[0] for text in found] == ["--ffn-cut 'both'"]


def test_odd_sizes_and_the_memory_of_a_large_gpu_are_fine():
    odd = changed(
        seq_len=63,
        d_model=33,
        heads=3,
        vocab_size=257,
        ffn=7,
        layers=3,
        tp=3,
        memory_limit=139 * 2**30,
    )
    assert resolve(odd, 3)[0].model.ffn == 7


def test_preset_batch_is_rounded_up_and_said():
    config, notes = resolve(Config(), 3)
    assert config.train.batch_size == 24
    assert notes == [
        "batch size 16 of preset tiny rounded up to 24, a multiple of dp 3 * 4 microbatches"
    ]
    assert resolve(Config(), 4)[1] == []


def test_checks_of_other_floors_are_collected_and_usage_decides_the_code():
    checks = [(lambda _: ["no GPU"], EnvironmentProblem), (lambda _: ["no data"], DataError)]
    with pytest.raises(DataError) as caught:
        resolve(Config(), 1, checks)
    assert caught.value.problems == ["no data", "no GPU"]
    with pytest.raises(UsageError) as caught:
        resolve(changed(lr=-1.0), 1, checks)
    assert caught.value.problems[1:] == ["no data", "no GPU"]
    assert caught.value.exit_code == 2
