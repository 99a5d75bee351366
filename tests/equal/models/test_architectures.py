"""Grouped heads, rotary positions, SwiGLU: copies, types, records, and planted bugs."""

import pytest
from drawn import MODELS
from small_model import (
    LAYOUTS,
    WORLD,
    assert_caught,
    assert_records_predicted,
    called,
    plant,
    real_step,
    small_config,
    worker_and_step,
)

from mpipar.comm.group import Comm
from mpipar.layers.attention import Rotation
from mpipar.layers.param import Param
from mpipar.run.replicas import Replicas

HERE = LAYOUTS[WORLD.size]
# As many ranks of tp as there can be, more than heads of keys and values in most models.
WIDE = {1: (1, 1, 1), 2: (1, 1, 2), 4: (1, 1, 4), 8: (2, 1, 4)}.get(WORLD.size)
# Ranks: (dp, pp, tp), cp.
CP = {2: ((1, 1, 1), 2), 4: ((1, 1, 2), 2), 8: ((1, 1, 4), 2)}.get(WORLD.size)
CUT = {
    tp_matmul: {"sequence_parallel": True, "tp_matmul": tp_matmul, "seq_len": 13}
    for tp_matmul in ("plain", "ring")
}
pytestmark = [pytest.mark.ranks(1, 2, 4, 8), pytest.mark.usefixtures("poisoned_memory")]


def config_for(name, layout, num_microbatches=2, **values):
    model = MODELS[name]
    return small_config(layout, num_microbatches, model, rows_per_mb=4, **values)


@pytest.mark.parametrize("tp_matmul", CUT)
def test_copies_of_shared_heads_stay_equal(tp_matmul):
    """Ranks that hold one head of keys add up its gradient identically, to the last bit."""
    worker, step = worker_and_step(config_for("tied", WIDE, optimizer="adamw", **CUT[tp_matmul]))
    copies = Replicas(worker)
    step(1)
    copies.check(1)
    worker.close()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_types_train(dtype):
    worker, _ = real_step(config_for("qwen2", WIDE, dtype=dtype))
    assert worker.losses or worker.grid.group_rank("pp") == 0


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_shapes_only_run_predicts_every_record(name):
    assert_records_predicted(config_for(name, WIDE))


def replicas_without_their_sum(plain, self, x, name, op="sum"):
    return x if self.axis == "kv" else plain(self, x, name, op)


def replicas_that_count_twice(plain, self, *arguments, **named):
    plain(self, *arguments, **named)
    self.owner = self.owner or bool(self.placement)


def positions_of_a_rank_s_own_tokens(plain, self, x, positions):
    """Counted from the first token that the rank holds, not from the start of the row."""
    plain(self, x, positions - positions[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("owner", "names", "twin"),
    [
        (Comm, ["all_reduce"], replicas_without_their_sum),
        (Param, ["__init__"], replicas_that_count_twice),
        (Rotation, ["forward", "backward"], positions_of_a_rank_s_own_tokens),
    ],
    ids=called,
)
def test_a_planted_bug_is_seen(monkeypatch, owner, names, twin):
    for name in names:
        plant(monkeypatch, owner, name, twin)
    assert_caught(
        config_for("llama", CP[0], cp=CP[1], cp_attention="ulysses")
        if owner is Rotation
        else config_for("tied", WIDE)
    )
