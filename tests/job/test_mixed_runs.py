"""16-bit training from the command line: loss curves, skipped steps, files, refusals."""

import functools
import re

import numpy as np
import pytest
from config_helpers import changed
from in_process import alone, printed
from program import TEXT, cells, metrics, mpipar, section, weights

from mpipar.config.resolve import resolve
from mpipar.study.explain.predict import predict, unit_memory

SMALL = """--layers 2 --d-model 64 --seq-len 32 --log-interval 10 --sample-tokens 0
    --eval-tokens 1024""".split()
TINY = [
    "--layers",
    2,
    "--d-model",
    16,
    "--heads",
    2,
    "--seq-len",
    8,
    "--batch-size",
    8,
    "--num-microbatches",
    2,
    "--log-interval",
    2,
    *TEXT,
]
HALF = ("bfloat16", "float16")
# Nats between a 16-bit loss curve and float32's, while the loss falls by 2.5: the mean, and the
# largest of all steps. The rate is a stable one. At the default rate this small model's loss has
# spikes, whose heights any rounding changes, even another order of sums in float32.
STABLE = ("--lr", 2e-3)
MEAN_BAND, LARGEST_BAND = 0.003, 0.02


def train(out, *words, ranks=2):
    result = mpipar("train", *words, "--out", out, ranks=ranks).ended()
    assert result.stderr == "", result.tail()
    return result.stdout


@pytest.fixture(scope="module")
def curve(tmp_path_factory):
    """A function: dtype -> (losses of 80 steps on two tensor-parallel ranks, console)."""

    @functools.cache
    def made(dtype):
        folder = tmp_path_factory.mktemp("runs") / dtype
        text = train(
            folder, *SMALL, "--steps", 80, *STABLE, "--tp", 2, "--trace", "none", "--dtype", dtype
        )
        return np.array([line["loss"] for line in metrics(folder)]), text

    return made


@pytest.mark.slow
def test_loss_curve_is_float32_s_within_the_band(curve):
    losses, reference = curve("bfloat16")[0], curve("float32")[0]
    apart = np.abs(losses - reference)
    assert reference[0] - reference[-1] > 2.5
    assert apart.mean() <= MEAN_BAND
    assert apart.max() <= LARGEST_BAND
    assert apart.max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_barrier_table_names_the_type_that_travels(curve, dtype):
    rows = [cells(line) for line in section(curve(dtype)[1], "barriers of a step")]
    types = {(row[0], row[1]): row[4] for row in rows[1:]}
    assert types.pop(("tp", "loss")) == "float32"
    assert types.pop(("world", "step.norm")) == "float64"
    assert set(types.values()) == {dtype}
    assert len(types) == 6


def test_skipped_steps_are_on_the_console_and_in_the_metrics(tmp_path):
    text = train(
        tmp_path / "run",
        *TINY,
        "--steps",
        30,
        "--dtype",
        "float16",
        "--layout",
        "pp=2",
        "--loss-scale",
        2**30,
    )
    lines = metrics(tmp_path / "run")
    skipped = [line for line in lines if line["skipped"]]
    assert 0 < len(skipped) < 30
    for i, line in enumerate(skipped):
        scale = 2.0 ** (30 - i)
        assert (line["step"], line["loss_scale"], line["grad_norm"]) == (i + 1, scale, None)
        assert (
            f"step {i + 1}: a gradient overflowed in float16; every rank skipped the update,"
            f" loss scale {scale:g} -> {scale / 2:g}\n"
        ) in text
    assert text.count("every rank skipped") == len(skipped)
    assert re.search(r"step  1/30 loss \S+ norm inf ", text)
    assert all(line["grad_norm"] > 0 for line in lines[len(skipped) :])


@pytest.mark.slow
def test_weights_on_disk_are_the_float32_masters(tmp_path):
    train(tmp_path / "a", *TINY, "--steps", 3, "--dtype", "bfloat16", "--layout", "tp=2")
    found = weights(tmp_path / "a")
    assert {x.dtype.name for x in found.values()} == {"float32"}
    rounded = [x.view(np.uint32) & 0xFFFF for x in found.values()]
    assert any(low.any() for low in rounded), "these were bfloat16 numbers"
    # Nothing is lost on the way in: a step with hardly any learning rate writes the same again.
    train(
        tmp_path / "b",
        *TEXT,
        "--init-from",
        tmp_path / "a" / "weights",
        "--steps",
        1,
        "--dtype",
        "bfloat16",
        "--lr",
        "1e-30",
        "--batch-size",
        8,
        "--num-microbatches",
        2,
        "--optimizer",
        "sgd",
        "--layout",
        "pp=2",
    )
    again = weights(tmp_path / "b")
    assert all((again[name] == x).all() for name, x in found.items())
    for dtype in HALF:
        text = alone(
            "generate",
            tmp_path / "a",
            "--prompt",
            "The ",
            "--sample-tokens",
            4,
            "--dtype",
            dtype,
            "--temperature",
            0,
        ).ended()
        assert text.stdout.startswith("The ")


def test_verify_says_that_it_proves_the_layout_in_float64():
    for words in ("--dtype bfloat16", "--dtype float16 --loss-scale 8"):
        result = alone("verify", *TINY[:8], "--batch-size", 4, *words.split()).ended()
        assert f"in float64 in place of {words.split()[1]}: this proves the layout" in result.stdout
    assert "in place of" not in alone("verify", *TINY[:8], "--batch-size", 4).stdout


def test_explain_states_the_type_of_each_barrier():
    text = printed(
        "explain",
        *TINY[:8],
        "--dtype",
        "bfloat16",
        "--layout",
        "dp=2,pp=2,tp=2",
        "--rank",
        4,
        "--all",
    )
    rows = [cells(line) for line in section(text, "phase  stage")]
    types = {row[6]: row[8] for row in rows}
    assert types["activations"] == types["head"] == "bfloat16"
    assert types["loss"] == types["grads.bucket"] == "float32"
    formulas = {row[6]: row[10] for row in rows}
    assert formulas["activations"] == "B*T*D*e"
    sizes = {row[6]: row[9] for row in rows}
    # default batch of 16 rows: 2 of a microbatch; 8 tokens, width 16
    assert sizes["activations"] == f"{2 * 8 * 16 * 2} B"
    assert sizes["loss"] == f"{2 * 3 * 2 * 8 * 4} B"


@pytest.mark.parametrize(("dtype", "optimizer", "per_parameter"), [
    ("float32", "adamw", 16), ("bfloat16", "adamw", 18), ("float16", "sgd", 10)])  # fmt: skip
def test_weights_count_masters_and_wide_gradients(dtype, optimizer, per_parameter):
    config = resolve(changed(dtype=dtype, optimizer=optimizer, pp=1, tp=1), 1)[0]
    params = predict(config, 0).num_params
    # A tied table is at both ends of the model.
    tied = config.model.vocab_size * config.model.d_model
    assert sum(unit_memory(config)["weight_bytes"]) == per_parameter * (params + tied)
