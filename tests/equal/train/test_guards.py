"""Copies that drift, and numbers that are not finite on only one rank, stop every rank."""

import math
import re

import numpy as np
import pytest
from drawn import MODELS
from small_model import (
    DP,
    EVEN,
    LAYOUTS,
    PP,
    TP,
    WORLD,
    cut_model,
    last,
    on_all_ranks,
    plant,
    raised_everywhere,
    small_config,
    worker_and_step,
)

from mpipar.errors import DriftError, NonFiniteError
from mpipar.layers.loss import CrossEntropy
from mpipar.run import replicas
from mpipar.run.process.consistency import ranges
from mpipar.run.replicas import Replicas
from mpipar.train import worker as train
from mpipar.train.gradsync import GradSync

pytestmark = pytest.mark.ranks(2, 4)
HERE = LAYOUTS[WORLD.size]
CP = (1, 1, 1)


def part_of(worker, name, kind):
    """This rank's part of a tensor's gradient, master weights or moment; None if it has none."""
    return next(
        (
            values
            for flat in worker.flats
            for param, _, values in flat.parts_in(kind)
            if param.name == name
        ),
        None,
    )


# --- replica drift


# (layout, further settings) of every kind of copies, by name.
COPIES = {
    **{str(layout): (layout, {}) for layout in HERE},
    **{
        f"{layout} with cut tokens": (layout, {"model": cut_model()})
        for layout in HERE
        if layout[2] > 1
    },
    "context parallel": ((1, 1, WORLD.size // 2), {"cp": 2, "model": EVEN}),
    # Ranks that hold one head of keys add up its gradient identically, to the last bit.
    **{
        f"shared heads {tp_matmul}": (
            (1, 1, WORLD.size),
            {
                "model": MODELS["tied"],
                "rows_per_mb": 4,
                "sequence_parallel": True,
                "tp_matmul": tp_matmul,
                "seq_len": 13,
            },
        )
        for tp_matmul in ("plain", "ring")
    },
}


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=[pytest.mark.slow] * (WORLD.size > 2))]
)
@pytest.mark.parametrize("name", COPIES)
def test_copies_stay_equal(name, dtype):
    layout, options = COPIES[name]
    worker, step = worker_and_step(
        small_config(layout, 2 * layout[1], dtype=dtype, optimizer="adamw", **options)
    )
    copies = Replicas(worker)
    for number in (1, 2):
        step(number)
        worker.recorder.clear()
        copies.check(number)
        records = worker.recorder.records
        assert [(record.axis, record.name, record.phase) for record in records] == [
            ("world", "check.replicas", "check")
        ]
        assert records[0].payload_bytes == 16 * len(copies.places)
    assert copies.count == 2
    worker.close()


def drift(layout, kind, name, num_microbatches=2, **options):
    """Change one bit of a number on the last rank that holds `name`, after step 1.

    Returns the text of the error, and the ranks that hold the tensor.
    """
    worker, step = worker_and_step(
        small_config(layout, num_microbatches, dtype="float32", optimizer="adamw", **options)
    )
    copies = Replicas(worker)
    step(1)
    found = part_of(worker, name, kind)
    holders = [rank for rank, held in enumerate(WORLD.allgather(found is not None)) if held]
    if holders[-1] == WORLD.rank:
        found.reshape(-1)[-1:].view(np.uint32)[...] ^= np.uint32(1)
    try:
        return raised_everywhere(DriftError, lambda: copies.check(1)), holders
    finally:
        worker.close()


KINDS = {"m": "first moment", "v": "second moment", "master": "weights"}
OF_COPIES = [
    (DP, "master", "block3.ffn.up.w"),
    (DP, "m", "block0.norm1.w"),
    (DP, "v", "embedding.tokens"),
    (TP, "master", "block2.norm2.b"),
    (TP, "m", "block4.ffn.down.b"),
]


@pytest.mark.parametrize(
    ("layout", "kind", "name"),
    [
        *OF_COPIES,
        (TP, "v", "block4.ffn.down.b"),
        (PP, "m", "embedding.tokens"),
        (CP, "master", "block1.attn.proj.w"),
    ],
)
@pytest.mark.ranks(2)
def test_one_bit_of_a_copy_is_found_and_named(layout, kind, name):
    options = {"cp": 2, "model": EVEN} if layout == CP else {}
    text, _ = drift(layout, kind, name, **options)
    assert re.fullmatch(
        rf"step 1: copies .*\n{KINDS[kind]} of {name}: rank 0 unlike rank 1", text
    ), text


@pytest.mark.parametrize("layout", HERE[1:], ids=str)
@pytest.mark.ranks(4)
def test_the_ranks_that_differ_are_named(layout):
    """A norm of the last stage: on 2 ranks of a 2 x 2 layout, or 4 of 2 x 2 without a pipeline."""
    text, holders = drift(layout, "master", "block4.norm2.w")
    sides = [f"rank {rank}" for rank in holders]
    if len(holders) > 2:
        sides = [f"rank {holders[-1]}", f"ranks {ranges(holders[:-1])}"]
    assert text.endswith(f"weights of block4.norm2.w: {sides[0]} unlike {sides[1]}"), text


@pytest.mark.ranks(2)
def test_what_is_whole_on_a_rank_is_compared():
    """With --zero 1 the weights, and no moment; with --zero 3 nothing, and nothing is sent."""
    text, _ = drift(DP, "master", "block3.ffn.up.w", zero=1)
    assert text.endswith("\nweights of block3.ffn.up.w: rank 0 unlike rank 1"), text
    for level, kinds in ((1, {"master"}), (3, set())):
        worker, step = worker_and_step(small_config(DP, dtype="float32", zero=level))
        copies = Replicas(worker)
        step(1)
        worker.recorder.clear()
        copies.check(1)
        assert {kind for kind, *_ in copies.places} == kinds
        assert len(worker.recorder.records) == len(kinds)
        worker.close()


@pytest.mark.ranks(2)
def test_a_check_that_ignores_the_moments_is_caught(monkeypatch):
    plant(
        monkeypatch,
        Replicas,
        "checksums",
        lambda plain, self: {
            piece: number for piece, number in plain(self).items() if piece[0] == "master"
        },
    )
    with pytest.raises(AssertionError, match="raised nothing"):
        drift(DP, "m", "embedding.tokens")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", [DP, TP, PP], ids=str)
def test_a_check_that_looks_at_owned_tensors_alone_is_caught(layout, monkeypatch):
    monkeypatch.setattr(
        replicas,
        "place_among_copies",
        lambda comms, param: (0, 1 + (param.owner and comms["dp"].group_rank == 0)),
    )
    with pytest.raises(AssertionError, match="raised nothing"):
        drift(layout, "master", "embedding.tokens" if layout == PP else "block2.norm2.b")


# --- a number that is not finite


def not_finite(layout, name, dtype="float32", number=math.nan):
    """Plant a number in one gradient of the last rank that has it, after all sums, in step 2."""
    worker, step = worker_and_step(
        small_config(
            layout, dtype=dtype, optimizer="adamw", loss_scale=1.0 if dtype == "float16" else None
        )
    )
    found = part_of(worker, name, "grad")
    held = WORLD.allgather(found is not None)
    holder = max(rank for rank in range(WORLD.size) if held[rank])
    step(1)
    before = [flat.master.copy() for flat in worker.flats]

    def square_sums(plain, sync):
        if sync is worker.gradsync and holder == WORLD.rank:
            found.reshape(-1)[-1:] = number
        return plain(sync)

    with pytest.MonkeyPatch.context() as patch:
        plant(patch, GradSync, "square_sums", square_sums)
        text = raised_everywhere(NonFiniteError, lambda: step(2))
    worker.close()
    same = all((flat.master == old).all() for flat, old in zip(worker.flats, before, strict=True))
    on_all_ranks("" if same else f"rank {WORLD.rank} changed its weights")
    return text, holder


@pytest.mark.parametrize("name", ["embedding.tokens", "block0.norm1.w", "block4.ffn.up.w"])
@pytest.mark.parametrize("layout", last(HERE), ids=str)
def test_a_gradient_that_is_not_finite_on_any_copy_stops_all(layout, name):
    number = math.inf if name == "embedding.tokens" else math.nan
    text, rank = not_finite(layout, name, number=number)
    first, second = text.splitlines()
    assert re.match(r"step 2: loss \d\S+, gradient norm (nan|inf): stopped before", first)
    assert re.fullmatch(
        rf"gradient of {name} is not finite on rank {rank} \(.*\)",
        second,
    ), text


@pytest.mark.ranks(2)
def test_float16_stops_with_the_name_when_no_smaller_scale_is_left():
    assert "gradient of block0.norm1.w" in not_finite(DP, "block0.norm1.w", "float16")[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", [DP, TP], ids=str)
def test_a_norm_that_reads_only_what_it_counts_is_caught(layout, monkeypatch):
    monkeypatch.setattr(
        train, "masked_contribution", lambda value, counts: value if counts else 0.0
    )
    with pytest.raises(AssertionError, match="raised nothing"):
        not_finite(layout, "block0.norm1.w")


@pytest.mark.parametrize("layout", HERE, ids=str)
def test_a_loss_that_is_not_finite_on_one_rank_stops_all(layout, monkeypatch):
    """On the last rank alone: of the last stage, of a replica, or a copy that nobody counts."""
    worker, step = worker_and_step(small_config(layout, dtype="float32"))
    last = WORLD.size - 1

    def forward(plain, *arguments):
        loss = plain(*arguments)
        return math.nan if WORLD.rank == last and worker.recorder.mb == 1 else loss

    plant(monkeypatch, CrossEntropy, "forward", forward)
    text = raised_everywhere(NonFiniteError, lambda: step(1))
    worker.close()
    assert re.match(r"step 1: loss nan, gradient norm \d", text), text
    assert re.search(rf"\nthe loss of microbatch 1 is nan on rank {last} \(", text), text
