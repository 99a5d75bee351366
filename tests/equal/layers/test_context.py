"""Context parallelism: what it computes and keeps; text and loss."""

import numpy as np
import pytest
from small_model import (
    WORLD,
    plant,
    real_step,
    rows_of,
    small_config,
    two_workers,
    worker_and_rows,
)

from mpipar.config.model import ModelConfig
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.run.checks import evaluate
from mpipar.run.generation import Sampling, continue_one

pytestmark = [pytest.mark.ranks(2, 4, 8), pytest.mark.usefixtures("poisoned_memory")]
# 8 heads of width 3; 16 tokens are 2 pieces for each of up to 8 ranks.
MODEL = ModelConfig(layers=4, d_model=24, heads=8, ffn=31, seq_len=16, vocab_size=29)
METHOD_NAMES = ("ring", "gather", "ulysses")
every_method = pytest.mark.parametrize("method", METHOD_NAMES)


def config_for(method, layout=(1, 1, 1), cp=2, **values):
    return small_config(layout, 4, MODEL, cp=cp, cp_attention=method, **values)


@every_method
@pytest.mark.ranks(2)
def test_sixteen_bits_stay_near_float32(method):
    """Partial results are summed in float32 and rounded once: as near as one rank's."""
    losses = []
    for dtype in ("float32", "bfloat16"):
        worker, part = worker_and_rows(config_for(method, dtype=dtype), spread=0.02)
        losses.append(worker.gradients(1, lambda mb, part=part: part.train(1, mb))[:2])
        worker.close()
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-2)


@every_method
@pytest.mark.ranks(2, 4)
def test_text_and_held_out_loss_are_those_of_one_rank(method):
    """While text is generated, every rank of cp holds all tokens and does the same."""
    worker, alone = two_workers(
        config_for(method, (1, 2, 1) if WORLD.size > 2 else (1, 1, 1), schedule="zb-v")
    )
    found = list(continue_one(worker, [5], Sampling(9, 0.7, seed=3)))
    assert WORLD.allgather(found) == [found] * WORLD.size
    assert found == list(continue_one(alone, [5], Sampling(9, 0.7, seed=3)))
    losses = [evaluate(one, rows_of(one))[0] for one in (worker, alone)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-12)
    worker.close()


@pytest.mark.parametrize("method", ["ring", "gather"])
@pytest.mark.ranks(2, 4)
def test_a_zigzag_gives_every_rank_the_same_work(monkeypatch, method):
    """Counted are the pairs of a query and a key that are multiplied forward, of one row."""
    counted = []

    def count(plain, self, q, k, v, q_pos, k_pos):
        counted.append((q_pos[:, None] >= k_pos[None, :]).sum())
        return plain(self, q, k, v, q_pos, k_pos)

    plant(monkeypatch, NumpyOps, "attention_block_forward", count)
    real_step(config_for(method, cp=WORLD.size))
    pairs = np.array(WORLD.allgather(int(sum(counted))))
    assert pairs.sum() == 4 * MODEL.layers * 16 * 17 // 2
    assert pairs.max() == pairs.min()
