"""bench.step runs, prints its table, and refuses to time a model whose results differ."""

import ctypes
import json
import sys

import fake_cupy
import numpy as np
import pytest
from bench_rows import ONE, SESSION
from helpers import run_command, run_ranks

from bench.step import __main__ as step
from bench.step import against, blas
from bench.step.sides import flops, losses, measure_steps, products_of, torch_side
from docs.build import tables
from mpipar.errors import UsageError
from mpipar.job.one_rank import OneRank
from mpipar.ops.numpy_ops import NumpyOps

SIZES = """--layers 2 --d-model 24 --heads 4 --seq-len 20 --batch-size 2 --vocab-size 31 --repeats 2
    --no-compiled"""

THEIRS = ["torch", "torch fused attention", "torch fused attention, AdamW"]
ALONE = ["products, numpy", "products, torch"]


def rows_of(path, sides):
    """The rows of a result file by side, after checks that hold for every row."""
    rows = {row["side"]: row for row in json.loads(path.read_text())["rows"]}
    assert [side for side in rows if "numba" not in side] == sides
    assert rows["torch"]["over_torch"] == rows["torch"]["best_over_torch"] == 1
    for side, row in rows.items():
        assert side in ALONE or 0 < row["update_ms"] < row["step_ms"]
        assert row["tokens_per_s"] == pytest.approx(40e3 / row["step_ms"])
    assert rows["torch"]["blas"] == blas.torch_blas()
    assert rows[sides[0]]["blas"] == blas.numpy_blas() != "unknown"
    return rows


@pytest.mark.peers
def test_one_rank_is_timed_beside_pytorch(tmp_path, capsys):
    path = tmp_path / "step.json"
    assert step.main([*SIZES.split(), "--json", str(path)], SESSION) == 0
    assert "1 rank, 1 thread, 2 steps, losses equal" in capsys.readouterr().out
    rows = rows_of(path, ["mpipar numpy", *THEIRS, *ALONE])
    assert rows["mpipar numpy"]["over_products"] > 1
    assert rows["products, numpy"]["over_products"] == "-"
    assert min(rows[side]["over_best"] for side in THEIRS) == 1
    assert all(row["in_communication"] == 0 for row in rows.values())


def test_the_parts_of_a_step_add_up_to_what_a_layout_loses(tmp_path):
    path = tmp_path / "parts.json"
    sizes = SIZES.replace("--no-compiled", "").split()
    argv = [sys.executable, "-m", "bench.step.parts", *sizes, "--json", path]
    run_ranks(2, argv, timeout=100).ended()
    *parts, whole = json.loads(path.read_text())["rows"]
    assert whole["part"] == "all"
    assert {"products", "attention", "communication", "update"} <= {row["part"] for row in parts}
    for axis in ("dp", "tp"):
        assert whole[f"{axis}_more"] == pytest.approx(whole[f"{axis}_ms"] - whole["apart_ms"])
        assert sum(row[f"{axis}_ms"] for row in parts) == pytest.approx(whole[f"{axis}_ms"])
    assert next(row for row in parts if row["part"] == "communication")["apart_ms"] == 0
    done = run_ranks(2, [*argv, "--all-reduce", "fast"], timeout=100).ended(2)
    assert "choose from mpi" in done.stderr


@pytest.mark.peers
def test_two_ranks_are_timed_beside_pytorch_on_two_threads(tmp_path):
    path = tmp_path / "step.json"
    argv = [sys.executable, "-m", "bench.step", *SIZES.split(), "--json", path]
    done = run_ranks(2, argv, timeout=100)
    assert done.returncode == 0, done.tail()
    assert "2 ranks, 2 threads" in done.stdout
    layouts = [f"mpipar numpy, {one} 2" for one in ("dp", "tp")]
    layouts += [f"mpipar numpy, pp 2 {schedule}" for schedule in step.SCHEDULES]
    own = [f"mpipar numpy, {one}" for one in ("apart", "one rank", "one rank, 2 microbatches")]
    rows = rows_of(path, [*layouts, *own, *THEIRS, *ALONE])
    assert rows["mpipar numpy, one rank"]["speedup"] == 1
    for side, row in rows.items():
        assert (row["in_communication"] > 0) == (side.replace("numba", "numpy") in layouts)
        assert (row["speedup"] == "-") != side.startswith("mpipar")


@pytest.mark.peers
def test_llama_is_the_same_model_on_all_sides():
    args = step.parse([*SIZES.split(), "--arch", "llama", "--kv-heads", "1", "--threads", "1"])
    batch = step.rows_of(args)
    names, sides = step.their_sides(args, batch, ONE)
    sides |= step.our_sides(args, batch, ONE)[1]
    assert names == THEIRS
    found = step.losses(sides, list(sides), ONE)
    assert step.disagreement(found, found["torch"], args.dtype) is None


@pytest.mark.peers
def test_a_recipe_with_freed_libraries(tmp_path):
    path = tmp_path / "step.json"
    argv = [
        sys.executable,
        "-m",
        "bench.step",
        "--recipe",
        "nanogpt",
        "--layers",
        "1",
        "--freed",
        "--batch-size",
        "2",
        "--repeats",
        "1",
        "--no-compiled",
        "--json",
        path,
    ]
    done = run_command(argv, timeout=110)
    assert done.returncode == 0, done.tail()
    assert "1 layer, D 128, 4 heads, batch 2 x 64 tokens, V 256" in done.stdout
    rows = {row["side"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["products, torch"]["tflops"] > 0


def test_products_of_a_step_are_all_of_its_products():
    args = step.parse(SIZES.split())
    names, sides = step.our_sides(args, step.rows_of(args), ONE)
    taken = products_of(sides[names[0]], 1)
    attention = 12 * 2 * 2 * 20**2 * 24  # one tile: the full square
    dense = step.step_flops(args) - attention
    assert flops(taken) == dense + attention


def test_mkl_is_answered_with_yes(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = blas.mkl_answer()
    if path is None:
        pytest.skip("no C compiler is installed")
    assert ctypes.CDLL(str(path)).mkl_serv_intel_cpu_true() == 1
    monkeypatch.setattr(blas, "COMPILERS", ())
    assert blas.mkl_answer() is None
    assert not blas.free_mkl()


@pytest.mark.peers
def test_a_wrong_gradient_is_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(NumpyOps, "gelu_backward_input", lambda self, dy, x: dy.copy())
    assert step.main(SIZES.split(), SESSION) == 1
    out, err = capsys.readouterr()
    assert "mpipar numpy, step 2: loss" in err
    assert not out


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sides_of_16_bits_agree_and_a_wrong_gradient_is_seen(monkeypatch, dtype):
    torch = pytest.importorskip("torch")
    args = step.parse([*SIZES.split(), "--dtype", dtype])

    def problem():
        batch = step.rows_of(args)
        _, sides = step.our_sides(args, batch, ONE)
        theirs = sides["torch"] = torch_side(torch, args, batch)
        found = step.losses(sides, list(sides), ONE)
        table = theirs.leaves["embedding.tokens"]
        assert (table.dtype, table.grad.dtype) == (torch.float32, torch.float32)
        assert theirs._weight("embedding.tokens").dtype == getattr(torch, dtype)
        return step.disagreement(found, found["torch"], dtype)

    assert problem() is None
    monkeypatch.setattr(NumpyOps, "layernorm_backward_input", lambda self, dy, *rest: dy.copy())
    assert problem().startswith("mpipar numpy, step ")


def test_ranks_apart_make_a_step_each():
    args = step.parse(SIZES.split())
    seconds = np.full((2, 2, 3, 3), 0.2)  # ranks, sides, repetitions, (two parts, communication)
    seconds[..., 2] = 0
    seconds[1, 0, :, :2] = 0.25
    sides = ["mpipar numpy, apart", "mpipar numpy, one rank"]
    apart, one = step.rows(args, sides, seconds)
    assert apart["step_ms"] == pytest.approx(250)
    assert apart["speedup"] == pytest.approx(2 * 0.4 / 0.5)
    assert apart["tokens_per_s"] == pytest.approx(1.6 * one["tokens_per_s"])


class Noted(OneRank):
    """A world, and a side of it, that note what happens."""

    def __init__(self):
        super().__init__("none is needed")
        self.events = []

    def Ibarrier(self):
        self.events.append("all are here")
        return super().Ibarrier()

    def forward_backward(self, step):
        self.events.append("step")

    def update(self, step):
        """Nothing to do."""

    synchronize = staticmethod(lambda: None)


@pytest.mark.parametrize(
    "run",
    [
        lambda world: losses({"own": world}, ["own"], world),
        lambda world: measure_steps({"own": world}, ["own"], 1, world),
    ],
)
def test_ranks_sleep_until_the_last_side_is_done(run):
    world = Noted()
    run(world)
    assert world.events[-2:] == ["step", "all are here"]


def test_the_slowest_rank_counts_and_pytorch_runs_on_one():
    args = step.parse(SIZES.split())
    seconds = np.zeros((2, 2, 3, 3))  # ranks, sides, repetitions, (two parts, communication)
    seconds[0, 0], seconds[1, 0] = (0.2, 0.1, 0.0), (0.1, 0.3, 0.07)
    seconds[0, 1] = (0.5, 0.3, 0.0)
    ours, theirs = step.rows(args, ["mpipar", "torch"], seconds, peak_tflops=1e-6)
    assert ours["step_ms"] == pytest.approx(400)
    assert ours["forward_backward_ms"] == pytest.approx(200)
    assert ours["over_torch"] == ours["best_over_torch"] == pytest.approx(0.5)
    assert ours["in_communication"] == pytest.approx(0.1)
    assert theirs["step_ms"] == pytest.approx(800)
    assert theirs["mfu"] == pytest.approx(theirs["tflops"] * 1e6)
    assert ours["mfu"] == pytest.approx(ours["tflops"] * 1e6 / 2)  # of two devices
    (alone,) = step.rows(args, ["mpipar"], seconds[:, :1])
    assert not {"mfu", "over_torch", "best_over_torch"} & set(alone)


def test_operations_of_a_step_are_those_of_the_closed_form():
    args = step.parse(SIZES.split())
    batch, tokens, width, layers, vocabulary = 2, 20, 24, 2, 31
    matrices = 12 * layers * width**2 + vocabulary * width
    assert step.step_flops(args) == (
        6 * batch * tokens * matrices + 12 * layers * batch * tokens**2 * width
    )


@pytest.mark.shim
@pytest.mark.slow
@pytest.mark.parametrize(("words", "peak"), [([], 67), (["--dtype", "bfloat16"], 989)])
def test_on_a_device_without_pytorch(monkeypatch, tmp_path, capsys, words, peak):
    """A stand-in for CuPy is used, so the times say nothing about a GPU."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    monkeypatch.setitem(sys.modules, "torch", None)
    path = tmp_path / "step.json"
    argv = [*SIZES.split(), "--device", "cuda", *words, "--json", str(path)]
    assert step.main(argv, SESSION) == 0
    assert "2 steps, without PyTorch" in capsys.readouterr().out
    result = json.loads(path.read_text())
    assert [row["side"] for row in result["rows"]] == ["mpipar cupy fused", "mpipar cupy plain"]
    for row in result["rows"]:
        assert row["mfu"] == pytest.approx(row["tflops"] / peak)
    assert result["machine"]["gpu"] == "NVIDIA H200"
    assert result["machine"]["peak_tflops"] == peak
    typed = step.parse([*argv, "--peak-tflops", "40"])
    assert step.device_facts(typed)["peak_tflops"] == 40


def test_our_best_form_runs_alone(tmp_path, capsys):
    path = tmp_path / "step.json"
    assert step.main([*SIZES.split(), "--sides", "own", "--json", str(path)], SESSION) == 0
    assert "2 steps, without PyTorch" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())["rows"]
    assert row["side"] == "mpipar numpy"


@pytest.mark.peers
def test_the_best_form_of_each_is_compared(tmp_path, capsys):
    path = tmp_path / "step.json"
    assert step.main([*SIZES.split(), "--sides", "best", "--json", str(path)], SESSION) == 0
    assert "losses equal to 1e-05" in capsys.readouterr().out
    rows = {row["side"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["mpipar numpy", THEIRS[-1]]
    assert min(row["over_best"] for row in rows.values()) <= 1 == rows[THEIRS[-1]]["over_best"]
    assert "over_torch" not in rows["mpipar numpy"]


@pytest.mark.slow
@pytest.mark.shim
def test_our_side_on_a_device_computes_what_the_cpu_does(monkeypatch):
    """A stand-in for CuPy is used, so the times say nothing about a GPU."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    found = {}
    for device in ("cpu", "cuda"):
        args = step.parse([*SIZES.split(), "--device", device])
        _, sides = step.our_sides(args, step.rows_of(args), ONE)
        for name, side in sides.items():
            found[name] = []
            for number in range(1, 4):
                found[name].append(side.forward_backward(number))
                side.update(number)
                side.synchronize()
    found.pop("mpipar numba", None)
    assert list(found) == ["mpipar numpy", "mpipar cupy fused", "mpipar cupy plain"]
    assert step.disagreement(found, found["mpipar numpy"], "float32") is None


@pytest.mark.parametrize("peak", ["0", "-1", "nan", "inf"])
def test_a_peak_is_above_zero(peak):
    with pytest.raises(UsageError, match="--peak-tflops must be above 0"):
        step.parse(["--peak-tflops", peak])


def test_the_readme_says_what_the_lead_rests_on():
    def row(side, blas, step_ms):
        return {"side": side, "blas": blas, "step_ms": step_ms}

    rows = [
        row("mpipar numpy", "openblas 0.3 Zen", 90.0),
        row("mpipar numba", "", 80.0),
        row("torch", "mkl AVX2", 120.0),
        row("torch compiled", "mkl AVX2", 100.0),
        row("products, torch", "mkl AVX2", 50.0),
    ]
    assert tables.lead(rows) == (
        "A step takes 0.90x (numpy) and 0.80x (numba) as long as"
        " PyTorch's fastest variant, with Zen and AVX2 products."
    )


def test_a_step_that_takes_longer_than_before_is_told_from_noise():
    noise = [0.9, 0.95, 0.98, 0.99, 1.0, 1.0, 1.01, 1.02, 1.05, 1.1]
    pairs = [({"a": 100.0, "b": 50.0}, {"a": 100 * one, "b": 57 * one}) for one in noise]
    same, slower = against.rows_of_pairs(pairs)
    assert (same["side"], same["ratio"], same["slower"]) == ("a", 1.0, "no")
    assert (slower["side"], slower["ratio"], slower["slower"]) == ("b", 1.14, "yes")
    assert (same["low"], same["high"]) == pytest.approx((0.95, 1.05))


@pytest.mark.parametrize(("count", "cut"), [(6, 0), (8, 0), (9, 1), (10, 1), (12, 2), (20, 5)])
def test_the_median_lies_between_these_two_in_95_of_100_cases(count, cut):
    """The places of tables of the sign test."""
    assert against.interval(range(count)) == (cut, count - 1 - cut)


def test_only_a_checkout_is_compared_with(tmp_path):
    """Else Python finds the packages of the environment, and compares them with themselves."""
    (tmp_path / "mpipar").mkdir()
    with pytest.raises(UsageError, match="is not a checkout"):
        against.check_checkout(tmp_path)
