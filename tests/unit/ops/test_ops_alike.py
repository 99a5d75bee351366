"""Every implementation has the functions of `ArrayOps`, with its signatures, and no others."""

import sys
from inspect import signature

import fake_cupy
import pytest
from ops_cases import plain

from mpipar.comm.record import Recorder
from mpipar.ops import make
from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.cuda.fused import Fused
from mpipar.ops.cupy_fused import FusedOps
from mpipar.ops.cupy_ops import CupyOps
from mpipar.ops.functions import DECLARED, FUNCTIONS, MEMORY, Ops
from mpipar.ops.mixed_ops import MixedOps
from mpipar.ops.numba_ops import NumbaOps
from mpipar.ops.numpy_ops import NumpyOps
from mpipar.ops.shape_ops import ShapeOps
from mpipar.ops.timed_ops import TimedOps

IMPLEMENTATIONS = {
    "plain": lambda: plain("float32"),
    "numpy": lambda: make("cpu", "float32"),
    "numba": lambda: make("cpu", "float32", kernels="numba"),
    "cupy": lambda: make("cuda", "float32", kernels="plain"),
    "fused": lambda: make("cuda", "float32", kernels="fused"),
    "mixed": lambda: make("cpu", "bfloat16"),
    "mixed on cupy": lambda: make("cuda", "float16"),
    "shapes": lambda: make("shapes", "float32"),
    "mixed shapes": lambda: make("shapes", "bfloat16"),
    "timed": lambda: TimedOps(make("cpu", "float32"), Recorder()),
}
# Not array functions: a cast, and counts of the shapes.
OTHERS = {"scalar", "reset_peak"}
# The kernels that stand behind functions of the fused implementation.
KERNELS = {"causal_softmax_forward", "causal_softmax_backward"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.numba) if name == "numba" else name
        for name in IMPLEMENTATIONS
    ],
)
def test_every_implementation_has_the_same_functions(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    ops = IMPLEMENTATIONS[name]()
    expected = {*FUNCTIONS, *MEMORY}
    missing = [one for one in expected if not callable(getattr(ops, one, None))]
    assert not missing
    public = {
        one
        for one in dir(ops)
        if not one.startswith("_")
        and callable(getattr(ops, one))
        and not isinstance(getattr(ops, one), type)
    }
    more = public - expected - OTHERS - (KERNELS if isinstance(ops, Fused) else set())
    assert not more, "no line of the table"


def signature_of(function):
    """(parameters, type of the result) as its line says: other `out` are the driver's of tiles."""
    found = signature(function, eval_str=True)
    parameters = dict(found.parameters)
    if "out" not in [part.name for part in DECLARED[function.__name__].takes]:
        parameters.pop("out", None)
    return parameters, found.return_annotation


@pytest.mark.parametrize("name", [*FUNCTIONS, *MEMORY])
def test_every_implementation_has_the_signature_of_the_formula(name):
    """Types, order, defaults and the result; a kernel of the same name is not a function of ops."""
    wanted = signature_of(getattr(ArrayOps, name))
    for implementation in (Ops, NumpyOps, NumbaOps, CupyOps, FusedOps, ShapeOps, MixedOps):
        assert signature_of(getattr(implementation, name)) == wanted, implementation.__name__


def test_a_line_names_the_arguments_of_its_signature():
    for name, function in FUNCTIONS.items():
        found = [one for one in signature_of(getattr(ArrayOps, name))[0] if one != "self"]
        assert found == [part.name for part in function.takes], name


def test_a_line_says_what_it_reads_and_writes():
    """The driver relies on this: a function of rows has rows, and makes all results or none."""
    tiled = [name for name, one in vars(NumpyOps).items() if hasattr(one, "__wrapped__")]
    assert {"gelu_forward", "layernorm_forward", "top_forward", "adamw_step"} < {*tiled}
    for name in tiled:
        function = FUNCTIONS[name]
        assert any(part.by_row for part in function.takes), name
        assert len(function.makes) in (0, len(function.gives)), name


def test_a_function_without_a_formula_is_named():
    with pytest.raises(TypeError, match="Ops has no gelu_forward"):
        Ops().gelu_forward(1)


def test_arguments_that_do_not_fit_a_line_are_refused():
    ops = make("cpu", "float32")
    for call in (
        ops.gelu_forward,
        lambda: ops.gelu_forward(1, 2),
        lambda: ops.gelu_forward(y=1),
        lambda: ops.gelu_forward(1, x=1),
    ):
        with pytest.raises(TypeError, match=r"gelu_forward takes x\[\.\.\] -> y\[\.\.\]"):
            call()
