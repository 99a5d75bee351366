"""The held-out loss: one rank's on every layout, and it changes nothing that a step reads."""

from dataclasses import replace

import numpy as np
import pytest
from small_model import (
    LAYOUTS,
    MODEL,
    WORLD,
    plant,
    poison_unwritten,
    rows_of,
    small_config,
    tokens,
    two_workers,
    worker_of,
)

from mpipar.pipeline.engine import Engine
from mpipar.run import checks
from mpipar.run.data.parts import evaluated

CONTEXT = replace(MODEL, d_model=24, heads=8, seq_len=16)
# (ranks, layout, what else): every axis and kind of schedule.
CASES = [
    *((size, layout, {}) for size, layouts in LAYOUTS.items() for layout in layouts),
    (2, (1, 2, 1), {"schedule": "zb-v"}),
    (2, (1, 1, 1), {"cp": 2, "model": CONTEXT}),
    (4, (1, 2, 1), {"cp": 2, "model": CONTEXT}),
    (4, (2, 1, 1), {"cp": 2, "model": CONTEXT}),
    (4, (1, 1, 2), {"cp": 2, "cp_attention": "gather", "model": CONTEXT}),
    # A unit is gathered for every pass, so replicas that share weights out run the same passes.
    (2, (2, 1, 1), {"zero": 3}),
    (4, (2, 2, 1), {"zero": 3}),
    (8, (1, 2, 2), {"cp": 2, "schedule": "interleaved", "model": replace(CONTEXT, layers=4)}),
]
HERE = [case[1:] for case in CASES if case[0] == WORLD.size]
everywhere = pytest.mark.parametrize(("layout", "options"), HERE, ids=str)


def losses(layout, options, part):
    """(loss, tokens) of the layout and of one rank."""
    workers = two_workers(small_config(layout, **options))
    found = [checks.evaluate(one, rows_of(one, part)) for one in workers]
    for one in workers:
        one.close()
    return found


@everywhere
def test_every_layout_has_the_loss_of_one_rank(layout, options, monkeypatch):
    """Whole batches and a last one in which some replicas have no row; no full batch; one row.

    Every new array is full of NaN.
    """
    poison_unwritten(monkeypatch)
    seq_len = options.get("model", MODEL).seq_len
    for length in (700, 50, seq_len + 1):
        (found, count), (expected, alone) = losses(layout, options, tokens()[:length])
        assert count == alone == (length - 1) // seq_len * seq_len
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        assert len(set(WORLD.allgather(found))) == 1, "ranks must know the same number"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS[2], ids=str)
def test_twins_that_count_wrongly_are_found(layout, monkeypatch):
    """A rank that counts a loss that others count too, or one that leaves out what it has."""

    def all_reduce_scalars(plain, ops, comms, numbers, name, *axis):
        wrong = numbers[0] * 2 if comms.world.group_rank == 0 else numbers[0] / 2
        return plain(ops, comms, [wrong] if comms.world.size > 1 else numbers, name, *axis)

    plant(monkeypatch, checks, "all_reduce_scalars", all_reduce_scalars)
    (found, _), (expected, _) = losses(layout, {}, tokens()[:700])
    assert abs(found / expected - 1) > 1e-3


@everywhere
def test_evaluation_is_a_phase_of_its_own_and_changes_nothing(layout, options):
    """All it sends and computes is phase eval; weights, gradients and moments keep their bits."""
    worker, alone = two_workers(small_config(layout, **options))
    rows = rows_of(worker)
    worker.train_step(1, lambda mb: rows.train(1, mb))

    def state():
        return [
            np.asarray(buffer).tobytes()
            for flat in worker.flats
            for buffer in (flat.grad, *flat.state.values())
        ]

    before, recorder = state(), worker.recorder
    losses_before, counters = dict(worker.losses), recorder.counters
    first = checks.evaluate(worker, rows_of(worker, tokens()[:300]))
    assert checks.evaluate(worker, rows_of(worker, tokens()[:300])) == first
    assert state() == before
    assert worker.losses == losses_before
    new = {key for key, sums in recorder.counters.items() if counters.get(key) != sums}
    assert {key.phase for key in new} == ({"eval"} if WORLD.size > 1 else set())
    assert recorder.busy_ns["eval"] > 0
    worker.close()
    alone.close()


@pytest.mark.ranks(1)
def test_an_engine_that_keeps_the_phase_of_training_is_found(monkeypatch):
    plant(
        monkeypatch,
        Engine,
        "run",
        lambda plain, self, program, get_batch, **_: plain(self, program, get_batch),
    )
    with pytest.raises(AssertionError, match="unused"):
        losses((1, 1, 1), {}, tokens()[:50])


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("asked", "rows"), [(None, 285), (1, 1), (7, 1), (8, 2), (10**9, 285)])
def test_eval_tokens_is_rounded_up_to_rows(asked, rows):
    config = small_config(eval_tokens=asked)
    part, worker = evaluated(tokens(), config), worker_of(config)
    assert rows_of(worker, part).rows_of_sweep() == rows
    assert part[:20].tolist() == tokens()[: len(part)][:20].tolist()
    worker.close()
