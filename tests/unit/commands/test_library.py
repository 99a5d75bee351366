"""The library that `import mpipar` gives: loaded late, and used as docs/examples uses it."""

import re
import sys

import numpy as np
import pytest
from helpers import REPOSITORY, run_command, run_ranks
from program import LIMIT, environment

import mpipar
from mpipar.errors import UsageError

EXAMPLES = REPOSITORY / "docs" / "examples"
PLANTED = """
import runpy
from mpipar.comm.group import Comm
Comm.all_reduce = lambda self, x, name, op="sum": x
runpy.run_path({!r})
"""


def test_importing_the_package_loads_neither_numpy_nor_mpi():
    code = ("import sys, mpipar\n"
            "assert set(mpipar.__all__) == set(mpipar.LIBRARY)\n"
            "loaded = {name.split('.')[0] for name in sys.modules} & {'numpy', 'mpi4py'}\n"
            "assert not loaded, loaded\n"
            "from mpipar import *\n"
            "assert 'numpy' in sys.modules and 'mpi4py.MPI' not in sys.modules\n"
            "print(RowLinear.__name__, Grid.__name__, sorted(CUTS)[0])\n")  # fmt: skip
    result = run_command([sys.executable, "-c", code], LIMIT, environment())
    assert result.returncode == 0, result.tail()
    assert result.stdout == "RowLinear Grid column\n"


def test_every_name_of_the_library_is_there_and_no_other():
    for name in mpipar.__all__:
        assert getattr(mpipar, name) is not None
        assert name in dir(mpipar)
    with pytest.raises(AttributeError, match="has no attribute 'linear_layer'"):
        _ = mpipar.linear_layer


def linear_layer(cut="column"):
    ops = mpipar.make_ops("cpu", "float64")
    context = mpipar.Context(ops, mpipar.Comms.solo(ops))
    return ops, mpipar.Linear(context, "up", (6,), (4,), cut=cut, std=0.1)


def test_a_cut_that_is_none_is_named():
    with pytest.raises(UsageError, match=r"cut 'rwo' does not exist; did you mean row\?; use one"):
        linear_layer("rwo")


def test_a_device_that_is_none_is_named():
    with pytest.raises(UsageError, match="device 'gpu' does not exist; use one of cpu, cuda, sh"):
        mpipar.make_ops("gpu", "float32")


def test_a_layer_without_buffers_says_what_makes_them():
    ops, layer = linear_layer()
    with pytest.raises(UsageError, match=r"up.w: has no data yet; .* call mpipar.FlatParams\(ops,"):
        layer.forward(np.ones((1, 2, 6)), mpipar.Stash())
    with pytest.raises(AttributeError, match="Param has no attribute 'gradient'"):
        _ = layer.params[0].gradient
    mpipar.FlatParams(ops, layer.params).initialize(seed=1)
    assert layer.forward(np.ones((1, 2, 6)), mpipar.Stash()).shape == (1, 2, 4)


def largest_difference(result) -> float:
    found = re.search(r"largest difference from one rank: (\S+)\n", result.stdout)
    assert result.returncode == 0, result.tail()
    assert found, result.tail()
    return float(found[1])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_cut_mlp_of_the_docs_equals_the_whole_one(ranks):
    """23 channels are padded on two ranks and on three."""
    result = run_ranks(ranks, [sys.executable, str(EXAMPLES / "cut_mlp.py")], LIMIT, environment())
    assert largest_difference(result) <= 1e-12
    barriers = {line for line in result.stdout.splitlines() if line.startswith("all_reduce")}
    assert barriers == (
        {f"all_reduce of mlp.{name} over tp" for name in ("up", "down")} if ranks > 1 else set()
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_convolutions_of_the_docs_equal_those_of_one_rank(ranks):
    """2 images of 5 x 4 places and 3 channels; 10 channels between are padded on four ranks."""
    program = [sys.executable, str(EXAMPLES / "convolution.py")]
    result = run_ranks(ranks, program, LIMIT, environment())
    assert largest_difference(result) <= 1e-12
    image = 2 * 5 * 4 * 3 * 8  # bytes
    expected = [
        f"all_reduce of conv.down over tp, {image} bytes",
        f"all_reduce of conv.up over tp, {3 * 3 * image} bytes",
    ]
    assert result.stdout.splitlines()[1:] == (expected if ranks > 1 else [])


@pytest.mark.parametrize("name", ["cut_mlp.py", "convolution.py"])
def test_an_example_without_its_sums_is_caught(name):
    program = [sys.executable, "-c", PLANTED.format(str(EXAMPLES / name))]
    assert largest_difference(run_ranks(2, program, LIMIT, environment())) > 1e-3
