"""Grouped heads, rotary positions, SwiGLU: layouts equal one rank, and planted bugs do not."""

import itertools

import pytest
from small_model import (
    LAYOUTS,
    WORLD,
    assert_caught,
    assert_equals_known,
    assert_records_predicted,
    called,
    plant,
    real_step,
    slow_unless,
    small_config,
    worker_and_step,
)

from mpipar.comm.group import Comm
from mpipar.config.model import model_config
from mpipar.layers.attention import Rotation
from mpipar.layers.param import Param
from mpipar.run.replicas import Replicas

# 8 heads of width 6, which is not D / H; ffn 31 and 29 tokens in the vocabulary are padded.
SHAPE = {
    "layers": 4,
    "d_model": 20,
    "heads": 8,
    "head_dim": 6,
    "ffn": 31,
    "seq_len": 16,
    "vocab_size": 29,
    "rope_theta": 50.0,
    "rope_scaling": (4.0, 1.0, 3.0, 12.0),
}
MODELS = {
    "llama": {"arch": "llama", "kv_heads": 4},
    "mistral": {"arch": "mistral", "kv_heads": 8},
    "qwen2": {"arch": "qwen2", "kv_heads": 2},
    "tied": {"arch": "llama", "kv_heads": 1, "tied": True, "bias": "all"},
    "mixed": {"arch": "gpt2", "positions": "rope", "norm": "rms", "bias": "none", "norm_eps": 0.01},
}
HERE = LAYOUTS[WORLD.size]
# As many ranks of tp as there can be, more than heads of keys and values in most models.
WIDE = {1: (1, 1, 1), 2: (1, 1, 2), 4: (1, 1, 4), 8: (2, 1, 4)}.get(WORLD.size)
# Ranks: (dp, pp, tp), cp.
CP = {2: ((1, 1, 1), 2), 4: ((1, 1, 2), 2), 8: ((1, 1, 4), 2)}.get(WORLD.size)
SHARED = {2: (2, 1, 1), 4: (2, 1, 2)}.get(WORLD.size)
CUT = {
    tp_matmul: {"sequence_parallel": True, "tp_matmul": tp_matmul, "seq_len": 13}
    for tp_matmul in ("plain", "ring")
}
BLOCK = {"sequence_parallel": HERE[-1][2] > 1, "recompute": "block"}
pytestmark = [pytest.mark.ranks(1, 2, 4, 8), pytest.mark.usefixtures("poisoned_memory")]


def config_for(name, layout, num_microbatches=2, **values):
    model = model_config(SHAPE | MODELS[name])
    return small_config(layout, num_microbatches, model, rows_per_mb=4, **values)


def products(quick, *choices):
    """(values, ...) of each combination; those that are not `quick` are for the slow sessions."""
    return slow_unless(lambda *one: one == quick, itertools.product(*choices))


def cases():
    """(name of the model, layout, other values)."""
    yield from slow_unless(
        lambda name, *_: name == "llama",
        [
            *(("llama", layout, {}) for layout in HERE),
            *((name, HERE[-1], {}) for name in MODELS if name != "llama"),
        ],
    )
    yield from products(("tied", WIDE, CUT["ring"]), MODELS, [WIDE], CUT.values())
    yield from products(
        ("tied", HERE[-1], BLOCK), ["tied"], [HERE[-1]], [BLOCK, BLOCK | {"recompute": "attention"}]
    )
    if WORLD.size in (2, 4):
        yield from products(
            ("tied", SHARED, {"zero": 3}), ("llama", "tied"), [SHARED], [{"zero": 1}, {"zero": 3}]
        )
    if CP:
        layout, cp = CP
        yield from products(
            ("qwen2", layout, {"cp": cp, "cp_attention": "ring"}),
            MODELS,
            [layout],
            [{"cp": cp, "cp_attention": method} for method in ("ring", "gather", "ulysses")],
        )
        yield (
            "qwen2",
            {2: (1, 2, 1), 4: (1, 2, 2), 8: (1, 2, 4)}[WORLD.size],
            {"num_microbatches": 4, "schedule": "zb-v"},
        )


@pytest.mark.parametrize(("name", "layout", "values"), [*cases()], ids=str)
def test_layout_equals_one_rank(name, layout, values):
    kv_heads = MODELS[name].get("kv_heads", 8)
    if values.get("cp_attention") == "ulysses" and max(1, kv_heads // layout[2]) % values["cp"]:
        pytest.skip("a rank has fewer heads of keys than ranks of cp")
    assert_equals_known(config_for(name, layout, **values))


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
    assert worker.losses or worker.grid.place("pp") == 0


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
