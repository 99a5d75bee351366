"""The compiled elementwise chains: special values, exp, the cache of compiled code, the flag.

test_ops.py compares their results with the other implementations.
"""

import os
import sys

import numpy as np
import pytest
from helpers import run_command
from ops_cases import ADAMW, parts, plain

from mpipar.errors import EXIT_ENVIRONMENT, EnvironmentProblem
from mpipar.ops import make

SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30)
# Prints how many kernels were loaded from disk, and all files beside the sources that Numba made.
USE_ONCE = """
import pathlib, numpy, mpipar.ops
ops = mpipar.ops.make("cpu", "float32", kernels="numba")
ops.gelu_forward(numpy.ones(3, "f4"))
print(sum(ops.kernels.gelu_forward.stats.cache_hits.values()))
folder = pathlib.Path(mpipar.ops.__file__).parent
print([path.name for path in folder.rglob("*.nb?")])
"""


def test_without_numba_it_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)  # any import of it fails now
    with pytest.raises(EnvironmentProblem, match=r"pip install '.\[cpu\]'") as caught:
        make("cpu", "float32", kernels="numba")
    assert "--kernels numpy" in str(caught.value)
    assert caught.value.exit_code == EXIT_ENVIRONMENT


def kinds(x):
    """A mark for each element of x: NaN, infinite with its sign, or neither."""
    return np.where(np.isfinite(x), 0.0, x)


def special_results(ops):
    """Every compiled function on rows that hold a special value each; name -> result."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 8, 6)).astype(ops.dtype)
    x[0, : len(SPECIAL), 2] = SPECIAL
    dy, one = rng.standard_normal(x.shape).astype(ops.dtype), np.ones(6, ops.dtype)
    y, mean, rstd = ops.layernorm_forward(x, one, one, 1e-5)
    dw, db = np.zeros_like(one), np.zeros_like(one)
    ops.layernorm_backward_weight(dy, x, mean, rstd, dw, db)
    rms, rms_dw = ops.rmsnorm_forward(x, one, 1e-5), np.zeros_like(one)
    ops.rmsnorm_backward_weight(dy, x, rms[1], rms_dw)
    qkv = np.repeat(x[:, :, None, None, :], 3, axis=2)
    q, k, v = parts(qkv)
    out, probs = ops.attention_forward(q, k, v, np.arange(8), np.arange(8))
    logits, targets = x.reshape(16, 6).copy(), np.zeros(16, np.int64)
    loss, sums = ops.cross_entropy_combine(ops.cross_entropy_forward(logits, targets, 0, 6)[None])
    state = [
        np.ones(96, ops.dtype),
        x.reshape(-1).copy(),
        np.zeros(96, ops.dtype),
        np.zeros(96, ops.dtype),
    ]
    ops.adamw_step(*state, ADAMW._replace(step=1))
    return {
        "gelu_forward": ops.gelu_forward(x),
        "gelu_backward": ops.gelu_backward_input(dy, x),
        "layernorm_forward": y,
        "mean": mean,
        "rstd": rstd,
        "dw": dw,
        "db": db,
        "layernorm_backward": ops.layernorm_backward_input(dy, x, one, mean, rstd),
        "rmsnorm_forward": rms[0],
        "rms": rms[1],
        "rms_dw": rms_dw,
        "rmsnorm_backward": ops.rmsnorm_backward_input(dy, x, one, rms[1]),
        "attention_forward": out,
        "probs": probs,
        "attention_backward": np.stack(
            ops.attention_backward_input(
                dy.reshape(2, 8, 1, 6), q, k, v, probs, np.arange(8), np.arange(8)
            )
        ),
        "loss": loss,
        "sums": sums,
        "dlogits": ops.cross_entropy_backward_input(logits, targets, sums, 0, 6, 1.0),
        "adamw data": state[0],
        "adamw m": state[2],
        "adamw v": state[3],
    }


@pytest.mark.numba
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nan_and_infinity_stay_where_they_belong(dtype):
    with np.errstate(all="ignore"):
        expected = special_results(plain(dtype))
        found = special_results(make("cpu", dtype, kernels="numba"))
    for name, value in expected.items():
        assert np.array_equal(kinds(found[name]), kinds(value), equal_nan=True), name
    assert sum(not np.isfinite(value).all() for value in expected.values()) > 10


@pytest.mark.numba
@pytest.mark.parametrize(("dtype", "low"), [("float32", -87.0), ("float64", -708.0)])
def test_exp_is_right_to_the_last_bits(dtype, low):
    """Each row has one column and the largest 0, so that its sum is exp of that column."""
    kernels = make("cpu", dtype, kernels="numba").kernels
    x = np.concatenate([np.linspace(low, 0, 100_001), [-1e-3, -1e-20, 1e-7]]).astype(dtype)
    found, tops = np.empty_like(x), np.zeros_like(x)
    kernels.exp_sum(x[:, None], tops, found)
    exact = np.exp(x.astype(np.longdouble))
    assert np.max(np.abs(found / exact - 1)) < 2 * np.finfo(dtype).eps
    far = np.array([1.01 * low, 10 * low, -np.inf], dtype)
    kernels.exp_sum(far[:, None], tops[:3], found[:3])
    assert not found[:3].any()


def use_once(cache):
    """Compile one kernel in a process of its own: (kernels from disk, files in the package)."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    environment.pop("NUMBA_CACHE_DIR", None)
    done = run_command([sys.executable, "-c", USE_ONCE], timeout=60, env=environment)
    assert done.returncode == 0, done.tail()
    hits, inside = done.stdout.splitlines()
    return int(hits), inside


@pytest.mark.numba
def test_compiled_code_is_kept_in_the_users_cache_alone(tmp_path):
    assert use_once(tmp_path) == (0, "[]")
    assert list((tmp_path / "mpipar" / "numba").rglob("*.nbi"))
    assert use_once(tmp_path) == (1, "[]")


@pytest.mark.numba
def test_a_home_that_cannot_be_written_keeps_nothing(tmp_path):
    (tmp_path / "file").write_text("no folder can be made in a file")
    assert use_once(tmp_path / "file") == (0, "[]")
