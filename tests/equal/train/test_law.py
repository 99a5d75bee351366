"""The law of equality: every layout gives one rank's results to 1e-12; planted bugs do not.

Loss, norm, every gradient, and every weight after a plain SGD step are compared. Layouts,
schedules, cuts, recomputation, ZeRO, context parallelism, models and experts are drawn: every two
values meet.
Receive buffers are full of NaN before a message is there, and every send waits for its receiver.
"""

import pytest
from drawn import ROWS, cases, config_of, text_of
from small_model import (
    LAYOUTS,
    WORLD,
    assert_caught,
    assert_equals_known,
    called,
    cut_model,
    plant,
    small_config,
)

from mpipar.comm.group import Comm
from mpipar.layers.parallel.tokens import SequenceShardedTokens
from mpipar.models import decoder
from mpipar.ops.numpy_ops import NumpyOps

CUT = [layout for layout in LAYOUTS[WORLD.size] if layout[2] > 1]
MATMULS = ["plain", "ring"]
QUICK = {1: 8, 2: 24, 4: 24}.get(WORLD.size, 50)  # the first cases have most of the pairs
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=text_of(case), marks=[pytest.mark.slow] * (number >= QUICK))
        for number, case in enumerate(cases(WORLD.size))
    ],
)
def test_layout_equals_one_rank(case, monkeypatch):
    for name, row in ROWS.items():
        monkeypatch.setitem(decoder.BLOCKS, name, row)
    assert_equals_known(config_of(case))


# --- planted bugs of --sequence-parallel


def not_reduced(plain, self, x, name, op="sum"):
    return x if name == "grads.tp" else plain(self, x, name, op)


def reduced_twice(plain, self, x, name, op="sum"):
    return plain(self, plain(self, x, name, op) if name == "grads.tp" else x, name, op)


def positions_of_the_first_rank(_plain, self, positions):
    return positions[: self.length(len(positions))]


def padding_that_is_not_zero(plain, self, shape, dtype=None, label="stash"):
    """Padding after the last token must not reach a gradient."""
    x = plain(self, shape, dtype, label)
    if label == "buffers" and x.dtype.kind == "f":
        x.fill(1.0)
    return x


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("owner", "name", "twin", "options"),
    [
        (Comm, "all_reduce", not_reduced, {"norm": "layer"}),
        (Comm, "all_reduce", not_reduced, {"norm": "rms"}),
        (Comm, "all_reduce", reduced_twice, {}),
        (SequenceShardedTokens, "positions", positions_of_the_first_rank, {}),
        *((NumpyOps, "zeros", padding_that_is_not_zero, {"tp_matmul": one}) for one in MATMULS),
    ],
    ids=called,
)
def test_a_planted_bug_is_seen(monkeypatch, owner, name, twin, options):
    plant(monkeypatch, owner, name, twin)
    assert_caught(small_config(CUT[0], model=cut_model(**options)))
