"""Context parallelism: it sends and keeps what is predicted; text and loss; broken twins."""

from dataclasses import replace

import numpy as np
import pytest
from small_model import (
    WORLD,
    assert_caught,
    assert_records_predicted,
    called,
    comms_of,
    cpu,
    peaks,
    plant,
    real_step,
    rows_of,
    small_config,
    two_workers,
    worker_and_rows,
)

from mpipar.comm.grid import token_pieces
from mpipar.comm.group import Comm
from mpipar.config.model import ModelConfig
from mpipar.layers.parallel import allgather_attention, ring_attention
from mpipar.layers.parallel.context import attention_over
from mpipar.layers.stash import Batch
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.run.data import rows as data_rows
from mpipar.run.inference.generate import Sampling, continue_one
from mpipar.study.explain.predict import predict

pytestmark = [pytest.mark.ranks(2, 4, 8), pytest.mark.usefixtures("poisoned_memory")]
# 8 heads of width 3; 16 tokens are 2 pieces for each of up to 8 ranks.
MODEL = ModelConfig(layers=4, d_model=24, heads=8, ffn=31, seq_len=16, vocab_size=29)
HELD = replace(MODEL, sequence_parallel=True)
METHOD_NAMES = ("ring", "gather", "ulysses")
# Ranks: [((dp, pp, tp), cp, schedule, model)]. Each method runs all of them.
CASES = {
    2: [((1, 1, 1), 2, "1f1b", MODEL)],
    4: [
        ((1, 1, 1), 4, "1f1b", MODEL),
        ((1, 1, 2), 2, "1f1b", HELD),
        ((2, 1, 1), 2, "gpipe", MODEL),
        ((1, 2, 1), 2, "zb-h1", MODEL),
        ((1, 2, 1), 2, "zb-v", MODEL),
    ],
    8: [((1, 2, 2), 2, "interleaved", HELD), ((2, 2, 1), 2, "dualpipe-v", MODEL)],
}
HERE = CASES.get(WORLD.size, [])
every_method = pytest.mark.parametrize("method", METHOD_NAMES)
# The ring runs every case. Of the others the first one of a session, and the rest where time is.
everything = pytest.mark.parametrize(
    ("case", "method"),
    [
        pytest.param(
            case,
            method,
            id=f"{case[:3]}-{method}",
            marks=() if method == "ring" or case is HERE[0] else pytest.mark.slow,
        )
        for case in HERE
        for method in METHOD_NAMES
    ],
)


def config_for(case, method, num_microbatches=4, **changes):
    layout, cp, schedule, model = case
    return small_config(
        layout, num_microbatches, model, cp=cp, cp_attention=method, schedule=schedule, **changes
    )


@everything
def test_shapes_only_run_predicts_every_record(case, method):
    _, recorder, _ = assert_records_predicted(config_for(case, method))
    phases = {one.phase for one in recorder.records if one.axis == "cp"}
    assert phases == {"F", "I"}  # W crosses no barrier of this axis


@every_method
@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.ranks(2, 4)
def test_shared_key_heads_equal_whole_attention(method, kv_heads):
    """Fewer heads of keys than of queries; gradients of q, k and v, rank by rank."""
    ops, rng = cpu(), np.random.default_rng(5)
    comm = comms_of(ops, axes={"cp": WORLD.size})["cp"]
    length, places = 16, np.arange(16)
    q, dy = (rng.standard_normal((2, length, 8, 3)) for _ in range(2))
    k, v = (rng.standard_normal((2, length, kv_heads, 3)) for _ in range(2))
    y, probs = ops.attention_forward(q, k, v, places, places)
    wanted = (y, *ops.attention_backward_input(dy, q, k, v, probs, places, places))
    own = np.concatenate(
        [places[one] for one in token_pieces(length, method, WORLD.size, WORLD.rank)]
    )
    held = [x[:, own] for x in (q, k, v)]
    attention, batch = attention_over(method)(ops, comm, "attn"), Batch(None, None, own, places)
    found, saved = attention.forward(*held, batch)
    out = tuple(np.empty_like(x) for x in held)
    attention.backward_input(dy[:, own], saved, batch, out)
    for have, want in zip((found, *out), wanted, strict=True):
        np.testing.assert_allclose(have, want[:, own], rtol=1e-12, atol=1e-13)


@every_method
@pytest.mark.ranks(2)
def test_sixteen_bits_stay_near_float32(method):
    """Partial results are summed in float32 and rounded once: as near as one rank's."""
    losses = []
    for dtype in ("float32", "bfloat16"):
        worker, part = worker_and_rows(config_for(HERE[0], method, 2, dtype=dtype), spread=0.02)
        losses.append(worker.gradients(1, lambda mb, part=part: part.train(1, mb))[:2])
        worker.close()
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-2)


@every_method
@pytest.mark.ranks(2, 4)
def test_text_and_held_out_loss_are_those_of_one_rank(method):
    """While text is generated, every rank of cp holds all tokens and does the same."""
    worker, alone = two_workers(config_for(HERE[-1], method))
    found = list(continue_one(worker, [5], Sampling(9, 0.7, seed=3)))
    assert WORLD.allgather(found) == [found] * WORLD.size
    assert found == list(continue_one(alone, [5], Sampling(9, 0.7, seed=3)))
    losses = [one.evaluate(rows_of(one))[0] for one in (worker, alone)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-12)
    worker.close()


@pytest.mark.parametrize(
    "method", ["ring", *(pytest.param(one, marks=pytest.mark.slow) for one in METHOD_NAMES[1:])]
)
@pytest.mark.ranks(2)
def test_what_a_rank_keeps_is_what_is_predicted(method):
    """To 5 % or 1 MiB, whichever is larger, and less than with all tokens."""
    model = replace(MODEL, layers=2, d_model=96, ffn=384, seq_len=128)
    measured, predicted = peaks(
        small_config((1, 1, 1), 2, rows_per_mb=1, cp=2, cp_attention=method, model=model)
    )
    assert abs(measured - predicted) <= max(0.05 * predicted, 1 << 20), (measured, predicted)
    whole = predict(small_config((1, 1, 1), 2, rows_per_mb=1, model=model), 0).peak_total
    assert measured < 0.7 * whole, (measured, whole)


# --- pairs of a query and a key that are multiplied


def pairs_multiplied(monkeypatch, method):
    """How many pairs this rank multiplies forward, in a layer and row."""
    counted = []

    def count(plain, self, q, k, v, q_pos, k_pos):
        counted.append((q_pos[:, None] >= k_pos[None, :]).sum())
        return plain(self, q, k, v, q_pos, k_pos)

    plant(monkeypatch, NumpyOps, "attention_block_forward", count)
    layout, cp, _, model = HERE[0]
    real_step(small_config(layout, 1, cp=cp, cp_attention=method, model=model))
    return np.array(WORLD.allgather(int(sum(counted))))


@pytest.mark.parametrize("method", ["ring", "gather"])
@pytest.mark.ranks(2, 4)
def test_a_zigzag_gives_every_rank_the_same_work(monkeypatch, method):
    pairs = pairs_multiplied(monkeypatch, method)
    assert pairs.sum() == MODEL.layers * 16 * 17 // 2
    assert pairs.max() == pairs.min()


# --- planted bugs


def keys_that_do_not_come_home(plain, self, x, peer, tag, name):
    lost = self.axis == "cp" and tag == ring_attention.GRADIENTS
    return plain(self, x * 0.0 if lost else x, peer, tag, name)


def added_without_rescaling(plain, self, y, stats, y2, stats2):
    both = y + y2
    plain(self, y, stats, y2, stats2)
    y[...] = both


def not_summed_over_a_row(plain, self, x, name):
    return plain(self, x * 1.0 if self.axis == "data" else x, name)


def one_run_of_tokens(_plain, tokens, method, *place):
    """The data gives each rank one run of tokens, while attention expects the zig-zag."""
    return token_pieces(tokens, "ulysses", *place)


def keys_in_the_order_of_the_ranks(_plain, tokens, method, *place):
    return [(slice(0, tokens // WORLD.size), *token_pieces(tokens, "ulysses", *place))]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("owner", "name", "twin", "method"),
    [
        (Comm, "isend", keys_that_do_not_come_home, "ring"),
        (NumpyOps, "attention_merge", added_without_rescaling, "ring"),
        *((Comm, "iall_reduce", not_summed_over_a_row, method) for method in METHOD_NAMES),
        *((data_rows, "token_pieces", one_run_of_tokens, method) for method in ("ring", "gather")),
        (allgather_attention, "held_and_whole", keys_in_the_order_of_the_ranks, "gather"),
    ],
    ids=called,
)
def test_a_planted_bug_is_seen(monkeypatch, owner, name, twin, method):
    plant(monkeypatch, owner, name, twin)
    assert_caught(config_for(HERE[0], method, 2))
