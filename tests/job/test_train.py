"""`mpipar train` as a user starts it: losses, weights, console, schedules, evaluations."""

import json
import re

import numpy as np
import pytest
from config_helpers import changed
from helpers import assert_all_close, assert_close, run_command
from in_process import alone, assert_refused
from program import (
    LIMIT,
    PROGRAM,
    TEXT,
    block_of,
    cells,
    environment,
    metrics,
    mpipar,
    section,
    weights,
)
from short_runs import OFTEN, TINY, assert_same_run, evaluations, train

from mpipar.run.data.parts import load

TOLERANCE = 1e-10
ONE, FOUR = (1, 1, 1), (1, 2, 2)  # layouts (dp, pp, tp); lives have the others
# 6 heads of width 3, 7 tokens: odd on purpose; ffn 31 and 256 bytes are padded for 3 ranks.
FIRST = """train --dtype float64 --optimizer sgd --lr 0.5 --warmup-steps 2 --steps 5 --seed 5
    --layers 4 --d-model 18 --heads 6 --ffn 31 --seq-len 7 --batch-size 8 --num-microbatches 2
    --log-interval 2 --sample-tokens 12""".split()
# What must not change a digit.
OTHERWISE = "--dp 1 --pp 2 --tp 2 --num-microbatches 4 --rank-order tp,cp,dp,pp".split()


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    """A short English text, the same everywhere."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    words = "the cat sat on the mat and a dog ran to the old red barn while it was raining".split()
    path.write_text(" ".join(np.random.default_rng(3).choice(words, 800)))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory, text_file):
    """Return {layout: (run folder, what was printed)}."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for layout, ranks, more in ((ONE, None, []), (FOUR, 4, OTHERWISE)):
        out = folder / str(ranks)
        result = mpipar(*FIRST, *more, "--data", text_file, "--out", out, ranks=ranks).ended()
        assert result.stderr == "", result.tail()
        found[layout] = out, result.stdout
    return found


@pytest.fixture(scope="module")
def one_rank(runs):
    """The run folder of one rank; the other is compared with it."""
    return runs[ONE][0]


def test_losses_and_weights_equal_one_rank(runs, one_rank):
    folder, _ = runs[FOUR]
    lines, expected = metrics(folder), metrics(one_rank)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for key in ("loss", "grad_norm", "lr"):
        assert_close(
            [line[key] for line in lines], [line[key] for line in expected], TOLERANCE, key
        )
    assert_all_close(weights(folder), weights(one_rank), TOLERANCE)


@pytest.mark.parametrize("layout", [ONE, FOUR], ids=str)
def test_metrics_have_their_fields(layout, runs):
    folder, _ = runs[layout]
    dp, pp, tp = layout
    num_ranks = dp * pp * tp
    sizes = {"dp": dp, "pp": pp, "tp": tp, "tie": pp, "world": num_ranks}
    for line in metrics(folder):
        assert line["tokens_per_second"] == pytest.approx(8 * 7 / line["step_seconds"])
        assert set(line["comm"]) == {axis for axis, size in sizes.items() if size > 1}
        for counter in line["comm"].values():
            assert counter["calls"] > 0
            assert 0 < counter["seconds_mean"] <= counter["seconds_max"]
        if num_ranks > 1:
            # Summed over ranks: the one barrier of three float64 that each rank takes part in.
            world = line["comm"]["world"]
            assert (world["calls"], world["bytes"]) == (num_ranks, 40 * num_ranks)
        if pp > 1:  # each microbatch crosses pp - 1 cuts both ways, sent once and received once
            act = 8 * (8 // dp) * 7 * 18  # bytes of all its microbatches' activations
            assert line["comm"]["pp"]["bytes"] == 2 * 2 * (pp - 1) * act * dp * tp


# --- the console: layout, progress, barriers, memory, losses, text


@pytest.mark.parametrize("layout", [ONE, FOUR], ids=str)
def test_measured_memory_stands_beside_the_predicted(layout, runs):
    _, text = runs[layout]
    rows = [cells(line) for line in section(text, "memory per rank")]
    assert [row[0] for row in rows[1:]] == [str(i) for i in range(np.prod(layout))]
    for row in rows[1:]:
        assert float(row[3]) > 0.9, "an array that the prediction has was never made"
    predicted = [cells(line)[-1] for line in section(text, "rank host")]
    assert [row[1] for row in rows[1:]] == predicted


def test_memory_is_shown_before_it_is_taken(tmp_path):
    """A model does not fit: its bytes are on the console before the allocation fails."""
    huge = "--layers 2 --d-model 65536 --heads 2 --seq-len 8 --batch-size 2 --num-microbatches 1"
    command = [*PROGRAM, "train", *huge.split(), "--out", str(tmp_path / "run")]
    limited = ["bash", "-c", 'ulimit -v 16777216; exec "$@"', "limited", *command]
    result = run_command(limited, LIMIT, environment()).ended(69)
    assert re.search(r"out of memory: weights of block\d+\..* [\d.]+ GiB for an", result.stderr)
    peak = re.search(r"([\d.]+) GiB$", section(result.stdout, "rank host place")[0])
    assert float(peak[1]) > 4 * 24 * 4 * 65536**2 / 2**30  # weights, gradients and two moments


def test_held_out_loss_and_text_are_those_of_one_rank(runs):
    (_, text), (_, expected) = runs[FOUR], runs[ONE]
    for part in (
        r"^held-out loss (\d\.\d{4}) ",
        r"^byte-bigram model of the same split: (\d\.\d{4});",
        r"text generated from 'The ':\n(\| The (?s:.+?))\n\n",
    ):
        found = re.search(part, text, re.MULTILINE)[1]
        assert found == re.search(part, expected, re.MULTILINE)[1]


# --- the ways to start: `python -m mpipar`, the console script, with a launcher and without


SHORT = """train --layers 1 --d-model 8 --heads 1 --seq-len 4 --batch-size 64 --num-microbatches 1
    --steps 2 --sample-tokens 2""".split()


@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_any_number_of_ranks_gets_a_layout(ranks, tmp_path):
    words = [*SHORT, *TEXT, "--layers", "2", "--batch-size", "60"]
    result = mpipar(*words, ranks=ranks, cwd=tmp_path).ended()
    assert result.stderr == ""
    assert f"{ranks} ranks on 1 host" in result.stdout
    assert len(metrics(tmp_path / "runs" / "0001")) == 2


# --- one process works where no MPI library can be loaded; several ranks are refused with a cure


NOWHERE = {"MPI4PY_LIBMPI": "/nowhere"}
WARNING = "mpipar: warning: MPI cannot be loaded ("


def test_training_computes_what_it_computes_with_a_library(one_rank, text_file, tmp_path):
    words = ["--data", text_file, "--trace", "1:2", "--check-comm", "--out", tmp_path / "run"]
    result = mpipar(*FIRST, *words, env=NOWHERE, cwd=tmp_path).ended()
    assert (result.stderr.count(WARNING), result.stderr.count("\n")) == (1, 1), result.tail()
    wanted, got = metrics(one_rank), metrics(tmp_path / "run")
    assert [line["loss"] for line in got] == [line["loss"] for line in wanted]
    wanted, got = weights(one_rank), weights(tmp_path / "run")
    assert wanted.keys() == got.keys()
    assert all(np.array_equal(got[name], wanted[name]) for name in wanted)


def test_several_ranks_are_refused(tmp_path):
    result = mpipar(*SHORT, *TEXT, ranks=2, env=NOWHERE, cwd=tmp_path)
    block_of(result, 69, "unset MPI4PY_LIBMPI, or load your cluster's MPI")
    assert WARNING not in result.stderr
    assert not (tmp_path / "runs").exists()


# --- schedules from a file


SMALL = [
    *TEXT,
    *"""--layers 4 --d-model 16 --heads 2 --seq-len 8 --batch-size 8
    --num-microbatches 4 --steps 3 --sample-tokens 3 --dtype float64 --layout pp=2""".split(),
]


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_csv_file_with_its_own_sends_trains_evaluates_and_generates(tmp_path):
    rows = [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1",
    ]
    (tmp_path / "full.csv").write_text("\n".join(rows) + "\n")
    result = mpipar(
        "train",
        *SMALL,
        "--num-microbatches",
        2,
        "--out",
        tmp_path / "run",
        "--schedule-csv",
        tmp_path / "full.csv",
        ranks=2,
    ).ended()
    assert "held-out loss" in result.stdout
    assert re.search(r"^worker 1 .* F0 F1 B0", result.stdout, re.MULTILINE), "the file's order"


# --- `mpipar train --steps 0`: the held-out loss of given weights, and nothing that trains


NO_STEPS = """--layers 2 --d-model 8 --heads 2 --seq-len 8 --batch-size 4 --num-microbatches 2
    --dtype float64 --sample-tokens 4 --data text.txt""".split()


def result(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.fixture
def trained(text_folder):
    alone("train", *NO_STEPS, "--steps", "2", "--out", "first", cwd=text_folder).ended()
    return text_folder


def evaluate(folder, *words):
    words = ["--init-from", "first", "--steps", "0", *words]
    return alone("train", *NO_STEPS, *words, cwd=folder).ended()


def test_given_weights_are_evaluated_and_sampled_but_not_written(trained):
    shown = evaluate(trained, "--out", "again").stdout
    expected = result(trained / "first")["held_out_loss"]
    assert result(trained / "again") == {"step": 0, "held_out_loss": expected}
    lines = (trained / "again" / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["held_out_loss"] for line in lines] == [expected]
    assert f"held-out loss {expected:.4f} nats per token" in shown
    assert "text generated from" in shown
    for word in ("trained on", "WARNING", "damaged", "warm-up"):
        assert word not in shown
    assert not list((trained / "again").glob("weights/*.safetensors"))
    assert not (trained / "again" / "checkpoints").exists()


def test_initial_weights_and_a_run_that_goes_on(trained):
    alone("train", *NO_STEPS, "--steps", "0", "--out", "new", cwd=trained).ended()
    assert result(trained / "new")["held_out_loss"] == pytest.approx(5.545, abs=0.01), "ln 256"
    evaluate(trained, "--out", "again")
    words = ["--resume", "auto", "--out", "again", "--steps", "1"]
    shown = alone("train", *words, cwd=trained).ended().stdout
    assert "the run starts at step 1" in shown
    assert result(trained / "again")["step"] == 1


def test_a_run_is_not_resumed_for_no_steps(trained):
    words = ["--resume", "first", "--steps", "0"]
    block = alone("train", *NO_STEPS, *words, cwd=trained).ended(2).stderr
    assert "step 2; use 2 or more, or evaluate its weights with --steps 0 --init-from" in block


# --- evaluation during a run: the run is the same without them; its data; refusals


def test_evaluation_changes_nothing(text_folder):
    train(text_folder, *TINY, "--eval-tokens", 40, "--out", "plain")
    text = train(text_folder, *TINY, *OFTEN, "--out", "often")
    assert_same_run(text_folder / "plain", text_folder / "often")
    found = evaluations(text_folder / "often")
    assert [line["step"] for line in found] == [3, 6, 9, 10]
    assert {line["tokens"] for line in found} == {40}
    assert found[-1:] == evaluations(text_folder / "plain")
    result = json.loads((text_folder / "often" / "result.json").read_text())
    assert result["held_out_loss"] == found[-1]["held_out_loss"]
    for line in found[:-1]:
        assert (
            f"step {line['step']}: held-out loss {line['held_out_loss']:.4f} nats per token"
            " over 40 tokens, "
        ) in text
    assert text.count("2 microbatches (gradient accumulation)") == 1


# --- held-out data of its own


def test_with_val_data_all_of_data_is_trained_on(tmp_path):
    (tmp_path / "a.txt").write_text("abc" * 100)
    (tmp_path / "b.txt").write_text("xyz" * 10)
    (train_part, held_out), what = load(
        changed(
            data=(str(tmp_path / "a.txt"),),
            val_data=(str(tmp_path / "b.txt"),),
            seq_len=5,
            batch_size=4,
        )
    )
    assert (len(train_part), bytes(held_out)) == (300, b"xyz" * 10)
    assert what == "300 bytes from 1 file; held out: 30 bytes from 1 file"


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        ("--val-data nothing.txt", 65, ["nothing.txt: no such file"]),
        ("--val-data short.txt", 65, ["and 3 tokens, but a row needs 64 + 1"]),
        ("--data text.txt --val-data ids.bin", 65, ["--val-data: either it or --data is text"]),
    ],
)
def test_refusals(words, code, parts, tmp_path):
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "text.txt").write_text("some text " * 500)
    np.zeros(500, np.uint16).tofile(tmp_path / "ids.bin")
    assert_refused(code, parts, "train", *words.split(), folder=tmp_path)


# --- 16-bit training: loss curves, skipped steps, what is on the disk


MIXED = """--layers 2 --d-model 16 --heads 2 --seq-len 8 --batch-size 8 --num-microbatches 2
    --log-interval 2""".split()
# Nats between a 16-bit loss curve and float32's, while the loss falls by 2.5: the mean, and the
# largest of all steps. The rate is a stable one. At the default rate this small model's loss has
# spikes, whose heights any rounding changes, even another order of sums in float32.
CURVE = """--layers 2 --d-model 64 --seq-len 32 --log-interval 10 --sample-tokens 0
    --eval-tokens 1024 --steps 80 --lr 2e-3 --tp 2""".split()
MEAN_BAND, LARGEST_BAND = 0.003, 0.02


@pytest.mark.slow
def test_loss_curve_is_float32_s_within_the_band(tmp_path):
    for dtype in ("bfloat16", "float32"):
        words = [*CURVE, "--dtype", dtype, "--out", tmp_path / dtype]
        mpipar("train", *words, ranks=2).ended()
    found, reference = (np.array(losses(tmp_path / dtype)) for dtype in ("bfloat16", "float32"))
    apart = np.abs(found - reference)
    assert reference[0] - reference[-1] > 2.5
    assert apart.mean() <= MEAN_BAND
    assert 0 < apart.max() <= LARGEST_BAND


def test_skipped_steps_are_on_the_console_and_in_the_metrics(tmp_path):
    words = [*MIXED, *TEXT, "--steps", 30, "--dtype", "float16", "--loss-scale", 2**30]
    text = alone("train", *words, "--out", tmp_path / "run").ended().stdout
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


def test_weights_on_disk_are_the_float32_masters(tmp_path):
    """Nothing is lost on the way in: a step with hardly any learning rate writes the same again."""
    first, words = tmp_path / "a", [*MIXED, *TEXT, "--dtype", "bfloat16"]
    alone("train", *words, "--steps", 3, "--out", first).ended()
    found = weights(first)
    assert {x.dtype.name for x in found.values()} == {"float32"}
    assert any((x.view(np.uint32) & 0xFFFF).any() for x in found.values()), "they were bfloat16"
    again = ["--init-from", first / "weights", "--steps", 1, "--lr", "1e-30", "--optimizer", "sgd"]
    alone("train", *words, *again, "--out", tmp_path / "b").ended()
    assert all((weights(tmp_path / "b")[name] == x).all() for name, x in found.items())
