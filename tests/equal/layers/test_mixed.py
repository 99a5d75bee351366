"""16-bit training over ranks: equal to one rank within the rounding, skipped by all or none."""

import itertools
import math

import numpy as np
import pytest
from small_model import (
    DP,
    EXPERTS,
    LAYOUTS,
    MODEL,
    PP,
    TP,
    WORLD,
    assert_records_predicted,
    called,
    comms_of,
    computed_once,
    cpu,
    cut_model,
    last,
    on_all_ranks,
    plant,
    poison_unwritten,
    slow_unless,
    small_config,
    tokens,
    worker_and_step,
)

from mpipar.comm.group import Comm
from mpipar.errors import NonFiniteError
from mpipar.run.verify import compare_with_one_rank, one_rank_tensors
from mpipar.train import worker as train
from mpipar.train.gradsync import GradSync

HERE = LAYOUTS[WORLD.size]
HALF_UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # largest relative error of one rounding
# Largest difference of a gradient from one rank's, in roundings. A cut of rows adds no rounding:
# only float32 sums come in another order. Every tensor-parallel barrier rounds the parts of its sum
# once more.
ROUNDINGS = {"rows": 0.25, "tp": 6}
pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.fixture(params=HALF_UNIT)
def dtype(request):
    return request.param


def assert_equals_one_rank(config, expected=computed_once):
    """Assert that gradients and weights equal those of the one-rank run of the same dtype."""
    roundings = ROUNDINGS["tp" if config.grid.tp > 1 else "rows"]
    limit = roundings * HALF_UNIT[config.run.dtype]
    found = compare_with_one_rank(config, tokens(), WORLD, expected)
    bad = [
        f"tensors differ: {d.kind} of {d.name}: {d.error:.1e}"
        for d in found
        if not d.error <= limit
    ]
    on_all_ranks(", ".join(bad[:5]))


@pytest.mark.ranks(1, 2, 3, 4, 8)
@pytest.mark.parametrize("layout", last(HERE), ids=str)
def test_layout_equals_one_rank(layout, dtype, monkeypatch):
    poison_unwritten(monkeypatch)
    changes = [{"num_microbatches": 5}]
    if layout[1] > 1:
        changes += [{"schedule": "zb-h1"}]
    if layout[2] > 1:
        cut = {"bfloat16": "gather", "float16": "reduce"}[dtype]  # the same calls in other order
        changes += [{"ffn_cut": cut}, {"model": cut_model()}, {"model": cut_model("ring")}]
    for values in changes:
        assert_equals_one_rank(small_config(layout, dtype=dtype, **values))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=[pytest.mark.slow] * (WORLD.size > 2))
        for layout in {2: [DP], 4: [(2, 1, 2)]}.get(WORLD.size, [])
    ],
    ids=str,
)
def test_experts_equal_one_rank(layout, dtype, monkeypatch):
    """Routers compute in float32, so that every layout chooses the same experts."""
    poison_unwritten(monkeypatch)
    assert_equals_one_rank(small_config(layout, dtype=dtype, model=EXPERTS, ep=2))


def sum_dropped_in_a_layer(plain, self, x, name, op="sum"):
    return x if name == "block1.ffn.up" else plain(self, x, name, op)


def summed_in_16_bits(plain, self, x, name):
    x[...] = x.astype(self.transport.ops.dtype)
    return plain(self, x, name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "twin", "layout"),
    [("all_reduce", sum_dropped_in_a_layer, TP), ("iall_reduce", summed_in_16_bits, DP)],
    ids=called,
)
def test_a_planted_bug_is_seen(name, twin, layout, dtype, monkeypatch):
    plant(monkeypatch, Comm, name, twin)
    with pytest.raises(AssertionError, match="tensors differ"):
        assert_equals_one_rank(small_config(layout, dtype=dtype), one_rank_tensors)


@pytest.mark.parametrize(
    ("layout", "tp_matmul"),
    slow_unless(
        lambda layout, tp_matmul: (tp_matmul == "ring") == (layout[2] > 1),
        itertools.product(HERE, [None, "plain", "ring"]),
    ),
    ids=str,
)
def test_shapes_only_run_predicts_every_record(layout, tp_matmul, dtype):
    model = cut_model(tp_matmul) if tp_matmul else MODEL
    *_, predicted = assert_records_predicted(small_config(layout, model=model, dtype=dtype))
    counters = predicted.recorder.counters
    narrow = {key[:2] for key in counters if key.dtype == dtype}
    wide = {key[:2] for key in counters if key.dtype == "float32"}
    assert {axis for axis, name in narrow} <= {"pp", "tp"}
    assert all(axis in ("dp", "tie") or name in ("loss", "grads.tp") for axis, name in wide)


@pytest.mark.parametrize("size", [1, 7, 30])
def test_sums_are_made_in_float32_and_the_same_everywhere(size, dtype):
    ops = cpu(dtype)
    comms = comms_of(ops, axes={"tp": WORLD.size})
    comm = comms["tp"]
    parts = np.random.default_rng(size).standard_normal((WORLD.size, size, 3)).astype(ops.dtype)
    expected = parts.astype(np.float32).sum(axis=0).astype(ops.dtype)
    got = comm.all_reduce(parts[WORLD.rank].copy(), "x")
    assert got.dtype == ops.dtype
    assert (got == expected).all()
    assert (np.array(WORLD.allgather(got.tobytes())) == got.tobytes()).all()
    blocks = np.random.default_rng(1).standard_normal((WORLD.size, *parts.shape)).astype(ops.dtype)
    mine = comm.reduce_scatter(blocks[WORLD.rank].copy(), "x")
    assert (mine == blocks.astype(np.float32)[:, WORLD.rank].sum(axis=0).astype(ops.dtype)).all()
    root = comm.broadcast(parts[WORLD.rank].copy(), WORLD.size - 1, "x")
    assert (root == parts[-1]).all()
    comms.close()


def overflow_on_rank_1(monkeypatch, at_step):
    """Plant an infinity in a gradient of world rank 1, after all sums, in these steps."""

    def unscale(plain, self, loss_scale):
        if WORLD.rank == 1 and self.recorder.step in at_step:
            flat = self.flats[-1]
            _, segment, place = flat.norm_runs[-1]
            flat.reduced_grads[segment][place][-1] = math.inf
        plain(self, loss_scale)

    plant(monkeypatch, GradSync, "unscale", unscale)


def skip_together(layout, zero=0):
    """Steps 2 and 3 overflow on one rank: nobody may change a weight; then the scale recovers."""
    worker, step = worker_and_step(
        small_config(
            layout,
            rows_per_mb=1,
            dtype="float16",
            optimizer="adamw",
            loss_scale=1024.0,
            zero=zero,
        )
    )
    worker.loss_scale.interval = 2
    problem, skipped, scales = "", [], []
    for number in range(1, 8):
        before = [flat.master.copy() for flat in worker.flats]
        result = step(number)
        after = [flat.master for flat in worker.flats]
        same = all((a == b).all() for a, b in zip(before, after, strict=True))
        skipped.append(result.skipped)
        scales.append(result.loss_scale)
        if same != (number in (2, 3)):
            problem = f"step {number}: rank {WORLD.rank} skipped: {same}"
    worker.close()
    if not problem and (
        skipped != [False, True, True, False, False, False, False]
        or scales != [1024, 1024, 512, 256, 256, 512, 512]
    ):
        problem = f"rank {WORLD.rank}: {skipped}, {scales}"
    on_all_ranks(problem)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("layout", last(HERE), ids=str)
def test_an_overflow_on_one_rank_makes_all_skip(layout, monkeypatch):
    overflow_on_rank_1(monkeypatch, (2, 3))
    skip_together(layout)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("zero", [1, 3])
def test_an_overflow_in_one_rank_s_pieces_makes_all_skip(zero, monkeypatch):
    overflow_on_rank_1(monkeypatch, (2, 3))
    skip_together((2, 1, WORLD.size // 2), zero)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", [DP, PP, TP], ids=str)
def test_ranks_that_do_not_agree_are_caught(layout, monkeypatch):
    overflow_on_rank_1(monkeypatch, (2, 3))
    monkeypatch.setattr(train, "all_reduce_scalars", lambda ops, comms, values, *names: values)
    with pytest.raises(AssertionError, match="rank 0"):
        skip_together(layout)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", [DP, TP], ids=str)
def test_an_overflow_that_the_norm_does_not_count_is_caught(layout, monkeypatch):
    """Rank 1 holds a copy whose gradient the norm leaves to rank 0."""
    overflow_on_rank_1(monkeypatch, (2, 3))
    monkeypatch.setattr(
        train, "masked_contribution", lambda value, counts: value if counts else 0.0
    )
    with pytest.raises((AssertionError, NonFiniteError), match=r"rank|loss nan"):
        skip_together(layout)
