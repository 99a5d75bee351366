"""The programs of bench.kernels, bench.tiles and bench.rehearse: their arithmetic and checks."""

import json

import numpy as np
import pytest

from bench import rehearse, tiles
from bench.kernels import check, functions
from bench.rehearse import CALL, WAIT, configured, lay_out, room_needed, script_of
from bench.training import config_of
from mpipar.errors import EnvironmentProblem, UsageError
from mpipar.ops import make
from mpipar.ops.functions import FUNCTIONS
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.study.explain.predict import predict


@pytest.fixture
def on_a_cpu(monkeypatch):
    """bench.kernels.check with the functions of a CPU in the place of a GPU's."""
    monkeypatch.setattr(check, "make", lambda device, dtype: make("cpu", dtype))
    monkeypatch.setattr(check, "COMMON", [one.replace("cuda", "cpu") for one in check.COMMON])


def errors(dtype="float32"):
    """The errors of the functions in the small steps, by name."""
    found = {}
    for words in check.SMALL:
        check.check(words.split(), dtype, found)
    return found


@pytest.mark.parametrize("dtype", check.DTYPES)
def test_every_function_of_a_step_is_compared(on_a_cpu, dtype):
    found = errors(dtype)
    assert len(found) > 40
    assert set(found) <= set(FUNCTIONS)
    worst = {name: one["error"] for name, one in found.items() if one["bits"] == "equal"}
    assert set(worst) == set(found)
    assert max(worst.values()) <= check.TOLERANCE[dtype]
    if dtype != "float32":
        assert worst["matmul"] > 1e-5  # a rounding to 16 bits is seen


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("rope_backward_input", lambda self, dy, positions, table: dy),
        ("rmsnorm_backward_weight", lambda self, dy, x, rstd, dw: None),
        ("combine_rows", lambda self, rows, probs=None: rows.mean(axis=1)),
        ("cross_entropy_backward_input", lambda self, logits, *rest: logits),
    ],
)
def test_a_wrong_function_is_named(on_a_cpu, monkeypatch, name, twin):
    monkeypatch.setattr(NumpyOps, name, twin)
    found = errors()
    assert [one for one in found if found[one]["error"] > check.TOLERANCE["float32"]] == [name]


def test_bits_that_differ_are_seen(on_a_cpu, monkeypatch):
    rng, plain = np.random.default_rng(0), NumpyOps.matmul
    monkeypatch.setattr(
        NumpyOps, "matmul", lambda self, x, w: plain(self, x, w) * (1 + 1e-6 * rng.random())
    )
    found = errors()
    assert "matmul" in [name for name, one in found.items() if one["bits"] == "differ"]


def test_a_function_stands_beside_its_floor():
    counts = {"matmul": {"calls": 2, "bytes": 4e6, "largest": 1, "flops": 8e9}}
    rows = functions.table({"fill": (1e-6, 1e-6), "matmul": (8e-3, 2e-5)}, counts, (2e12, 1e12), 2)
    assert [row["function"] for row in rows] == ["matmul", "fill"]
    assert rows[0]["device_us"] == pytest.approx(4000)
    assert rows[0]["floor_us"] == pytest.approx(4000)
    assert (rows[0]["over_floor"], rows[0]["bound"]) == (pytest.approx(1), "products")
    assert rows[1]["floor_us"] == "-"


# --- bench.tiles


@pytest.mark.slow
@pytest.mark.numba
def test_products_climb_from_loops_to_blas(tmp_path, monkeypatch, capsys):
    """100 is no multiple of a tile, so that every rung has rests."""
    from bench.kernels import products

    monkeypatch.setattr(tiles, "COPY_BYTES", 1 << 16)
    path = tmp_path / "products.json"
    words = ["--size", "100", "--repeats", "1"]
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


def test_products_say_what_they_need(monkeypatch):
    with pytest.raises(UsageError, match="must be a multiple of 4"):
        tiles.main.parse(["--size", "6"])
    monkeypatch.setattr(tiles.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"needs Numba: pip install"):
        tiles.main([], None)


# --- bench.rehearse without ranks: what is refused, and how arrays are shared


SMALL = "--layers 2 --num-microbatches 2 --batch-size 24"
LAYOUTS = {
    "hybrid": f"--preset tiny --layout dp=2,pp=2,tp=2 {SMALL}",
    "experts": f"--preset moe-tiny --layout dp=4,ep=2 {SMALL} --zero 3",
}


@pytest.mark.parametrize(
    ("words", "ranks", "text"),
    [
        ("tiny --layout dp=4", 2, "start mpiexec -n 4"),
        ("tiny", 1, "two ranks or more"),
        ("tiny --layout dp=2 --nonsense", 2, "unknown flag"),
        ("nobody --layout dp=2", 2, "must be one of tiny"),
    ],
)
def test_what_cannot_be_played_is_refused(words, ranks, text):
    with pytest.raises(UsageError, match=text):
        configured(rehearse.main.parse(words.split()), ranks)


def test_arrays_are_shared_by_calls_that_are_not_under_way_together():
    script = script_of(config_of(LAYOUTS["hybrid"].split()), 0)
    forms, chosen = lay_out(script)
    busy = set()
    for action, number in script.events:
        call = script.calls[number]
        if action == CALL:
            assert forms[chosen[number]] == (call.record.dtype, call.shape)
            assert chosen[number] not in busy
            busy |= {chosen[number]} if call.posted else set()
        elif action == WAIT:
            busy.remove(chosen[number])
    assert not busy
    assert len(forms) < len(script.calls)
    every = sum(np.dtype(one.record.dtype).itemsize * np.prod(one.shape) for one in script.calls)
    assert room_needed(script) < every


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_script_is_what_a_step_on_shapes_does(name):
    config = config_of(LAYOUTS[name].split())
    for world_rank in (0, 3):
        script = script_of(config, world_rank)
        records = predict(config, world_rank).recorder.records
        own = [(one.record.name, one.record.payload_bytes, one.record.peer) for one in script.calls]
        assert own == [(one.name, one.payload_bytes, one.peer) for one in records]
