"""Every layout equals one rank to 1e-12 after a plain SGD step; planted bugs are caught.

Loss, norm, every gradient and every weight are compared.
"""

import pytest
from small_model import (
    EMPTY_STAGES,
    LAYOUTS,
    WORLD,
    assert_caught,
    assert_equals_known,
    called,
    cut_model,
    every,
    plant,
    small_config,
)

from mpipar.comm.group import Comm
from mpipar.layers.parallel.tokens import SequenceShardedTokens
from mpipar.ops.numpy_ops import NumpyOps

HERE = LAYOUTS[WORLD.size]
CUT = [layout for layout in HERE if layout[2] > 1]
MATMULS = ["plain", "ring"]
pytestmark = pytest.mark.usefixtures("poisoned_memory")
SIMPLE = {"naive": 1, "gpipe": 2, "1f1b": 5}  # each with its number of microbatches by default


def is_last(one):
    """Whether this is the last layout with a cut; of three ranks and less all are quick."""
    return WORLD.size < 4 or one["layout"] == CUT[-1]


UNEVEN = {2: [(5, 0), (4, 1), (3, 2)], 4: [(2, 3, 0, 0), (2, 2, 0, 1), (2, 1, 0, 2)]}
HELD = {"sequence_parallel": True, "tp_matmul": MATMULS}
CASES = [
    *every(
        lambda one: SIMPLE[one["schedule"]] == one["num_microbatches"],
        layout=HERE,
        schedule=[*SIMPLE],
        num_microbatches=[*SIMPLE.values()],
    ),
    *every(layout=HERE, changes=[{"tied": False}, {"norm": "rms"}]),
    # two products that stand alone
    *every(layout=HERE, ffn_cut=["gather", "reduce"]),
    *every(layout=HERE, num_microbatches=5),
    *every(layout=HERE, rank_order="tp,cp,dp,pp"),
    *every(layout=(1, WORLD.size, 1), stage_layers=UNEVEN.get(WORLD.size, [])),
    # An empty stage passes on the array that it received.
    *every(
        layout=[one for one in HERE if one[1] == 2],
        num_microbatches=4,
        stages=[{"schedule": schedule, "stage_layers": split} for schedule, split in EMPTY_STAGES],
    ),
    # --sequence-parallel and --tp-matmul ring
    *every(
        is_last,
        layout=CUT,
        **HELD,
        order=[
            {"schedule": schedule, "num_microbatches": count}
            for schedule, count in (("gpipe", 2), ("1f1b", 1), ("1f1b", 5), ("zb-h1", 5))
        ],
    ),
    # fewer tokens than ranks, one each, equally many each; all others have 7
    *every(is_last, layout=CUT, **HELD, seq_len=[1, 2, 8]),
    *every(
        is_last,
        layout=CUT,
        sequence_parallel=True,
        tied=False,
        changes=[{"tp_matmul": "plain", "norm": "rms"}, {"tp_matmul": "ring"}],
    ),
]
if WORLD.size == 4:
    CASES += every(
        layout=(1, 1, 4), **HELD, seq_len=[3, 5, 8], heads=4, d_model=12, ffn=32, layers=2
    )
    # A rank has several stages; gradients are summed over tp.
    CASES += every(
        layout=(1, 2, 2),
        num_microbatches=4,
        rows_per_mb=1,
        sequence_parallel=True,
        tp_matmul="ring",
        schedule=["interleaved", "zb-v"],
    )


@pytest.mark.parametrize("values", CASES)
def test_layout_equals_one_rank(values):
    assert_equals_known(small_config(**values))


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
