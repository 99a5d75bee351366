"""The GPU benchmark's arithmetic and checks, on a stand-in for CuPy; real times need a GPU."""

import json
import sys

import fake_cupy
import pytest
import stand_in

from bench import tiles
from bench.kernels import gpu, gpu_memory, gpu_products
from mpipar.errors import EXIT_CHECK_FAILED, EnvironmentProblem, UsageError
from mpipar.ops.cuda import ladder
from mpipar.ops.cuda.attention import MOST_WIDTH, Attention
from mpipar.ops.cuda.fused import Fused

SIZE = (40, 24, 16)
SIZES = "--rows 24 --width 20 --seq-len 12 --heads 2 --repeats 2".split()
GPU_SIZES = ["--device", "cuda", *SIZES]


@pytest.fixture
def card(monkeypatch):
    """A device called H200 on which everything takes a millisecond."""
    stand_in.put_in(monkeypatch)
    monkeypatch.setattr(fake_cupy.cuda, "get_elapsed_time", lambda start, stop: 1.0)
    monkeypatch.setattr(gpu_memory, "VOCABULARY", 300)
    return gpu.Gpu(repeats=2)


@pytest.mark.shim
def test_products(card, monkeypatch):
    monkeypatch.setattr(ladder, "RUNGS", {name: ladder.RUNGS[name] for name in ("naive", "mma")})
    rows = gpu_products.product_rows(card, [SIZE])
    assert [row["kernel"] for row in rows] == ["cuBLAS", "cuBLAS TF32", "naive", "cuBLAS", "mma"]
    flops = 2 * 40 * 24 * 16
    for row in rows:
        assert row["tflop_per_s"] == pytest.approx(flops / 1e-3 * 1e-12)
        assert row["percent_of_cublas"] == 100.0
    roofs = [100 * row["tflop_per_s"] / row["percent_of_roof"] for row in rows]
    assert roofs == pytest.approx([67, 495, 67, 989, 989])
    monkeypatch.setitem(gpu.TOLERANCE, "tf32", 0.0)
    with pytest.raises(ValueError, match=r"cuBLAS TF32 .*, tf32: off by"):
        gpu_products.product_rows(card, [SIZE])


@pytest.mark.slow
@pytest.mark.shim
def test_sweep(card, monkeypatch):
    warp, mma = (gpu_products.SWEEPS[rung] for rung in ("warp", "mma"))
    sweeps = {"warp": [warp[i] for i in (0, 5)], "mma": [mma[0]]}  # each one takes g++ seconds
    monkeypatch.setattr(gpu_products, "SWEEPS", sweeps)
    starved, full, _ = gpu_products.sweep_rows(card, (130, 70, 40))
    assert (starved["threads"], full["threads"]) == (32, 256)
    assert starved["flop_per_byte"] == pytest.approx(2 * 32 * 16 / (48 * 4))
    assert full["flop_per_byte"] == pytest.approx(32)


@pytest.mark.shim
@pytest.mark.slow
def test_kernels_between_the_products(card):
    found = gpu_memory.memory_rows(card, tiles.main.parse(GPU_SIZES))
    rows = {(row["kernel"], row["dtype"]): row for row in found}
    public = {name for name in vars(Fused) if not name.startswith("_")}
    assert {name for name, _ in rows} == public
    assert {dtype for _, dtype in rows} == {"float32", "bfloat16"}
    elements = 24 * 20
    assert rows["gelu_forward", "float32"]["MB"] == pytest.approx(2 * elements * 4e-6)
    assert rows["gelu_forward", "bfloat16"]["MB"] == pytest.approx(2 * elements * 2e-6)
    assert rows["adamw_runs", "float32"]["MB"] == pytest.approx(28 * elements * 1e-6)
    assert rows["adamw_runs", "bfloat16"]["MB"] == pytest.approx(30 * elements * 1e-6)
    assert rows["cross_entropy_forward", "float32"]["MB"] == pytest.approx(6 * 300 * 4e-6)
    for row in rows.values():
        assert row["gb_per_s"] == pytest.approx(row["MB"])  # in a millisecond
        assert row["percent_of_copy"] == 100.0
        assert row["percent_of_roof"] == pytest.approx(100 * row["MB"] / 4800)


@pytest.mark.shim
@pytest.mark.slow
def test_attention(card, monkeypatch):
    assert gpu_products.HEAD_WIDTH <= MOST_WIDTH
    monkeypatch.setattr(gpu_products, "HEAD_WIDTH", 10)  # independent of the width of the chains
    found = gpu_products.attention_rows(card, tiles.main.parse([*GPU_SIZES, "--width", "900"]))
    rows = {(row["kernel"], row["pass"], row["dtype"]): row for row in found}
    assert {name for name, _, _ in rows} == {"whole scores", "tiles"}
    scores = 2 * 2 * 12 * 12  # of batch and heads
    assert rows["whole scores", "forward", "float32"]["kept_MB"] == pytest.approx(4e-6 * scores)
    assert rows["tiles", "forward", "float32"]["kept_MB"] == pytest.approx(
        4e-6 * (24 * 20 + 2 * 2 * 12 * 2)
    )
    for (name, part, _), row in rows.items():
        flops = (2 if part == "forward" else 4) * scores * 10
        assert row["tflop_per_s"] == pytest.approx(flops / 1e-3 * 1e-12), name
        assert row["times_whole_scores"] == 1.0
    monkeypatch.setattr(Attention, "backward", lambda self, *arrays, **named: None)
    with pytest.raises(ValueError, match="attention backward, tiles, float32: off by"):
        gpu_products.attention_rows(card, tiles.main.parse(GPU_SIZES))


@pytest.mark.shim
def test_a_wrong_product_ends_the_run(card, monkeypatch, capsys):
    monkeypatch.setattr(
        gpu_products, "product_rows", lambda gpu, sizes: gpu_products.sweep_rows(gpu, SIZE)
    )
    monkeypatch.setattr(ladder, "grid", lambda kernel, rows, columns: (1, 1))
    assert tiles.main([*GPU_SIZES, "--tables", "products"], None) == EXIT_CHECK_FAILED
    assert (
        "not timed: warp (32, 16, 8, 32, 16) of (40, 16) x (16, 24), float32: off by nan"
        in capsys.readouterr().err
    )


@pytest.mark.shim
@pytest.mark.parametrize(
    ("kernel", "others"),
    [
        ("causal_softmax_backward", ("chains", "llama")),
        ("bias_backward_weight", ("llama", "softmaxes")),
    ],
)
def test_a_kernel_that_does_nothing_is_not_timed(card, monkeypatch, kernel, others):
    for name in others:  # compiling their kernels would take a quarter of a minute
        monkeypatch.setattr(gpu_memory, name, lambda *_: [])
    monkeypatch.setattr(Fused, kernel, lambda self, *arrays, **named: None)
    with pytest.raises(ValueError, match=f"{kernel}, float32: off by"):
        gpu_memory.memory_rows(card, tiles.main.parse(GPU_SIZES))


def test_every_call_is_timed_after_the_caches_are_emptied(card, monkeypatch):
    """The order is fill, start, call, stop; the warm-up does not count."""
    done, times = [], iter(range(100))

    class Event:
        def record(self):
            self.at = next(times)
            done.append("event")

        def synchronize(self):
            done.append("wait")

    monkeypatch.setattr(fake_cupy.cuda, "Event", Event)
    monkeypatch.setattr(fake_cupy.cuda, "get_elapsed_time", lambda start, stop: start.at)
    monkeypatch.setattr(fake_cupy.DeviceArray, "fill", lambda self, value: done.append("fill"))
    device, host = card.timed(lambda: done.append("call"))
    assert done == ["fill", "event", "call", "event"] * (gpu.WARM_UP + 2) + ["wait"]
    assert device == pytest.approx(1e-3 * (2 * gpu.WARM_UP + 1))  # between starts 6 and 8
    assert host > 0


def test_tables_say_which_card_in_which_state(card, tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "$@" >&2\necho 580.1, 1980, 1980, 3201, 700.00\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for name in ("product_rows", "sweep_rows"):
        monkeypatch.setattr(gpu_products, name, lambda gpu, **size: [{"kernel": "none"}])
    for module, name in ((gpu_products, "attention_rows"), (gpu_memory, "memory_rows")):
        monkeypatch.setattr(module, name, lambda gpu, args: [{"kernel": "none"}])
    assert tiles.main([*GPU_SIZES, "--json", str(tmp_path / "out")], None) == 0
    machines = {
        path.stem: json.loads(path.read_text())["machine"] for path in (tmp_path / "out").iterdir()
    }
    assert set(machines) == {"gpu_products", "gpu_tiles", "gpu_attention", "gpu_memory"}
    for machine in machines.values():
        assert machine["gpu"] == "NVIDIA H200"
        assert machine["date"]
        assert (machine["driver"], machine["sm_mhz"], machine["power_limit_w"]) == (
            "580.1",
            "1980",
            "700.00",
        )
    assert machines["gpu_memory"]["seq_len"] == 12
    monkeypatch.setenv("PATH", "")
    assert card.facts()["clocks"] == "unknown: no nvidia-smi"


def test_one_table_of_smaller_products(card, tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        gpu_products,
        "product_rows",
        lambda gpu, sizes: asked.update(products=sizes) or [{"kernel": "none"}],
    )
    monkeypatch.setattr(
        gpu_products,
        "sweep_rows",
        lambda gpu, size: asked.update(tiles=size) or [{"kernel": "none"}],
    )
    words = ["--tables", "products", "tiles", "--largest", "1024", "--json", str(tmp_path)]
    assert tiles.main([*GPU_SIZES, *words], None) == 0
    assert asked == {
        "tiles": (1024, 1024, 1024),
        "products": (
            (1024, 1024, 1024),
            (1024, 768, 768),
            (1024, 1024, 768),
            (1024, 768, 1024),
            (1024, 1024, 1023),
        ),
    }
    assert {path.name for path in tmp_path.iterdir()} == {"gpu_products.json", "gpu_tiles.json"}
    with pytest.raises(UsageError, match="--tables and --largest are for a GPU"):
        tiles.main.parse(["--largest", "64"])


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(EnvironmentProblem, match="CuPy"):
        tiles.main(GPU_SIZES, None)


@pytest.mark.gpu
@pytest.mark.real_gpu
def test_on_a_gpu(tmp_path):
    assert tiles.main([*GPU_SIZES, "--json", str(tmp_path)], None) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "gpu_products.json",
        "gpu_tiles.json",
        "gpu_attention.json",
        "gpu_memory.json",
    }
    for path in tmp_path.iterdir():
        assert all(row.get("device_us", 1) > 0 for row in json.loads(path.read_text())["rows"])
