"""--sequence-parallel and --tp-matmul ring equal one rank, and planted bugs are caught."""

from dataclasses import replace

import pytest
from small_model import (
    LAYOUTS,
    MODEL,
    WORLD,
    assert_equals_one_rank,
    computed_once,
    cut_model,
    last,
    poison_unwritten,
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
pytestmark = pytest.mark.ranks(2, 3, 4, 8)
both_matmuls = pytest.mark.parametrize("tp_matmul", MATMULS)
all_layouts = pytest.mark.parametrize("layout", last(HERE), ids=str)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Every newly allocated array, receive buffers included, is full of NaN."""
    poison_unwritten(monkeypatch)


@both_matmuls
@pytest.mark.parametrize(
    ("schedule", "num_microbatches"), [("gpipe", 2), ("1f1b", 1), ("1f1b", 5), ("zb-h1", 5)])
@all_layouts
def test_layout_equals_one_rank(layout, schedule, num_microbatches, tp_matmul):
    config = small_config(layout, num_microbatches, model=cut_model(tp_matmul), schedule=schedule)
    assert_equals_one_rank(with_sync_sends(config), expected=computed_once)


@both_matmuls
@pytest.mark.parametrize("seq_len", [1, 2, 8])
@all_layouts
def test_any_number_of_tokens_equals_one_rank(layout, seq_len, tp_matmul):
    """Cases: fewer tokens than ranks, one each, equally many each; other tests have 7 tokens."""
    config = small_config(layout, model=cut_model(tp_matmul, seq_len=seq_len))
    assert_equals_one_rank(config, expected=computed_once)


@both_matmuls
@pytest.mark.ranks(4)
@pytest.mark.parametrize("seq_len", [3, 5, 8])
def test_four_ranks_a_pair_equal_one_rank(seq_len, tp_matmul):
    model = cut_model(tp_matmul, seq_len=seq_len, heads=4, d_model=12, ffn=32, layers=2)
    assert_equals_one_rank(small_config(LAYOUT_TP4, model=model), expected=computed_once)


@pytest.mark.parametrize(("tp_matmul", "norm"), [("plain", "rms"), ("ring", "layer")])
@all_layouts
def test_untied_head_equals_one_rank(layout, tp_matmul, norm):
    config = small_config(layout, model=cut_model(tp_matmul, tied=False, norm=norm))
    assert_equals_one_rank(config, expected=computed_once)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "dualpipe"])
def test_stages_in_pieces_and_in_copies_equal_one_rank(schedule):
    """A rank has several stages; gradients are summed over tp and over the copies of a stage."""
    config = small_config((1, 2, 2), 4, rows_per_mb=1, model=cut_model("ring"), schedule=schedule)
    assert_equals_one_rank(config, expected=computed_once)


# --- planted bugs

def assert_caught(**options):
    with pytest.raises(AssertionError, match=r"tensors differ"):
        assert_equals_one_rank(small_config(HERE[0], model=cut_model(**options)))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_replicated_gradient_not_reduced(monkeypatch, norm):
    plain = Comm.all_reduce

    def all_reduce(self, x, name, op="sum"):
        return x if name == "grads.tp" else plain(self, x, name, op)

    monkeypatch.setattr(Comm, "all_reduce", all_reduce)
    assert_caught(norm=norm)


@pytest.mark.ranks(2, 3)
def test_replicated_gradient_reduced_twice(monkeypatch):
    plain = Comm.all_reduce

    def all_reduce(self, x, name, op="sum"):
        return plain(self, plain(self, x, name, op) if name == "grads.tp" else x, name, op)

    monkeypatch.setattr(Comm, "all_reduce", all_reduce)
    assert_caught()


@pytest.mark.ranks(2, 3)
def test_positions_of_the_first_rank_on_every_rank(monkeypatch):
    monkeypatch.setattr(
        CutTokens, "positions", lambda self, positions: positions[:self.length(len(positions))])
    assert_caught()


@both_matmuls
@pytest.mark.ranks(2, 3)
def test_padding_that_is_not_zero(monkeypatch, tp_matmul):
    """Padding behind the last token must not reach a gradient."""
    plain = NumpyOps.zeros

    def zeros(self, shape, dtype=None, label="stash"):
        x = plain(self, shape, dtype, label)
        if label == "buffers" and x.dtype.kind == "f":
            x.fill(1.0)
        return x

    monkeypatch.setattr(NumpyOps, "zeros", zeros)
    assert_caught(tp_matmul=tp_matmul)


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
