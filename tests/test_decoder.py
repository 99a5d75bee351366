"""How blocks are cut into stages: nothing lost, and no split with a faster slowest stage."""

import itertools

import pytest

from mpipar.config.model import ModelConfig
from mpipar.models.decoder import balanced_layers, stage_parts


def slowest(split, config):
    """Cost of the slowest stage in blocks: FLOPs of the head over those of a block."""
    block = 24 * config.d_model**2 + 4 * config.seq_len * config.d_model
    head = 2 * config.d_model * config.vocab_size
    return max([*split[:-1], split[-1] + head / block])


def every_split(layers, num_stages):
    for cuts in itertools.combinations_with_replacement(range(layers + 1), num_stages - 1):
        bounds = (0, *cuts, layers)
        yield tuple(b - a for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("vocab_size", [32, 256, 3000, 50257])
@pytest.mark.parametrize("layers", [1, 4, 7])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_no_split_is_faster(layers, num_stages, vocab_size):
    config = ModelConfig(layers=layers, d_model=96, seq_len=32, vocab_size=vocab_size)
    split = balanced_layers(config, num_stages)
    assert len(split) == num_stages
    assert sum(split) == layers
    best = min(slowest(other, config) for other in every_split(layers, num_stages))
    assert slowest(split, config) == pytest.approx(best)


def test_every_block_is_in_exactly_one_stage():
    split = (2, 0, 3)
    stages = [stage_parts(stage, split) for stage in range(3)]
    assert [block for blocks, _, _ in stages for block in blocks] == [0, 1, 2, 3, 4]
    assert [(first, last) for _, first, last in stages] == [
        (True, False), (False, False), (False, True)]
