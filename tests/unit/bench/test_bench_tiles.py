"""bench.tiles: it has a row per tile, times no wrong result, and restores the constants."""

import json

import numpy as np
import pytest

from bench import tiles
from mpipar.errors import EnvironmentProblem, UsageError
from mpipar.ops import numpy_ops

SIZES = "--rows 40 --width 60 --seq-len 70 --heads 2 --repeats 1".split()


@pytest.fixture(autouse=True)
def small_peaks(monkeypatch):
    monkeypatch.setattr(tiles, "PEAK_SIZE", 64)
    monkeypatch.setattr(tiles, "COPY_BYTES", 1 << 16)


def test_every_tile_is_timed_and_the_constants_stay(tmp_path):
    before = numpy_ops.TILE, numpy_ops.QUERY_TILE
    path = tmp_path / "tiles.json"
    assert tiles.main([*SIZES, "--json", str(path)], None) == 0
    assert before == (numpy_ops.TILE, numpy_ops.QUERY_TILE)
    rows = [row for row in json.loads(path.read_text())["rows"] if row["tile"] != "numba"]
    found = [(row["chain"], row["tile"]) for row in rows]
    assert found == [
        *(
            (chain, tile)
            for chain in ("gelu_forward", "layernorm_backward_input", "adamw_step")
            for tile in (1024, "all")
        ),
        *(
            (chain, tile)
            for chain in ("attention_forward", "attention_backward_input")
            for tile in (4, "64 (default)", "all")
        ),
    ]
    for chain in {row["chain"] for row in rows}:
        assert min(row["over_best"] for row in rows if row["chain"] == chain) == 1
    for row in rows:
        assert row["ms"] > 0
        assert row["percent_of_copy"] > 0
        assert (row["percent_of_gemm"] == "-") == (not row["chain"].startswith("attention"))
    by_chain = {row["chain"]: row for row in rows}
    assert by_chain["adamw_step"]["bytes_MiB"] == pytest.approx(7 * 40 * 60 * 4 / 2**20)


def test_a_tile_that_changes_the_result_is_not_timed(monkeypatch, capsys):
    right = numpy_ops.NumpyOps.gelu_forward

    def wrong_in_small_tiles(self, x):
        y = right(self, x)
        return y * np.float32(1.001) if numpy_ops.TILE == 1024 else y

    monkeypatch.setattr(numpy_ops.NumpyOps, "gelu_forward", wrong_in_small_tiles)
    assert tiles.main(SIZES, None) == 1
    out, err = capsys.readouterr()
    assert "gelu_forward, tile 1024: off by 1.0e-03" in err
    assert not out
    assert numpy_ops.TILE > 1024


@pytest.mark.slow
@pytest.mark.numba
def test_products_climb_from_loops_to_blas(tmp_path, monkeypatch, capsys):
    """100 is no multiple of a tile, so that every rung has rests."""
    from bench.kernels import products

    path = tmp_path / "products.json"
    words = ["--products", "--size", "100", "--repeats", "1"]
    assert tiles.main([*words, "--json", str(path)], None) == 0
    result = json.loads(path.read_text())
    assert [row["product"] for row in result["rows"]] == ["naive", "tiled", "packed", "BLAS"]
    reuse = [row["flop_per_byte"] for row in result["rows"]]
    assert reuse[0] == pytest.approx(2 / 8, rel=0.01)
    assert reuse[3] == pytest.approx(2 * 100 / (3 * 4))
    assert max(reuse) == reuse[3]
    assert result["rows"][3]["percent_of_blas"] == 100
    assert result["machine"]["blas_gflops"] == result["rows"][3]["gflops"]
    assert result["machine"]["copy_gbs"] > 0
    forgets = products.RUNGS["tiled"]._replace(call=lambda a, b, c: np.matmul(a[:, 1:], b[1:], c))
    monkeypatch.setitem(products.RUNGS, "tiled", forgets)
    assert tiles.main(words, None) == 1
    assert "not timed: tiled product: off by" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--products --size 6", "must be a multiple of 4"),
        ("--size 8", "is for --products"),
        ("--width 1", "at least 2 elements"),
    ],
)
def test_sizes_that_cannot_be_are_refused(words, message):
    with pytest.raises(UsageError, match=message):
        tiles.main.parse(words.split())


def test_products_say_what_they_need(monkeypatch):
    monkeypatch.setattr(tiles.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="--products needs Numba: pip install"):
        tiles.main(["--products"], None)
