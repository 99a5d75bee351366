"""The convnet over layouts, schedules and cuts equals one rank to 1e-12.

Its barriers equal formulas, and the comparison finds planted bugs.
"""

import numpy as np
import pytest
from small_model import (
    DP,
    LAYOUTS,
    PP,
    TP,
    WORLD,
    assert_equals_one_rank,
    assert_records_predicted,
    called,
    every,
    plant,
    small_config,
    worker_and_rows,
)

from mpipar.comm.group import Comm
from mpipar.config.model import ConvnetConfig
from mpipar.data.images import ImageSet
from mpipar.inference.classify import accuracy
from mpipar.layers.conv import PatchProduct
from mpipar.layers.linear import Linear
from mpipar.models.convnet import Stem
from mpipar.plan import formulas

# Neither 2 nor 3 divides the channels. Images are 7 x 9 with 2 channels, 3 x 4 behind the stem;
# there are 7 classes. All are padded over tp.
MODEL = ConvnetConfig(layers=5, channels=5, ffn=11, classes=7, image_shape=(7, 9, 2))
CUTS = ["pair", "gather", "reduce"]
HERE = LAYOUTS[WORLD.size]
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def images():
    """Random images and classes, the same on every rank."""
    rng = np.random.default_rng(7)
    return ImageSet(rng.standard_normal((90, *MODEL.image_shape)), rng.integers(0, 7, 90))


def convnet(layout, num_microbatches=2, **values):
    return small_config(layout, num_microbatches, MODEL, rows_per_mb=1, **values)


CASES = [
    *every(
        layout=HERE,
        order=[
            {"schedule": schedule, "num_microbatches": count}
            for schedule, count in (("gpipe", 2), ("1f1b", 1), ("1f1b", 5))
        ],
    ),
    *every(layout=HERE, ffn_cut=CUTS, sync_sends=True),
]
if WORLD.size < 4:
    CASES += every(layout=HERE, norm="rms")
if WORLD.size in (2, 4):
    CASES += every(
        layout=(2, 1, WORLD.size // 2), memory=[{"zero": 1}, {"zero": 3, "zero_grads": "sharded"}]
    )
    CASES += every(
        layout=(1, 2, WORLD.size // 2),
        num_microbatches=4,
        schedule=["zb-h1", "interleaved", "dualpipe", "zb-v"],
    )
if WORLD.size in (4, 8):  # fewer channels than ranks
    CASES += every(
        layout=(1, 1, WORLD.size), num_microbatches=1, ffn_cut=CUTS, layers=1, channels=3, ffn=2
    )


@pytest.mark.parametrize("values", CASES)
def test_layout_equals_one_rank(values):
    assert_equals_one_rank(convnet(**values), images())


@pytest.mark.parametrize("layout", HERE, ids=str)
@pytest.mark.parametrize("ffn_cut", CUTS)
def test_records_are_those_predicted_and_follow_the_formulas(layout, ffn_cut):
    config = convnet(layout, ffn_cut=ffn_cut)
    real, q = assert_records_predicted(config, images())[1].records, config.grid.tp
    costs = formulas.units_of(config)
    for record in real:
        found = formulas.payload(record, costs, q)
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
    sums, gathers = (
        sorted(one.payload_bytes for one in blocks if one.operation == operation)
        for operation in ("all_reduce", "all_gather")
    )
    apart = ([narrow, narrow, wide, wide], sorted(equal * 2))
    expected = {"pair": ([narrow] * 4, []), "gather": apart, "reduce": apart}
    assert (sums, gathers) == (expected[ffn_cut] if blocks else ([], []))


@pytest.mark.parametrize("layout", HERE, ids=str)
def test_accuracy_is_that_of_one_rank(layout):
    config, shares = convnet(layout, 1), []
    for alone in (False, True):
        worker, rows = worker_and_rows(config, spread=0.5, part=images(), alone=alone)
        shares.append(accuracy(worker, rows))
        worker.close()
    found, expected = shares
    assert found == expected
    assert 0 < found[0] < 1, found
    assert found[1] == len(images()), "no image is left out"


# Planted bugs.


def without(name):
    """What leaves out the sum of this barrier."""

    def barrier_dropped(plain, self, x, barrier, op="sum"):
        return x if barrier == name else plain(self, x, barrier, op)

    return barrier_dropped


def collected_in_the_wrong_order(plain, self, x, barrier):
    y = plain(self, x, barrier)
    return y[::-1] if barrier == "block0.down" else y


def weight_gradient_skipped(plain, self, stash):
    if self.comm.index and self.name == "block2.down":
        stash.pop((self.name, "x"))
        stash.pop((self.name, "dy"))
    else:
        plain(self, stash)


def window_that_slides_wrongly_on_one_rank(plain, self, dy, w):
    dx = plain(self, dy, w)
    if WORLD.rank == 1 and self.name == "block3.down":
        dx[:, 0] = 0
    return dx


def stem_bias_without_its_gradient_on_one_copy(plain, self, stash):
    plain(self, stash)
    if WORLD.rank == 1:
        self.conv.b.grad[...] = 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("owner", "name", "twin", "layout", "ffn_cut"),
    [
        *(
            (Comm, "all_reduce", without(barrier), TP, "pair")
            for barrier in ("block1.up", "block1.down", "head")
        ),
        *(
            (Comm, "all_gather", collected_in_the_wrong_order, TP, cut)
            for cut in ("gather", "reduce")
        ),
        (Linear, "backward_weight", weight_gradient_skipped, TP, "pair"),
        (PatchProduct, "matmul_nt", window_that_slides_wrongly_on_one_rank, PP, "pair"),
        (Stem, "backward_weight", stem_bias_without_its_gradient_on_one_copy, DP, "pair"),
    ],
    ids=called,
)
def test_a_planted_bug_is_seen(monkeypatch, owner, name, twin, layout, ffn_cut):
    plant(monkeypatch, owner, name, twin)
    with pytest.raises(AssertionError, match="tensors differ"):
        assert_equals_one_rank(convnet(layout, ffn_cut=ffn_cut), images())
