"""The programs of bench.kernels: their arithmetic and their checks; real times need a GPU."""

import numpy as np
import pytest

from bench.kernels import check, functions
from mpipar.ops import make
from mpipar.ops.functions import FUNCTIONS
from mpipar.ops.numpy_ops import NumpyOps


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


def test_what_is_not_finite_is_wrong():
    assert check.error_of(np.array([np.nan]), np.array([1.0])) == np.inf
    assert check.error_of(np.zeros(2), np.zeros(2)) == 0


def test_a_function_stands_beside_its_floor():
    counts = {"matmul": {"calls": 2, "bytes": 4e6, "largest": 1, "flops": 8e9}}
    rows = functions.table({"fill": (1e-6, 1e-6), "matmul": (8e-3, 2e-5)}, counts, (2e12, 1e12), 2)
    assert [row["function"] for row in rows] == ["matmul", "fill"]
    assert rows[0]["device_us"] == pytest.approx(4000)
    assert rows[0]["floor_us"] == pytest.approx(4000)
    assert (rows[0]["over_floor"], rows[0]["bound"]) == (pytest.approx(1), "products")
    assert rows[1]["floor_us"] == "-"
