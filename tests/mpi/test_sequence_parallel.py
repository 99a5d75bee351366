"""--sequence-parallel and --tp-matmul ring equal one rank, and planted bugs are caught."""

from dataclasses import replace

import pytest
from small_model import (
    LAYOUTS,
    MODEL,
    WORLD,
    assert_caught,
    assert_equals_known,
    called,
    cut_model,
    last,
    plant,
    small_config,
    with_sync_sends,
)

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.group import Comm
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.partition.tokens import CutTokens
from mpipar.plan.measure import measure_costs

LAYOUT_TP4 = (1, 1, 4)
HERE = [layout for layout in LAYOUTS[WORLD.size] if layout[2] > 1]
MATMULS = ("plain", "ring")
pytestmark = [pytest.mark.ranks(2, 3, 4, 8), pytest.mark.usefixtures("poisoned_memory")]
both_matmuls = pytest.mark.parametrize("tp_matmul", MATMULS)
all_layouts = pytest.mark.parametrize("layout", last(HERE), ids=str)


@both_matmuls
@pytest.mark.parametrize(
    ("schedule", "num_microbatches"), [("gpipe", 2), ("1f1b", 1), ("1f1b", 5), ("zb-h1", 5)])
@all_layouts
def test_layout_equals_one_rank(layout, schedule, num_microbatches, tp_matmul):
    config = small_config(layout, num_microbatches, model=cut_model(tp_matmul), schedule=schedule)
    assert_equals_known(with_sync_sends(config))


@both_matmuls
@pytest.mark.parametrize("seq_len", [1, 2, 8])
@all_layouts
def test_any_number_of_tokens_equals_one_rank(layout, seq_len, tp_matmul):
    """Cases: fewer tokens than ranks, one each, equally many each; other tests have 7 tokens."""
    config = small_config(layout, model=cut_model(tp_matmul, seq_len=seq_len))
    assert_equals_known(config)


@both_matmuls
@pytest.mark.ranks(4)
@pytest.mark.parametrize("seq_len", [3, 5, 8])
def test_four_ranks_a_pair_equal_one_rank(seq_len, tp_matmul):
    model = cut_model(tp_matmul, seq_len=seq_len, heads=4, d_model=12, ffn=32, layers=2)
    assert_equals_known(small_config(LAYOUT_TP4, model=model))


@pytest.mark.parametrize(("tp_matmul", "norm"), [("plain", "rms"), ("ring", "layer")])
@all_layouts
def test_untied_head_equals_one_rank(layout, tp_matmul, norm):
    config = small_config(layout, model=cut_model(tp_matmul, tied=False, norm=norm))
    assert_equals_known(config)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "dualpipe"])
def test_stages_in_pieces_and_in_copies_equal_one_rank(schedule):
    """A rank has several stages; gradients are summed over tp and over the copies of a stage."""
    config = small_config((1, 2, 2), 4, rows_per_mb=1, model=cut_model("ring"), schedule=schedule)
    assert_equals_known(config)


# --- planted bugs


def not_reduced(plain, self, x, name, op="sum"):
    return x if name == "grads.tp" else plain(self, x, name, op)


def reduced_twice(plain, self, x, name, op="sum"):
    return plain(self, plain(self, x, name, op) if name == "grads.tp" else x, name, op)


def positions_of_the_first_rank(_plain, self, positions):
    return positions[:self.length(len(positions))]


def padding_that_is_not_zero(plain, self, shape, dtype=None, label="stash"):
    """Padding after the last token must not reach a gradient."""
    x = plain(self, shape, dtype, label)
    if label == "buffers" and x.dtype.kind == "f":
        x.fill(1.0)
    return x


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("owner", "name", "twin", "options"), [
    (Comm, "all_reduce", not_reduced, {"norm": "layer"}),
    (Comm, "all_reduce", not_reduced, {"norm": "rms"}),
    (Comm, "all_reduce", reduced_twice, {}),
    (CutTokens, "positions", positions_of_the_first_rank, {}),
    *((NumpyOps, "zeros", padding_that_is_not_zero, {"tp_matmul": one}) for one in MATMULS)],
    ids=called)
def test_a_planted_bug_is_seen(monkeypatch, owner, name, twin, options):
    plant(monkeypatch, owner, name, twin)
    assert_caught(small_config(HERE[0], model=cut_model(**options)))


# --- the other commands

@both_matmuls
@pytest.mark.ranks(4)
def test_costs_are_measured_on_what_a_rank_holds(tp_matmul):
    """--schedule auto needs them: every unit has its times, and keeps less than with all tokens."""
    costs = []
    for model in (MODEL, cut_model(tp_matmul)):
        config = small_config((1, 2, 2), model=replace(model, d_model=24, seq_len=31))
        grid = Grid.of(config.grid, WORLD.rank)
        costs.append(measure_costs(config, grid, ops_module.make("cpu", "float64"), WORLD))
    if WORLD.rank == 0:
        whole, cut = costs
        assert len(cut.f) == len(cut.i) == len(cut.w) == MODEL.layers + 2
        assert min(cut.f + cut.i + cut.w) > 0
        for block in range(1, MODEL.layers + 1):
            assert cut.stash_bytes[block] < whole.stash_bytes[block]
