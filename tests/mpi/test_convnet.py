"""The convnet over layouts, schedules and cuts equals one rank to 1e-12.

Its barriers equal formulas, and the comparison finds planted bugs.
"""

from dataclasses import replace
from operator import attrgetter

import numpy as np
import pytest
from small_model import (
    LAYOUTS,
    WORLD,
    assert_equals_one_rank,
    poison_unwritten,
    small_config,
    with_sync_sends,
)

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.group import Comm
from mpipar.comm.record import Recorder
from mpipar.config.memory import MemoryConfig
from mpipar.config.model import ConvnetConfig
from mpipar.data.images import ImageSet, Rows
from mpipar.inference.classify import accuracy
from mpipar.layers.conv import PatchProduct
from mpipar.layers.linear import Linear
from mpipar.models.convnet import Stem
from mpipar.plan import formulas
from mpipar.plan.predict import predict
from mpipar.train.worker import Worker

# Neither 2 nor 3 divides the channels. Images are 7 x 9 with 2 channels, 3 x 4 behind the stem;
# there are 7 classes. All are padded over tp.
MODEL = ConvnetConfig(layers=5, channels=5, ffn=11, classes=7, image_shape=(7, 9, 2))
CUTS = ("pair", "gather", "reduce")
HERE = LAYOUTS[WORLD.size]


def images():
    """Random images and classes, the same on every rank."""
    rng = np.random.default_rng(7)
    return ImageSet(rng.standard_normal((90, *MODEL.image_shape)), rng.integers(0, 7, 90))


def convnet(layout, num_microbatches=2, ffn_cut="pair", norm="layer", **grid):
    model = replace(MODEL, ffn_cut=ffn_cut, norm=norm)
    return small_config(layout, num_microbatches, model, rows_per_mb=1, **grid)


def assert_equal(config):
    assert_equals_one_rank(config, images())


def real_step(config):
    """One step of this rank: its records."""
    ops, recorder = ops_module.make("cpu", "float64"), Recorder()
    worker = Worker(config, Grid.of(config.grid, WORLD.rank), ops, recorder, WORLD)
    worker.initialize()
    rows = Rows(ops, images(), config, worker.grid)
    worker.train_step(1, lambda mb: rows.train(1, mb))
    worker.close()
    return recorder.records


@pytest.mark.parametrize(("schedule", "num_microbatches"), [
    ("gpipe", 2), ("1f1b", 1), ("1f1b", 5)])
@pytest.mark.parametrize("layout", HERE, ids=str)
def test_layout_equals_one_rank(monkeypatch, layout, schedule, num_microbatches):
    poison_unwritten(monkeypatch)
    assert_equal(convnet(layout, num_microbatches, schedule=schedule))


@pytest.mark.parametrize("layout", HERE, ids=str)
@pytest.mark.parametrize("ffn_cut", CUTS)
def test_every_cut_equals_one_rank(monkeypatch, layout, ffn_cut):
    poison_unwritten(monkeypatch)
    assert_equal(with_sync_sends(convnet(layout, 2, ffn_cut)))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("layout", HERE, ids=str)
def test_rmsnorm_equals_one_rank(layout):
    assert_equal(convnet(layout, norm="rms"))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("memory", [MemoryConfig(zero=1),
                                    MemoryConfig(zero=3, zero_grads="sharded")],
                         ids=["zero-1", "zero-3"])
def test_zero_equals_one_rank(monkeypatch, memory):
    poison_unwritten(monkeypatch)
    assert_equal(replace(convnet((2, 1, WORLD.size // 2)), memory=memory))


@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize("ffn_cut", CUTS)
def test_fewer_channels_than_ranks_equal_one_rank(monkeypatch, ffn_cut):
    poison_unwritten(monkeypatch)
    config = convnet((1, 1, WORLD.size), 1, ffn_cut)
    assert_equal(replace(config, model=replace(config.model, layers=1, channels=3, ffn=2)))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved", "dualpipe", "zb-v"])
def test_other_schedules_equal_one_rank(schedule):
    assert_equal(convnet((1, 2, WORLD.size // 2), 4, schedule=schedule))


@pytest.mark.parametrize("layout", HERE, ids=str)
@pytest.mark.parametrize("ffn_cut", CUTS)
def test_records_are_those_predicted_and_follow_the_formulas(layout, ffn_cut):
    config = convnet(layout, 2, ffn_cut)
    what = attrgetter("operation", "name", "phase", "payload_bytes", "site", "cut")
    real = real_step(config)
    predicted = predict(config, WORLD.rank).recorder.records
    assert list(map(what, real)) == list(map(what, predicted))
    q = config.grid.tp
    for record in real:
        found = formulas.payload(record, config, q)
        if found is not None:
            assert found[1] == record.payload_bytes, (record, found)
        else:
            assert record.name.startswith(("grads.", "step.")), record
    if q == 1:
        return
    # By hand, per microbatch: B 5 or 10 images of 3 x 4 places, 8 bytes; 5 or 11 channels, which
    # are gathered in equal pieces: 3 of 2 or 2 of 3, 3 of 4 or 2 of 6.
    num_rows = config.train.batch_size // (config.grid.dp * 2)
    narrow, wide, *equal = (8 * num_rows * 3 * 4 * channels for channels in (5, 11, 6, 12))
    blocks = [one for one in real if one.name.startswith("block0.")]
    sums, gathers = (sorted(one.payload_bytes for one in blocks if one.operation == operation)
                     for operation in ("all_reduce", "all_gather"))
    apart = ([narrow, narrow, wide, wide], sorted(equal * 2))
    expected = {"pair": ([narrow] * 4, []), "gather": apart, "reduce": apart}
    assert (sums, gathers) == (expected[ffn_cut] if blocks else ([], []))


@pytest.mark.parametrize("layout", HERE, ids=str)
def test_accuracy_is_that_of_one_rank(layout):
    def share(config, grid, world):
        ops = ops_module.make("cpu", "float64")
        worker = Worker(config, grid, ops, Recorder(), world)
        worker.initialize(0.5)
        found = accuracy(worker, Rows(ops, images(), config, grid))
        worker.close()
        return found

    config = convnet(layout, 1)
    alone = replace(config, grid=replace(config.grid, dp=1, pp=1, tp=1))
    found = share(config, Grid.of(config.grid, WORLD.rank), WORLD)
    assert found == share(alone, Grid(0), None)
    assert 0 < found[0] < 1, found
    assert found[1] == len(images()), "no image is left out"


# Planted bugs.

def assert_caught(config):
    with pytest.raises(AssertionError, match="tensors differ"):
        assert_equal(config)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", ["up", "down", "head"])
def test_a_dropped_barrier_is_caught(monkeypatch, case):
    name = {"up": "block1.up", "down": "block1.down", "head": "head"}[case]
    plain = Comm.all_reduce

    def all_reduce(self, x, barrier, op="sum"):
        return x if barrier == name else plain(self, x, barrier, op)

    monkeypatch.setattr(Comm, "all_reduce", all_reduce)
    assert_caught(convnet((1, 1, 2)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ffn_cut", ["gather", "reduce"])
def test_channels_collected_in_the_wrong_order_are_caught(monkeypatch, ffn_cut):
    plain = Comm.all_gather

    def all_gather(self, x, barrier):
        y = plain(self, x, barrier)
        return y[::-1] if barrier == "block0.down" else y

    monkeypatch.setattr(Comm, "all_gather", all_gather)
    assert_caught(convnet((1, 1, 2), ffn_cut=ffn_cut))


@pytest.mark.ranks(2)
def test_a_skipped_weight_gradient_is_caught(monkeypatch):
    def backward_weight(self, stash):
        stash.pop((self.name, "x"))
        stash.pop((self.name, "dy"))

    plain = Linear.backward_weight
    monkeypatch.setattr(
        Linear, "backward_weight",
        lambda self, stash: (backward_weight if self.comm.index and self.name == "block2.down"
                             else plain)(self, stash))
    assert_caught(convnet((1, 1, 2)))


@pytest.mark.ranks(2)
def test_a_window_that_slides_wrongly_on_one_rank_is_caught(monkeypatch):
    plain = PatchProduct.matmul_nt

    def backward_input(self, dy, w):
        dx = plain(self, dy, w)
        if WORLD.rank == 1 and self.name == "block3.down":
            dx[:, 0] = 0
        return dx

    monkeypatch.setattr(PatchProduct, "matmul_nt", backward_input)
    assert_caught(convnet((1, 2, 1)))


@pytest.mark.ranks(2)
def test_a_stem_bias_without_its_gradient_on_one_copy_is_caught(monkeypatch):
    plain = Stem.backward_weight

    def backward_weight(self, stash):
        plain(self, stash)
        if WORLD.rank == 1:
            self.conv.b.grad[...] = 0

    monkeypatch.setattr(Stem, "backward_weight", backward_weight)
    assert_caught(convnet((2, 1, 1)))
