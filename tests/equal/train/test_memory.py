"""ZeRO and activation recomputation: what is sent and saved is predicted; planted bugs are seen."""

from dataclasses import replace

import numpy as np
import pytest
from small_model import MODEL as ODD
from small_model import (
    WORLD,
    assert_caught,
    assert_records_predicted,
    assert_saved,
    called,
    computed_once,
    peaks,
    plant,
    real_step,
    small_config,
)

from mpipar.comm.group import Pending
from mpipar.comm.record import NO_ENTRY
from mpipar.comm.request import Done
from mpipar.config.model import ModelConfig
from mpipar.layers.recompute import ActivationRecompute
from mpipar.pipeline.engine import Engine
from mpipar.pipeline.schedules.catalog import SCHEDULES
from mpipar.study.explain.predict import predict
from mpipar.train.gradsync import GradSync
from mpipar.train.optimizer import Optimizer
from mpipar.train.zero import (
    FullyShardedUnits,
    ReduceScatterGradSync,
    ShardedFlatParams,
    ShardedGradSync,
    largest,
)

pytestmark = [pytest.mark.ranks(1, 2, 4, 8), pytest.mark.usefixtures("poisoned_memory")]
# 4 heads of width 3; 8 tokens are 2 pieces for each of up to 4 ranks.
MODEL = ModelConfig(layers=4, d_model=12, heads=4, ffn=31, seq_len=8, vocab_size=29)
HELD = replace(MODEL, sequence_parallel=True)
ODD_HELD = replace(ODD, sequence_parallel=True, seq_len=8)
RING = replace(ODD_HELD, tp_matmul="ring")
ONE, THREE = {"zero": 1}, {"zero": 3}
KEPT = THREE | {"reshard_after_forward": "no"}
BLOCK, SCORES = {"recompute": "block"}, {"recompute": "attention"}
# Ranks: [((dp, pp, tp), cp, schedule, model, memory)]
AGAIN = {
    1: [
        ((1, 1, 1), 1, "1f1b", ODD, BLOCK),
        ((1, 1, 1), 1, "1f1b", ODD, SCORES),
    ],
    2: [
        ((1, 2, 1), 1, "zb-h1", ODD, BLOCK),
        ((1, 1, 2), 1, "gpipe", RING, BLOCK),
        ((1, 1, 1), 2, "1f1b", ODD_HELD, BLOCK),
    ],
    4: [((1, 2, 2), 1, "zb-v", ODD_HELD, BLOCK), ((1, 2, 1), 2, "interleaved", ODD_HELD, BLOCK)],
}.get(WORLD.size, [])
ZERO = {
    2: [
        ((2, 1, 1), 1, "1f1b", MODEL, ONE),
        ((1, 1, 1), 2, "1f1b", MODEL, ONE),
        ((2, 1, 1), 1, "1f1b", MODEL, THREE),
        ((2, 1, 1), 1, "gpipe", MODEL, THREE),
        ((1, 1, 1), 2, "1f1b", MODEL, KEPT),
    ],
    4: [
        ((2, 2, 1), 1, "1f1b", MODEL, ONE),
        ((2, 1, 2), 1, "1f1b", HELD, ONE),
        ((2, 1, 1), 2, "gpipe", MODEL, ONE),
        ((2, 2, 1), 1, "zb-h1", MODEL, ONE | BLOCK),
        ((2, 2, 1), 1, "zb-v", MODEL, ONE),
        ((2, 2, 1), 1, "zb-v", MODEL, THREE),
        ((2, 2, 1), 1, "dualpipe-v", MODEL, KEPT),
        ((2, 1, 2), 1, "1f1b", HELD, THREE | BLOCK),
        ((1, 2, 1), 2, "interleaved", MODEL, KEPT),
        ((2, 2, 1), 1, "zb-h1", MODEL, THREE),
    ],
    8: [((2, 2, 1), 2, "interleaved", MODEL, ONE), ((2, 2, 2), 1, "zb-h1", HELD, ONE)],
}.get(WORLD.size, [])
# A small part of ZERO is for every session, by place; the slow ones run all, and predict each
# schedule with each. Lives compare the numbers of these pairs with one rank's.
QUICK = [
    *AGAIN,
    *(ZERO[place] for place in {2: (0, 2, 3, 4), 4: (1, 6, 7, 8), 8: (0,)}.get(WORLD.size, ())),
]
EVERY = [
    ((3 - cp, 2, 1), cp, schedule, MODEL, memory)
    for number, schedule in enumerate(SCHEDULES)
    for memory, cp in (
        ((ONE, THREE)[number % 2] | BLOCK, 1 + number % 2),
        (THREE, 2 - number % 2),
        (KEPT, 1 + number % 2),
    )
]


def cases(some):
    """The cases as parameters of a test."""
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(
                case, id=f"{case[:3]}-{case[-1]}", marks=() if case in QUICK else pytest.mark.slow
            )
            for case in some
        ],
    )


def config_for(case, num_microbatches=4, **more):
    layout, cp, schedule, model, memory = case
    return small_config(layout, num_microbatches, model, cp=cp, schedule=schedule, **memory, **more)


@cases([*AGAIN, *ZERO, *(EVERY if WORLD.size == 4 else ())])
def test_shapes_only_run_predicts_every_record(case):
    assert_records_predicted(config_for(case))


@cases(AGAIN)
def test_gradients_are_those_without_it_to_the_last_bit(case):
    """The same functions run on the same inputs. Scores alone are made by other tiles."""
    found = []
    for memory in (case[-1], {}):
        worker, _ = real_step(config_for((*case[:-1], memory)))
        found.append([flat.grad for flat in worker.flats])
    for again, once in zip(*found, strict=True):
        if case[-1]["recompute"] == "attention":
            np.testing.assert_allclose(again, once, rtol=1e-12, atol=1e-15)
        else:
            assert again.tobytes() == once.tobytes()


@pytest.mark.ranks(1, 2)
def test_what_runs_again_saves_what_is_predicted():
    """The peak of arrays falls by the predicted bytes, to 5 % or 1 MiB, whichever is larger."""
    model = replace(ODD, d_model=96, heads=6, ffn=384, seq_len=128, layers=4)
    whole, *found = [
        peaks(small_config((1, WORLD.size, 1), 4, model, 1, **memory))
        for memory in ({}, SCORES, BLOCK)
    ]
    for less in found:
        assert_saved(whole, less, under_way=1 << 19)


@pytest.mark.ranks(2)
def test_what_is_shared_out_saves_what_is_predicted():
    model = replace(MODEL, d_model=96, ffn=384, seq_len=64, vocab_size=997)
    whole, *found = [
        peaks(
            small_config((2, 1, 1), 2, model, 1, optimizer="adamw", bucket_bytes=1 << 20, **memory)
        )
        for memory in ({}, ONE, THREE, THREE)
    ]
    predicted = [one for _, one in (whole, *found)]
    assert predicted == sorted(predicted, reverse=True)
    for less in found:
        assert_saved(whole, less)


@pytest.mark.ranks(2)
def test_weights_gradients_and_state_follow_the_closed_forms():
    """N parameters in segments that two ranks share, u of the largest units; moments count two."""
    for memory in (ONE, THREE, THREE):
        config = config_for(((2, 1, 1), 1, "1f1b", MODEL, memory), optimizer="adamw")
        found = predict(config, WORLD.rank)
        total = 8 * sum(length for _, length in found.segments)
        units = [8 * sum(length for _, length in unit) for unit in found.reads[0]]
        two, one = max(units[::2]) + max(units[1::2]), max(units)
        assert found.peak_bytes["optimizer"] == 2 * total // 2
        assert found.peak_bytes["weights"] == (total if memory is ONE else total // 2 + two)
        assert found.peak_bytes["gradients"] == (total // 2 + one if memory is THREE else total)


# --- planted bugs: each is a function of what it replaces, and of its arguments


def piece_of_the_next_rank(plain, self, run, place):
    return plain(self, run, (place + 1) % self.group.size)


def weights_gathered_before_the_update(_plain, self, lr, step):
    for flat in self.flats:
        for segment in range(len(flat.segments)):
            flat.gather(segment).wait()
            self.rules[flat.rule].update(flat, segment, lr, step)


def norm_of_the_first_rank_s_pieces(_plain, self, flat):
    return GradSync.counts(self, flat)


def two_units_in_one_buffer(_plain, self):
    size = largest(needs for units in self.needs.values() for needs in units)
    return [self.ops.empty((size,), label="weights")] * 2


def no_gather_before_the_input_gradient(plain, self, stage, unit, room):
    """The buffer still has what it held before, which is another unit's."""
    if self.needs[stage][unit][0][0].group.recorder.phase == "F":
        plain(self, stage, unit, room)
        return
    first, posted = 0, []
    for flat, number in self.needs[stage][unit]:
        whole = room[first : first + flat.lengths[number]]
        first += whole.size
        posted.append((Pending(Done(), list(NO_ENTRY), whole), flat, number, whole))
    self.coming[stage, unit] = posted


def means_in_place_of_sums(plain, self):
    plain(self)
    self._scale(1 / self.comms["data"].size)


def gradients_of_another_unit_in_the_scratch_buffer(plain, self, stage, unit):
    kept, self.ops.fill = self.ops.fill, lambda x, value: None
    plain(self, stage, unit)
    self.ops.fill = kept


def stash_of_another_microbatch(plain, self, dy, stash):
    dx = plain(self, dy, stash)
    before, self.newest = getattr(self, "newest", None), stash[self, "inner"]
    if before:  # W has not read it yet
        before.update(self.newest)
    return dx


def input_in_a_receive_buffer(plain, self, instr):
    """The next microbatch arrives where the input of a block lies that runs forward again."""
    x = plain(self, instr)
    if instr.kind != "F" or x is None:
        return x
    self.buffer = getattr(self, "buffer", x)
    self.ops.copy(self.buffer, x)
    return self.buffer


def result_in_place_of_the_input(_plain, self, x, stash):
    inner = stash.inner()
    for layer in self.layers:
        x = layer.forward(x, inner)
    stash[self, "x"] = x
    return x


DP, PP = ((2, 1, 1), 1, "1f1b", MODEL), ((1, 2, 1), 1)
TWINS = {
    2: [  # by ranks: (what is replaced, by what, where it must show)
        (ShardedFlatParams, "piece_in", piece_of_the_next_rank, (*DP, ONE)),
        (ShardedFlatParams, "piece_in", piece_of_the_next_rank, (*DP, THREE)),
        (Optimizer, "step", weights_gathered_before_the_update, (*DP, ONE)),
        (ReduceScatterGradSync, "counts", norm_of_the_first_rank_s_pieces, (*DP, ONE)),
        (FullyShardedUnits, "make_room", two_units_in_one_buffer, (*DP, THREE)),
        (FullyShardedUnits, "post", no_gather_before_the_input_gradient, (*DP, THREE)),
        (ReduceScatterGradSync, "finish", means_in_place_of_sums, (*DP, ONE)),
        (ShardedGradSync, "finish", means_in_place_of_sums, (*DP, THREE)),
        (
            ShardedGradSync,
            "begin_unit",
            gradients_of_another_unit_in_the_scratch_buffer,
            (*DP, THREE),
        ),
        (
            ActivationRecompute,
            "backward_input",
            stash_of_another_microbatch,
            (*PP, "zb-h1", MODEL, BLOCK),
        ),
        (Engine, "_take", input_in_a_receive_buffer, (*PP, "gpipe", ODD, BLOCK)),
    ],
    1: [  # a step that ends in the middle leaves no message
        (
            ActivationRecompute,
            "forward",
            result_in_place_of_the_input,
            ((1, 1, 1), 1, "1f1b", ODD, BLOCK),
        ),
    ],
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("owner", "name", "twin", "case"), TWINS.get(WORLD.size, []), ids=called)
def test_a_planted_bug_is_seen(monkeypatch, owner, name, twin, case):
    plant(monkeypatch, owner, name, twin)
    assert_caught(
        config_for(case, 2 if case[:4] == DP else 4), computed_once, r"tensors differ|in the stash"
    )
