"""The GPU benchmark's arithmetic and checks, on a stand-in for CuPy; real times need a GPU."""

import sys
from types import SimpleNamespace

import fake_cupy
import numpy as np
import pytest

from bench import tiles_gpu
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_ENVIRONMENT
from mpipar.ops.cuda import ladder

pytestmark = pytest.mark.shim
SIZE = (40, 24, 16)


@pytest.fixture
def bench(monkeypatch):
    """A device called H200 on which everything takes a millisecond."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    monkeypatch.setattr(fake_cupy.cuda.runtime, "getDeviceProperties",
                        lambda number: {"name": b"NVIDIA H200"}, raising=False)

    def benchmark(function, n_repeat, name=None, n_warmup=10, max_duration=0):
        """Like cupyx.profiler's, which wants a name of what has none by itself."""
        assert isinstance(function.__name__ if name is None else name, str)
        function()
        return SimpleNamespace(gpu_times=np.array([[9.0, 1e-3, 1e-4]]), cpu_times=np.full(3, 1e-5))

    profiler = SimpleNamespace(benchmark=benchmark)
    monkeypatch.setitem(sys.modules, "cupyx", SimpleNamespace(profiler=profiler))
    monkeypatch.setitem(sys.modules, "cupyx.profiler", profiler)
    return tiles_gpu.Bench(repeats=2)


def test_products(bench):
    rows = tiles_gpu.product_rows(bench, [SIZE])
    assert [row["kernel"] for row in rows] == [
        "cuBLAS", "cuBLAS TF32", "naive", "shared", "register", "vector", "warp", "cuBLAS", "mma"]
    flops = 2 * 40 * 24 * 16
    for row in rows:
        assert row["tflop_per_s"] == pytest.approx(flops / 1e-3 * 1e-12)
        assert row["of_cublas"] == 1.0
    roofs = [row["tflop_per_s"] / row["of_roof"] for row in rows]
    assert roofs == pytest.approx([67, 495, *[67] * 5, 989, 989])


@pytest.mark.slow
def test_sweep(bench):
    rows = tiles_gpu.sweep_rows(bench, (130, 70, 40))
    assert len(rows) == sum(map(len, tiles_gpu.SWEEPS.values()))
    starved, full = rows[0], rows[5]
    assert (starved["threads"], full["threads"]) == (32, 256)
    assert starved["flop_per_byte"] == pytest.approx(2 * 32 * 16 / (48 * 4))
    assert full["flop_per_byte"] == pytest.approx(32)


def test_memory(bench):
    rows = {row["function"]: row for row in tiles_gpu.memory_rows(bench, 8, 16, 32)}
    assert rows["gelu_forward"]["MB"] == pytest.approx(2 * 8 * 16 * 4e-6)
    assert rows["adamw_step"]["MB"] == pytest.approx(7 * 16 * 32 * 4e-6)
    assert rows["adamw_step"]["gb_per_s"] == pytest.approx(7 * 16 * 32 * 4 / 1e-3 * 1e-9)


def test_a_wrong_product_ends_the_run(bench, monkeypatch, capsys):
    monkeypatch.setattr(tiles_gpu, "SIZES", (SIZE,))
    monkeypatch.setattr(tiles_gpu, "product_rows",
                        lambda bench: tiles_gpu.sweep_rows(bench, SIZE))
    monkeypatch.setattr(ladder, "grid", lambda kernel, rows, columns: (1, 1))
    assert tiles_gpu.run(2) == EXIT_CHECK_FAILED
    assert "products: (40, 16) x (16, 24) float32: off by nan" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert tiles_gpu.main([]) == EXIT_ENVIRONMENT
    assert "CuPy" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(tiles_gpu, "SECONDS", 0.1)
    assert tiles_gpu.run(3, str(tmp_path)) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "gpu_products.json", "gpu_tiles.json", "gpu_memory.json"}
    assert np.isfinite(tiles_gpu.timed(lambda: None, 3)[0])
