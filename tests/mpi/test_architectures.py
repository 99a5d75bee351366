"""Grouped heads, rotary positions and SwiGLU: every layout equals one rank."""

import pytest
from small_model import (
    LAYOUTS,
    WORLD,
    assert_equals_one_rank,
    computed_once,
    poison_unwritten,
    small_config,
)

from mpipar.config.model import model_config

# 8 heads of width 6, which is not D / H; ffn 31 and 29 tokens in the vocabulary are padded.
SHAPE = {"layers": 4, "d_model": 20, "heads": 8, "head_dim": 6, "ffn": 31, "seq_len": 16,
         "vocab_size": 29}
ARCHS = {"llama": {"kv_heads": 4}, "mistral": {"kv_heads": 8}, "qwen2": {"kv_heads": 2},
         "shared": {"kv_heads": 1, "arch": "qwen2", "tied": True},
         "mixed": {"arch": "gpt2", "positions": "rope", "norm": "rms", "bias": "none"}}
SCALED = {"rope_theta": 50.0, "rope_scaling": (4.0, 1.0, 3.0, 12.0)}
HERE = LAYOUTS[WORLD.size]
WIDE = {1: (1, 1, 1), 2: (1, 1, 2), 3: (1, 1, 1), 4: (1, 1, 4), 8: (1, 2, 4)}


def model_of(name, **values):
    return model_config({"arch": name} | SHAPE | SCALED | ARCHS[name] | values)


def assert_equal(layout, name, num_microbatches=2, expected=computed_once, grid=(), **values):
    model = model_of(name, **values)
    assert_equals_one_rank(
        small_config(layout, num_microbatches, model=model, **dict(grid)), expected=expected)


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Every newly allocated array, receive buffers included, is full of NaN."""
    poison_unwritten(monkeypatch)


@pytest.mark.ranks(1, 2, 4, 8)
@pytest.mark.usefixtures("poisoned_memory")
class TestEqual:
    @pytest.mark.parametrize("name", ARCHS)
    @pytest.mark.parametrize("layout", HERE, ids=str)
    def test_layout_equals_one_rank(self, layout, name):
        assert_equal(layout, name)

    @pytest.mark.parametrize("name", ["llama", "qwen2", "shared"])
    def test_more_ranks_than_heads_of_keys_equal_one_rank(self, name):
        assert_equal(WIDE[WORLD.size], name)

    @pytest.mark.parametrize("tp_matmul", ["plain", "ring"])
    @pytest.mark.parametrize("name", ["llama", "shared"])
    def test_sequence_parallel_equals_one_rank(self, name, tp_matmul):
        assert_equal(WIDE[WORLD.size], name, sequence_parallel=True, tp_matmul=tp_matmul,
                     seq_len=13)
