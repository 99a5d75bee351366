"""`mpipar train` as a user starts it: same losses and weights on every layout, and what it shows."""

import re
import tomllib

import numpy as np
import pytest
from helpers import assert_all_close, assert_close, find_launcher, run_command
from program import (
    LAYOUTS,
    LIMIT,
    PROGRAM,
    cells,
    environment,
    layout_flags,
    metrics,
    mpipar,
    section,
    weights,
)

pytestmark = pytest.mark.skipif(find_launcher() is None, reason="no mpiexec: install .[mpich]")
TOLERANCE = 1e-10
# 6 heads of width 3, 7 tokens: odd on purpose; 256 bytes are padded for 3 ranks.
SMALL = """train --dtype float64 --optimizer sgd --lr 0.5 --warmup-steps 2 --steps 5 --log-interval 2
    --layers 4 --d-model 18 --heads 6 --ffn 30 --seq-len 7 --batch-size 8 --num-microbatches 2
    --sample-tokens 12 --seed 5""".split()
# What must not change a digit: each is tried on one of the layouts.
OPTIONS = {
    (1, 1, 3): "--ffn-cut gather",
    (1, 4, 1): "--schedule gpipe --stage-layers 2,2,0,0",
    (1, 2, 2): "--memory --num-microbatches 4",
    (2, 2, 1): "--sync-sends --bucket-bytes 999",
    (2, 1, 2): "--save-interval 2",
    (2, 2, 2): "--rank-order tp,cp,dp,pp",
}


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    """A short English text, the same everywhere."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    words = "the cat sat on the mat and a dog ran to the old red barn while it was raining".split()
    rng = np.random.default_rng(3)
    path.write_text(" ".join(rng.choice(words, 800)))
    return path


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, text_file):
    """A function: layout -> (run folder, what was printed); each layout runs once."""
    done = {}

    def run(layout):
        if layout not in done:
            folder = tmp_path_factory.mktemp("runs") / "run"
            result = mpipar(*SMALL, "--data", text_file, "--out", folder, *layout_flags(layout),
                            *OPTIONS.get(layout, "").split(), ranks=int(np.prod(layout)))
            assert result.returncode == 0, result.tail()
            assert result.stderr == "", result.tail()
            done[layout] = folder, result.stdout
        return done[layout]

    return run


@pytest.fixture(scope="module")
def one_rank(run_of):
    """The run folder of one rank, which all others are compared with."""
    return run_of((1, 1, 1))[0]


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_losses_and_weights_equal_one_rank(layout, run_of, one_rank):
    folder, _ = run_of(layout)
    lines, expected = metrics(folder), metrics(one_rank)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for key in ("loss", "grad_norm", "lr"):
        assert_close([line[key] for line in lines], [line[key] for line in expected],
                     TOLERANCE, key)
    assert_all_close(weights(folder), weights(one_rank), TOLERANCE)


def test_the_comparison_would_see_a_difference(one_rank, tmp_path, text_file):
    """Losses fall, and another seed gives other ones: nothing above compares constants."""
    lines = metrics(one_rank)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1
    other = [*SMALL, "--seed", "6", "--data", text_file, "--out", tmp_path / "run"]
    assert mpipar(*other).returncode == 0
    for key in ("loss", "grad_norm"):
        with pytest.raises(AssertionError, match=key):
            assert_close([line[key] for line in metrics(tmp_path / "run")],
                         [line[key] for line in lines], 1e-3, key)
    with pytest.raises(AssertionError, match="difference"):
        assert_all_close(weights(tmp_path / "run"), weights(one_rank), 1e-3)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_metrics_have_their_fields(layout, run_of):
    folder, _ = run_of(layout)
    dp, pp, tp = layout
    num_ranks = dp * pp * tp
    axes = {axis for axis, n in (("dp", dp), ("pp", pp), ("tp", tp), ("tie", pp)) if n > 1}
    if num_ranks > 1:
        axes.add("world")
    for line in metrics(folder):
        for key in ("loss", "grad_norm", "lr", "step_seconds", "tokens_per_second"):
            assert isinstance(line[key], float)
            assert line[key] > 0
        assert line["tokens_per_second"] == pytest.approx(8 * 7 / line["step_seconds"])
        assert set(line["comm"]) == axes
        for counter in line["comm"].values():
            assert set(counter) == {"calls", "bytes", "seconds_mean", "seconds_max"}
            assert counter["calls"] > 0
            assert counter["bytes"] > 0
            assert 0 < counter["seconds_mean"] <= counter["seconds_max"]
        if num_ranks > 1:
            # Summed over ranks: the one barrier of three float64 that each rank takes part in.
            world = line["comm"]["world"]
            assert (world["calls"], world["bytes"]) == (num_ranks, 24 * num_ranks)
        if pp > 1:  # each microbatch crosses pp - 1 cuts both ways, sent once and received once
            act = 8 * (8 // dp) * 7 * 18  # bytes of all its microbatches' activations
            assert line["comm"]["pp"]["bytes"] == 2 * 2 * (pp - 1) * act * dp * tp


def test_learning_rate_warms_up_and_falls(one_rank):
    rates = [line["lr"] for line in metrics(one_rank)]
    cosine = [0.05 + 0.45 * 0.5 * (1 + np.cos(np.pi * i / 3)) for i in (1, 2, 3)]
    assert rates == pytest.approx([0.25, 0.5, *cosine], rel=1e-14)


# --- what is shown


def test_console_shows_layout_and_who_holds_what(run_of):
    _, text = run_of((1, 2, 2))
    lines = text.splitlines()
    assert lines[0].startswith("4 ranks on 1 host: dp 1 x pp 2 x tp 2, schedule 1f1b, 2 stages")
    assert "D 18, 6 heads, F 30, T 7, V 256, tied head; sgd, 8 rows per step" in lines[1]
    rows = [cells(line) for line in section(text, "rank host")]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert [row[2] for row in rows] == [f"pp{pp} dp0 tp{tp}" for pp in (0, 1) for tp in (0, 1)]
    assert rows[0][3].startswith("0: embedding, block")
    assert rows[3][3].startswith("1: ")
    assert rows[3][3].endswith("head, loss")
    assert [row[4][:3] for row in rows] == ["1/2", "2/2"] * 2


def test_console_shows_one_step_of_the_schedule(run_of):
    _, text = run_of((1, 2, 2))
    grid = section(text, "one step of 1f1b")
    rows = [line for line in grid if line.startswith("worker ")]
    assert len(rows) == 2
    for row in rows:
        for mb in range(4):
            assert f"F{mb}" in row
            assert f"B{mb}" in row
    assert rows[1].split()[2].startswith("."), "the second worker waits for the first"


STEP_LINE = re.compile(
    r"step (\d)/5 \| loss (\d\.\d{4}) \| gnorm \d\.\d{3} \| lr \d\.\de-\d\d \| \d+ ms"
    r" \| \S+ tok/s \| comm \d+% max \d+% \| eta \d+:\d\d"
)


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_console_has_a_line_per_log_interval(layout, run_of):
    folder, text = run_of(layout)
    found = [STEP_LINE.fullmatch(line) for line in text.splitlines() if line.startswith("step ")]
    assert [match[1] for match in found] == ["1", "2", "4", "5"]
    lines = metrics(folder)
    for match in found:
        assert match[2] == f"{lines[int(match[1]) - 1]['loss']:.4f}"


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_barrier_table_adds_up_to_the_metrics(layout, run_of):
    folder, text = run_of(layout)
    rows = [cells(line) for line in section(text, "barriers of a step")]
    assert rows[0] == ["axis", "barrier", "operation", "phase", "calls/step", "bytes/step",
                       "ms mean", "ms max"]
    calls = {}
    for row in rows[1:]:
        calls[row[0]] = calls.get(row[0], 0) + float(row[4])
    comm = metrics(folder)[-1]["comm"]
    assert calls == {axis: counter["calls"] for axis, counter in comm.items()}
    names = {row[1] for row in rows[1:]}
    assert "step.norm" in names
    assert ("block*.ffn.down" in names) == (layout[2] > 1)
    assert ("grads.bucket" in names) == (layout[0] > 1)


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 1), (2, 1, 2)], ids=str)
def test_console_says_how_much_of_the_gradient_sum_was_hidden(layout, run_of):
    _, text = run_of(layout)
    line = [line for line in text.splitlines() if line.startswith("gradient all-reduce: ")]
    assert len(line) == 1
    if layout[0] > 1:
        assert re.search(r": \d+% of its flight time", line[0])
    else:
        assert "none (dp 1)" in line[0]


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_measured_memory_stands_beside_the_predicted(layout, run_of):
    _, text = run_of(layout)
    rows = [cells(line) for line in section(text, "memory per rank")]
    assert rows[0] == ["rank", "predicted peak", "measured peak", "ratio", "whole process"]
    assert [row[0] for row in rows[1:]] == [str(i) for i in range(np.prod(layout))]
    for row in rows[1:]:
        assert float(row[3]) > 0.9, "an array that the prediction has was never made"
    predicted = [cells(line)[-1] for line in section(text, "rank host")]
    assert [row[1] for row in rows[1:]] == predicted


def test_memory_flag_shows_what_for(run_of):
    _, text = run_of((1, 2, 2))
    rows = [cells(line) for line in section(text, "rank weights")]
    assert len(rows) == 4
    assert "gradients  optimizer" not in run_of((1, 1, 1))[1]
    for row in rows:
        assert row[3] == "0 B", "plain SGD has no state"


def test_memory_is_shown_before_it_is_taken(tmp_path):
    """A model that does not fit: its bytes are on the console before the allocation fails."""
    huge = "--layers 2 --d-model 65536 --heads 2 --seq-len 8 --batch-size 2 --num-microbatches 1"
    command = [*PROGRAM, "train", *huge.split(), "--memory", "--out", str(tmp_path / "run")]
    limited = ["bash", "-c", 'ulimit -v 16777216; exec "$@"', "limited", *command]
    result = run_command(limited, LIMIT, environment())
    assert result.returncode == 70, result.tail()
    assert "MemoryError" in result.stderr
    row = cells(section(result.stdout, "rank weights")[0])
    assert float(row[1].removesuffix(" GiB")) == pytest.approx(24 * 4 * 65536**2 / 2**30, rel=0.01)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_held_out_loss_and_text_are_those_of_one_rank(layout, run_of):
    _, text = run_of(layout)
    _, expected = run_of((1, 1, 1))
    held_out = re.compile(r"^held-out loss (\d\.\d{4}) nats per token over ([\d,]+) tokens"
                          r" \(trained on 280 tokens in [\d.]+ s\)$", re.MULTILINE)
    assert held_out.search(text).groups() == held_out.search(expected).groups()
    bigram = re.compile(r"^byte-bigram model of the same split: (\d\.\d{4}); .* worse$",
                        re.MULTILINE)
    assert bigram.search(text)[1] == bigram.search(expected)[1]
    title = "text generated from 'The ':\n"
    shown = text.split(title)[1].rsplit("\n\nweights, ", 1)[0]
    assert shown == expected.split(title)[1].rsplit("\n\nweights, ", 1)[0]
    assert shown.startswith("The ")
    assert len(shown) > len("The ")


def test_log_file_is_the_console(run_of):
    folder, text = run_of((2, 2, 2))
    assert (folder / "log.txt").read_text() == text
    assert text.splitlines()[-1] == f"weights, metrics.jsonl, config.toml and log.txt are in {folder}"
    names = {path.name for path in folder.iterdir()}
    assert names == {"log.txt", "metrics.jsonl", "config.toml", "weights"}


# --- configuration, run folder, weights


def test_resolved_config_reads_back(run_of, tmp_path):
    folder, _ = run_of((1, 2, 2))
    config = tomllib.loads((folder / "config.toml").read_text())
    assert (config["dp"], config["pp"], config["tp"]) == (1, 2, 2)
    assert config["num-microbatches"] == 4
    assert config["ffn"] == 30
    result = mpipar("train", "--config", folder / "config.toml", "--print-config", ranks=4)
    assert result.returncode == 0, result.tail()
    assert tomllib.loads(result.stdout) == config
    assert list(tmp_path.iterdir()) == []


def test_config_file_gives_the_same_run(run_of, tmp_path, one_rank):
    """The file of one layout, run on another by flags that go before it."""
    folder, _ = run_of((1, 2, 2))
    again = tmp_path / "again"
    result = mpipar("train", "--config", folder / "config.toml", "--out", again,
                    *layout_flags((2, 1, 1)), ranks=2)
    assert result.returncode == 0, result.tail()
    assert_all_close(weights(again), weights(one_rank), TOLERANCE)


def test_weights_of_a_run_start_the_next_one(run_of, one_rank, tmp_path, text_file):
    """Over two layouts and both dtypes, with a step too small to change anything."""
    still = ("train --steps 1 --lr 1e-30 --optimizer sgd --batch-size 4 --num-microbatches 2"
             " --sample-tokens 0")
    single, double = tmp_path / "single", tmp_path / "double"
    result = mpipar(*still.split(), "--data", text_file, "--out", single, "--dtype", "float32",
                    "--init-from", one_rank / "weights", *layout_flags((1, 2, 2)), ranks=4)
    assert result.returncode == 0, result.tail()
    result = mpipar(*still.split(), "--data", text_file, "--out", double, "--dtype", "float64",
                    "--init-from", single / "weights", *layout_flags((1, 1, 3)), ranks=3)
    assert result.returncode == 0, result.tail()
    for name, trained in weights(one_rank).items():
        kept = weights(single)[name]
        assert kept.dtype == np.float32
        assert np.abs(kept - trained.astype(np.float32)).max() < 1e-25, name
        assert np.abs(weights(double)[name] - kept).max() < 1e-25, name
    # The shape came with the weights; nobody typed it.
    config = tomllib.loads((single / "config.toml").read_text())
    assert [config[key] for key in ("layers", "d-model", "heads", "ffn", "seq-len")] == [
        4, 18, 6, 30, 7]


def test_weights_are_saved_on_the_way(tmp_path, text_file):
    """A rate that no loss survives: the run fails in its second step, the first is on the disk."""
    flags = [*SMALL, "--lr", "1e200", "--clip", "0", "--sample-tokens", "0", "--data", text_file]
    broken, first = tmp_path / "broken", tmp_path / "first"
    result = mpipar(*flags, "--out", broken, "--save-interval", "1", ranks=2)
    assert result.returncode == 79, result.tail()
    assert [line["step"] for line in metrics(broken)] == [1]
    assert mpipar(*flags, "--out", first, "--steps", "1", ranks=2).returncode == 0
    saved, expected = weights(broken), weights(first)
    assert max(np.abs(x).max() for x in expected.values()) > 1e190
    for name, x in expected.items():
        np.testing.assert_array_equal(saved[name], x, err_msg=name)
