"""ZeRO: every layout equals one rank, sends what is predicted, and has its twins."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from small_model import (
    WORLD,
    assert_equals_one_rank,
    assert_saved,
    computed_once,
    peaks,
    poison_unwritten,
    real_step,
    small_config,
    with_sync_sends,
)

from mpipar.comm.group import Pending
from mpipar.comm.record import NO_ENTRY
from mpipar.comm.request import Done
from mpipar.config.memory import MemoryConfig
from mpipar.config.model import DecoderConfig
from mpipar.layers.flat import Sharding
from mpipar.layers.recompute import Recomputed
from mpipar.layers.units import GatheredUnits, largest
from mpipar.pipeline.schedules.catalog import SCHEDULES
from mpipar.plan.predict import predict
from mpipar.train.gradsync import GradSync, PieceSync, ScatterSync
from mpipar.train.optim import Sgd

pytestmark = pytest.mark.ranks(2, 4, 8)
# 4 heads of width 3; 8 tokens are 2 pieces for each of up to 4 ranks.
MODEL = DecoderConfig(layers=4, d_model=12, heads=4, ffn=31, seq_len=8, vocab_size=29)
HELD = replace(MODEL, sequence_parallel=True)
ONE, THREE = MemoryConfig(zero=1), MemoryConfig(zero=3)
PIECES, KEPT = replace(THREE, zero_grads="sharded"), replace(THREE, zero_keep="stage")
# Ranks: [((dp, pp, tp), cp, schedule, model, memory)]
CASES = {
    2: [((2, 1, 1), 1, "1f1b", MODEL, ONE), ((1, 1, 1), 2, "1f1b", MODEL, ONE),
        ((2, 1, 1), 1, "1f1b", MODEL, THREE), ((2, 1, 1), 1, "gpipe", MODEL, PIECES),
        ((1, 1, 1), 2, "1f1b", MODEL, KEPT)],
    4: [((2, 2, 1), 1, "1f1b", MODEL, ONE), ((2, 1, 2), 1, "1f1b", HELD, ONE),
        ((2, 1, 1), 2, "gpipe", MODEL, ONE), ((2, 2, 1), 1, "dualpipe", MODEL, ONE),
        ((2, 2, 1), 1, "zb-h1", MODEL, replace(ONE, recompute="block")),
        ((2, 2, 1), 1, "zb-v", MODEL, ONE), ((2, 2, 1), 1, "zb-v", MODEL, PIECES),
        ((2, 2, 1), 1, "dualpipe", MODEL, replace(KEPT, zero_grads="sharded")),
        ((2, 1, 2), 1, "1f1b", HELD, replace(PIECES, recompute="block")),
        ((1, 2, 1), 2, "interleaved", MODEL, KEPT), ((2, 2, 1), 1, "zb-h1", MODEL, THREE)],
    8: [((2, 2, 1), 2, "interleaved", MODEL, ONE), ((2, 2, 2), 1, "zb-h1", HELD, ONE)],
}
HERE = CASES.get(WORLD.size, [])
# A small part is for every session, by place; the slow ones run all, and predict each schedule with
# each. Lives compare the numbers of these pairs with one rank's.
FIRST = {2: (0, 2, 3, 4), 4: (1, 6, 7, 8), 8: (0,)}.get(WORLD.size, ())
EVERY = [((3 - cp, 2, 1), cp, schedule, MODEL, memory)
         for number, schedule in enumerate(SCHEDULES)
         for memory, cp in ((replace((ONE, THREE)[number % 2], recompute="block"), 1 + number % 2),
                            (PIECES, 2 - number % 2), (KEPT, 1 + number % 2))]
everything = pytest.mark.parametrize("case", [
    pytest.param(case, id=f"{case[:3]}-{case[-1].zero}",
                 marks=() if case in [HERE[place] for place in FIRST] else pytest.mark.slow)
    for case in [*HERE, *(EVERY if WORLD.size == 4 else ())]])
every_case = pytest.mark.parametrize("case", [
    pytest.param(case, id=f"{case[:3]}-{case[-1].zero}",
                 marks=() if place in FIRST else pytest.mark.slow)
    for place, case in enumerate(HERE)])


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Every newly allocated array, receive buffers included, is full of NaN."""
    poison_unwritten(monkeypatch)


def config_for(case, num_microbatches=4, **train):
    layout, cp, schedule, model, memory = case
    config = small_config(
        layout, num_microbatches, rows_per_mb=2, cp=cp, schedule=schedule, model=model)
    return replace(config, memory=memory, train=replace(config.train, **train))


@every_case
def test_layout_equals_one_rank(case):
    assert_equals_one_rank(with_sync_sends(config_for(case)), expected=computed_once)


@everything
def test_shapes_only_run_predicts_every_record(case):
    config = config_for(case)
    _, recorder = real_step(config)
    shown = [[(one.operation, one.name, one.axis, one.peer, one.payload_bytes, one.wire_bytes,
               one.dtype, one.phase, one.mb, one.site, one.cut) for one in records]
             for records in (recorder.records, predict(config, WORLD.rank).recorder.records)]
    assert shown[0] == shown[1]


@pytest.mark.ranks(2)
def test_what_is_shared_out_is_what_is_predicted():
    """The peak of arrays falls by the predicted bytes, to 5 % or 1 MiB, whichever is larger."""
    model = replace(MODEL, d_model=96, ffn=384, seq_len=64, vocab_size=997)
    found = []
    for memory in (MemoryConfig(), ONE, THREE, PIECES):
        config = small_config((2, 1, 1), 2, rows_per_mb=1, model=model)
        config = replace(config, memory=memory, train=replace(
            config.train, optimizer="adamw", bucket_bytes=1 << 20))
        found.append(peaks(config))
    predicted = [one for _, one in found]
    assert predicted == sorted(predicted, reverse=True)
    for less in found[1:]:
        assert_saved(found[0], less)


@pytest.mark.ranks(2)
def test_weights_gradients_and_state_follow_the_closed_forms():
    """N parameters in segments that two ranks share, u of the largest units; moments count two."""
    for memory in (ONE, THREE, PIECES):
        config = config_for(((2, 1, 1), 1, "1f1b", MODEL, memory), optimizer="adamw")
        found = predict(config, WORLD.rank)
        total = 8 * sum(length for _, length in found.segments)
        units = [8 * sum(length for _, length in unit) for unit in found.reads[0]]
        two, one = max(units[::2]) + max(units[1::2]), max(units)
        assert found.peak_bytes["optimizer"] == 2 * total // 2
        assert found.peak_bytes["weights"] == (total if memory is ONE else total // 2 + two)
        assert found.peak_bytes["gradients"] == (total // 2 + one if memory is PIECES else total)


# --- planted bugs

def assert_caught(memory, number=2):
    case = ((2, 1, 1), 1, "1f1b", MODEL, memory)
    with pytest.raises(AssertionError, match=r"tensors differ"):
        assert_equals_one_rank(config_for(case, number), expected=computed_once)


@pytest.mark.parametrize("memory", [ONE, PIECES], ids=["1", "3"])
@pytest.mark.ranks(2)
def test_own_piece_off_by_one(monkeypatch, memory):
    plain = Sharding.own
    monkeypatch.setattr(Sharding, "own", lambda self, segments: plain(
        self._replace(comm=SimpleNamespace(
            index=(self.comm.index + 1) % self.comm.size, size=self.comm.size)), segments))
    assert_caught(memory)


@pytest.mark.ranks(2)
def test_weights_gathered_before_the_update(monkeypatch):
    def step(self, lr, step):
        for flat in self.flats:
            for segment in range(len(flat.segments)):
                flat.gather(segment).wait()
                self.update(flat, segment, lr, step)

    monkeypatch.setattr(Sgd, "step", step)
    assert_caught(ONE)


@pytest.mark.ranks(2)
def test_norm_of_the_first_rank_s_pieces(monkeypatch):
    monkeypatch.setattr(ScatterSync, "counts", GradSync.counts)
    assert_caught(ONE)


@pytest.mark.ranks(2)
def test_two_units_in_one_buffer(monkeypatch):
    def make_room(self):
        size = largest(needs for units in self.needs.values() for needs in units)
        return [self.ops.empty((size,), label="weights")] * 2

    monkeypatch.setattr(GatheredUnits, "make_room", make_room)
    assert_caught(THREE)


@pytest.mark.ranks(2)
def test_no_gather_before_the_input_gradient(monkeypatch):
    """The buffer still has what it held before, which is another unit's."""
    plain = GatheredUnits.post

    def post(self, stage, unit, room):
        if self.needs[stage][unit][0][0].sharding.comm.recorder.phase == "F":
            plain(self, stage, unit, room)
            return
        first, posted = 0, []
        for flat, number in self.needs[stage][unit]:
            whole = room[first:first + flat.length(number)]
            first += whole.size
            posted.append((Pending(Done(), list(NO_ENTRY), whole), flat, number, whole))
        self.coming[stage, unit] = posted

    monkeypatch.setattr(GatheredUnits, "post", post)
    assert_caught(THREE)


@pytest.mark.parametrize("memory", [ONE, PIECES], ids=["1", "3"])
@pytest.mark.ranks(2)
def test_means_in_place_of_sums(monkeypatch, memory):
    sync = PieceSync if memory is PIECES else ScatterSync
    plain = sync.finish

    def finish(self):
        plain(self)
        self._scale(1 / self.comms["data"].size)

    monkeypatch.setattr(sync, "finish", finish)
    assert_caught(memory)


@pytest.mark.ranks(2)
def test_gradients_of_another_unit_left_in_the_scratch_buffer(monkeypatch):
    plain = PieceSync.begin_unit

    def begin_unit(self, stage, unit):
        kept, self.ops.fill = self.ops.fill, lambda x, value: None
        plain(self, stage, unit)
        self.ops.fill = kept

    monkeypatch.setattr(PieceSync, "begin_unit", begin_unit)
    assert_caught(PIECES)


@pytest.mark.ranks(2)
def test_weight_gradients_of_a_stash_that_another_microbatch_made(monkeypatch):
    plain = Recomputed.backward_input
    newest = {}

    def backward_input(self, dy, stash):
        dx = plain(self, dy, stash)
        newest[self] = dict(stash[self, "inner"])
        return dx

    def backward_weight(self, stash):
        stash.pop((self, "inner"))
        inner = stash.inner()
        inner.update(newest[self])
        for layer in reversed(self.layers):
            layer.backward_weight(inner)

    monkeypatch.setattr(Recomputed, "backward_input", backward_input)
    monkeypatch.setattr(Recomputed, "backward_weight", backward_weight)
    case = ((1, 2, 1), 1, "zb-h1", MODEL, MemoryConfig("block"))
    with pytest.raises(AssertionError, match=r"tensors differ"):
        assert_equals_one_rank(config_for(case), expected=computed_once)
