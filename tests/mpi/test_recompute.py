"""Blocks that run forward again: every layout equals one rank, bit by bit what it was without."""

from dataclasses import replace

import numpy as np
import pytest
from small_model import (
    MODEL,
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

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.config.memory import MemoryConfig
from mpipar.config.model import ConvnetConfig
from mpipar.data.images import Batch
from mpipar.layers.recompute import Recomputed
from mpipar.pipeline.engine import Engine
from mpipar.plan.predict import predict
from mpipar.train.worker import Worker

pytestmark = pytest.mark.ranks(1, 2, 4)
BLOCK, SOME, SCORES = MemoryConfig("block"), MemoryConfig("block", 1), MemoryConfig("attention")
HELD = replace(MODEL, sequence_parallel=True, seq_len=8)
RING = replace(HELD, tp_matmul="ring")
# Ranks: [((dp, pp, tp), cp, schedule, model, memory)]
CASES = {
    1: [((1, 1, 1), 1, "1f1b", MODEL, BLOCK), ((1, 1, 1), 1, "1f1b", MODEL, SCORES),
        ((1, 1, 1), 1, "1f1b", MODEL, replace(SCORES, recompute_layers=2))],
    2: [((1, 2, 1), 1, "zb-h1", MODEL, BLOCK), ((1, 2, 1), 1, "dualpipe", MODEL, SOME),
        ((1, 1, 2), 1, "gpipe", RING, BLOCK), ((1, 1, 1), 2, "1f1b", HELD, BLOCK)],
    4: [((1, 2, 2), 1, "zb-v", HELD, BLOCK), ((1, 2, 1), 2, "interleaved", HELD, SOME)],
}
HERE = CASES.get(WORLD.size, [])
every_case = pytest.mark.parametrize("case", HERE, ids=lambda case: str(case[:3]))


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Every newly allocated array, receive buffers included, is full of NaN."""
    poison_unwritten(monkeypatch)


def config_for(case, **changes):
    layout, cp, schedule, model, memory = case
    config = small_config(layout, 4, rows_per_mb=2, cp=cp, schedule=schedule, model=model)
    return replace(config, memory=memory, **changes)


@every_case
def test_layout_equals_one_rank(case, poisoned_memory):
    assert_equals_one_rank(with_sync_sends(config_for(case)), expected=computed_once)


@every_case
def test_gradients_are_those_without_it_to_the_last_bit(case):
    """The same functions run on the same inputs. Scores alone are made by other tiles."""
    found = []
    for memory in (case[-1], MemoryConfig()):
        worker, _ = real_step(config_for((*case[:-1], memory)))
        found.append([flat.grad for flat in worker.flats])
    for again, once in zip(*found, strict=True):
        if case[-1].recompute == "attention":
            np.testing.assert_allclose(again, once, rtol=1e-12, atol=1e-15)
        else:
            assert again.tobytes() == once.tobytes()


@every_case
def test_shapes_only_run_predicts_every_record(case):
    config = config_for(case)
    _, recorder = real_step(config)
    shown = [[(one.operation, one.name, one.axis, one.peer, one.payload_bytes, one.phase, one.mb,
               one.site, one.cut) for one in records]
             for records in (recorder.records, predict(config, WORLD.rank).recorder.records)]
    assert shown[0] == shown[1]


@pytest.mark.ranks(1, 2)
def test_what_is_saved_is_what_is_predicted():
    """The peak of arrays falls by the predicted bytes, to 5 % or 1 MiB, whichever is larger."""
    model = replace(MODEL, d_model=96, heads=6, ffn=384, seq_len=128, layers=4)
    layout, found = (1, WORLD.size, 1), []
    for memory in (MemoryConfig(), SCORES, BLOCK):
        config = replace(small_config(layout, 4, rows_per_mb=1, model=model), memory=memory)
        found.append(peaks(config))
    for less in found[1:]:
        assert_saved(found[0], less, under_way=1 << 19)


@pytest.mark.ranks(1, 2)
def test_convnet_has_the_same_gradients():
    model = ConvnetConfig(layers=4, channels=6, ffn=10, classes=7)
    rng, found = np.random.default_rng(3), []
    images, labels = rng.standard_normal((8, 8, 8, 1)), rng.integers(0, 7, 8)
    for memory in (BLOCK, MemoryConfig()):
        config = replace(small_config((1, 1, WORLD.size), 2, model=model), memory=memory)
        worker = Worker(config, Grid.of(config.grid, WORLD.rank),
                        ops_module.make("cpu", "float64"), Recorder(), WORLD)
        worker.initialize(0.02)
        worker.gradients(1, lambda mb: Batch(images[4 * mb:4 * mb + 4], labels[4 * mb:4 * mb + 4]))
        found.append([flat.grad.tobytes() for flat in worker.flats])
        worker.close()
    assert found[0] == found[1]


# --- planted bugs

def assert_caught(case=None):
    with pytest.raises(AssertionError, match=r"tensors differ|in the stash"):
        assert_equals_one_rank(config_for(case or HERE[0]), expected=computed_once)


@pytest.mark.ranks(2)
def test_an_input_that_lies_in_a_receive_buffer(monkeypatch):
    """The next microbatch arrives where the input of a block lies that runs forward again."""
    plain, buffers = Engine._take, {}

    def take(self, instr):
        x = plain(self, instr)
        if instr.kind != "F" or x is None:
            return x
        buffer = buffers.setdefault(x.shape, x)
        self.ops.copy(buffer, x)
        return buffer

    monkeypatch.setattr(Engine, "_take", take)
    assert_caught(((1, 2, 1), 1, "gpipe", MODEL, BLOCK))


@pytest.mark.ranks(1)  # a step that ends in the middle leaves no message
def test_the_result_in_place_of_the_input(monkeypatch):
    def forward(self, x, stash):
        inner = stash.inner()
        for layer in self.layers:
            x = layer.forward(x, inner)
        stash[self, "x"] = x
        return x

    monkeypatch.setattr(Recomputed, "forward", forward)
    assert_caught()
