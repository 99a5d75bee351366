"""bench.step runs, prints its table, and refuses to time a model whose results differ."""

import json
import sys

import numpy as np
import pytest
from helpers import run_ranks
from one_rank import SESSION

from bench.step import __main__ as step
from bench.step.torch_process import ALONE, TOGETHER, TorchProcess
from mpipar.errors import EnvironmentProblem
from mpipar.ops.numpy_ops import NumpyOps

SIZES = """--layers 2 --d-model 24 --heads 4 --seq-len 20 --batch-size 2 --vocab-size 31 --repeats 2
    --no-compiled""".split()
THEIRS = [name for name, how in ALONE.items() if not how.get("compiled")]


def rows_of(path):
    """The rows of a result file by side, after checks that hold for every row."""
    rows = {row["side"]: row for row in json.loads(path.read_text())["rows"]}
    for row in rows.values():
        assert 0 < row["update_ms"] < row["step_ms"]
        assert row["tokens_per_s"] == pytest.approx(40e3 / row["step_ms"])
    return rows


@pytest.mark.peers
def test_one_rank_is_timed_beside_pytorch(tmp_path, capsys):
    path, words = tmp_path / "step.json", ["--arch", "llama", "--kv-heads", "1"]
    assert step.main([*SIZES, *words, "--json", str(path)], SESSION) == 0
    assert "1 rank, 1 thread, 2 steps, losses equal" in capsys.readouterr().out
    rows = rows_of(path)
    assert [side for side in rows if "numba" not in side] == ["mpipar numpy", *THEIRS]
    assert rows["torch"]["over_torch"] == min(rows[side]["over_best"] for side in THEIRS) == 1
    assert all(row["in_communication"] == 0 for row in rows.values())


@pytest.mark.peers
def test_two_ranks_are_timed_beside_pytorch(tmp_path):
    path = tmp_path / "step.json"
    done = run_ranks(2, [sys.executable, "-m", "bench.step", *SIZES, "--json", path], timeout=100)
    assert done.returncode == 0, done.tail()
    assert "2 ranks, 2 threads" in done.stdout
    layouts = [f"mpipar numpy, {one}" for one in ("dp 2", "dp 2 zero 1", "dp 2 zero 3", "tp 2")]
    layouts += [f"mpipar numpy, pp 2 {schedule}" for schedule in step.SCHEDULES]
    own = [f"mpipar numpy, {one}" for one in ("apart", "one rank", "one rank, 2 microbatches")]
    rows = rows_of(path)
    assert [side for side in rows if "numba" not in side] == [*layouts, *own, *THEIRS, *TOGETHER]
    assert rows["mpipar numpy, one rank"]["speedup"] == 1
    for side, row in rows.items():
        assert (row["in_communication"] > 0) == (side.replace("numba", "numpy") in layouts)
        assert (row["speedup"] == "-") != side.startswith("mpipar")


@pytest.mark.peers
def test_a_wrong_gradient_is_not_timed(monkeypatch, capsys):
    """The same step without the fault agrees: test_the_best_form_of_each_is_compared."""
    monkeypatch.setattr(NumpyOps, "layernorm_backward_input", lambda self, dy, *rest: dy.copy())
    assert step.main([*SIZES, "--sides", "best"], SESSION) == 1
    out, err = capsys.readouterr()
    assert "not timed, the models differ: mpipar numpy, step " in err
    assert not out


@pytest.mark.peers
@pytest.mark.parametrize("dtype", step.TOLERANCE)
def test_the_best_form_of_each_is_compared(dtype, tmp_path, capsys):
    path = tmp_path / "step.json"
    words = ["--dtype", dtype, "--sides", "best", "--json", str(path)]
    assert step.main([*SIZES, *words], SESSION) == 0
    assert f"losses equal to {step.TOLERANCE[dtype]:.1g}" in capsys.readouterr().out
    rows = rows_of(path)
    assert list(rows) == ["mpipar numpy", THEIRS[-1]]
    assert "over_torch" not in rows["mpipar numpy"]


@pytest.mark.peers
def test_a_process_of_pytorch_that_ends_is_said(tmp_path):
    process = TorchProcess(tmp_path, step.main.parse(SIZES), 1)
    with pytest.raises(EnvironmentProblem, match="PyTorch's process ended with code 1"):
        process.ask(["no such side", 1])
    with pytest.raises(EnvironmentProblem, match="PyTorch's process ended with code 1"):
        process.ask(["torch", 1])


def test_our_best_form_runs_alone(tmp_path, capsys):
    path = tmp_path / "step.json"
    assert step.main([*SIZES, "--sides", "own", "--json", str(path)], SESSION) == 0
    assert "2 steps, without PyTorch" in capsys.readouterr().out
    assert list(rows_of(path)) == ["mpipar numpy"]


def test_losses_are_compared_on_every_rank():
    names, losses = ["mpipar", "torch", "torch DDP"], np.full((2, 3, 2), 5.0)
    losses[1, 1] = np.nan
    losses[:, 2] = [[4.0, 6.0], [6.0, 4.0]]  # the rows of two ranks
    assert step.disagreement(names, losses, "float32") is None
    losses[1, 0, 1] = 5.1
    assert step.disagreement(names, losses, "float32").startswith("mpipar, step 2: loss 5.1")


def test_ranks_apart_make_a_step_each():
    args = step.main.parse(SIZES)
    seconds = np.full((2, 2, 3, 3), 0.2)  # ranks, sides, repetitions, TIMES
    seconds[..., 2] = 0
    seconds[1, 0, :, :2] = 0.25
    seconds[1, 1] = np.nan
    apart, one = step.table(args, ["mpipar numpy, apart", "mpipar numpy, one rank"], seconds)
    assert apart["step_ms"] == pytest.approx(250)
    assert apart["speedup"] == pytest.approx(2 * 0.4 / 0.5)
    assert apart["tokens_per_s"] == pytest.approx(1.6 * one["tokens_per_s"])


def test_the_slowest_rank_counts_and_pytorch_runs_on_one():
    args = step.main.parse(SIZES)
    seconds = np.full((2, 2, 3, 3), np.nan)  # ranks, sides, repetitions, TIMES
    seconds[0, 0], seconds[1, 0] = (0.2, 0.1, 0.0), (0.1, 0.3, 0.07)
    seconds[0, 1] = (0.5, 0.3, 0.0)
    ours, theirs = step.table(args, ["mpipar", "torch"], seconds, peak_tflops=1e-6)
    assert ours["step_ms"] == pytest.approx(400)
    assert ours["forward_backward_ms"] == pytest.approx(200)
    assert ours["over_torch"] == pytest.approx(0.5)
    assert ours["in_communication"] == pytest.approx(0.1)
    assert theirs["step_ms"] == pytest.approx(800)
    assert theirs["mfu"] == pytest.approx(theirs["tflops"] * 1e6)
    assert ours["mfu"] == pytest.approx(ours["tflops"] * 1e6 / 2)  # of two devices
    (alone,) = step.table(args, ["mpipar"], seconds[:, :1])
    assert not {"mfu", "over_torch"} & set(alone)


def test_operations_of_a_step_are_those_of_the_closed_form():
    args = step.main.parse(SIZES)
    batch, tokens, width, layers, vocabulary = 2, 20, 24, 2, 31
    matrices = 12 * layers * width**2 + vocabulary * width
    assert step.step_flops(args) == (
        6 * batch * tokens * matrices + 12 * layers * batch * tokens**2 * width
    )
