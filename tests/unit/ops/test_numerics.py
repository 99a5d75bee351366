"""Array functions on hostile inputs: as right as PyTorch's, and right by their formula.

Numbers go from 1e-30 to 1e18, beside offsets that all share, all equal, hidden, padded, alone, and
in long rows. An error is the distance to the formula in extended precision, of the same rounded
inputs. What a single rounding changes altogether, such as scores of 1e18 that differ by some
roundings, can only be compared with PyTorch.
"""

import functools
import re

import cuda_ops
import numpy as np
import pytest
from attention_cases import formula
from numeric_attention import ATTENTION
from numeric_cases import EPS, FAMILIES, error
from ops_cases import plain

from mpipar.ops import make
from mpipar.ops.array_ops import ArrayOps

ALL = FAMILIES | {"attention": ATTENTION}
IMPLEMENTATIONS = {
    "plain": lambda: plain("float32"),
    "numpy": lambda: make("cpu", "float32"),
    "numba": lambda: make("cpu", "float32", kernels="numba"),
    "16 bits": lambda: make("cpu", "bfloat16"),
    "fused": cuda_ops.host_ops,
    "fused in 16 bits": lambda: cuda_ops.host_ops("bfloat16"),
}
MARKS = {
    "numba": [pytest.mark.numba],
    "fused": [pytest.mark.shim, pytest.mark.slow],
    "fused in 16 bits": [pytest.mark.shim, pytest.mark.slow],
}
TIMES = 4  # PyTorch's error, or a unit in the last place if that is more
MOST = 128  # units in the last place of the largest term
# What one rounding of a mean or of a sum of squares beyond float32 changes altogether.
SENSITIVE = {"norms": r"beside|1e\+18 (?:long|many)|90 many"}
# Cases in which no result is noise.
ORDINARY = r"(?:1|4|beside 3|q 1 k 1|q 5 k 5|shuffled)(?: (?!alone|scores)|$)"
# Cases for kernels of a GPU, whose threads run one after another here: half a million of some, and
# of attention every kind of scores in one size, the ordinary and the largest in others.
EMULATED = dict.fromkeys(ALL, "^(?!.* many)") | {
    "attention": r"^(?!.* (?:token|long)$)|^(?:q 1 k 1|shuffled) "
}
# The optimizer never has 16 bits. NumPy adds up rows of a whole matrix one after another.
LEFT_OUT = {("plain", "bias"), ("16 bits", "updates"), ("fused in 16 bits", "updates")}

every = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, ())) for name in IMPLEMENTATIONS]
)


@pytest.fixture
def ops(name):
    with np.errstate(all="ignore"):
        yield IMPLEMENTATIONS[name]()


@functools.cache
def cases_of(family, kind):
    """[(name, Case, exact results)], with inputs that this type holds."""
    cases = ALL[family].cases(np.random.default_rng(7))
    rounded = {name: case.rounded(kind) for name, case in cases.items()}
    return [(name, case, ALL[family].exact(case)) for name, case in rounded.items()]


@functools.cache
def bounds_of_torch(family, kind):
    """Name of a case -> result -> bound. What a rounding decides shares the worst of PyTorch's."""
    torch, bounds, worst = pytest.importorskip("torch"), {}, {}
    for name, case, exact in cases_of(family, kind):
        errors = {
            key: error(x.detach().float().numpy(), exact[key], ALL[family].axis)
            for key, x in ALL[family].theirs(torch, case).items()
        }
        bounds[name] = {key: TIMES * max(off, EPS[case.kind]) for key, off in errors.items()}
        if is_sensitive(family, name):
            worst = {key: max(most, worst.get(key, 0)) for key, most in bounds[name].items()}
    return {name: worst if is_sensitive(family, name) else most for name, most in bounds.items()}


def is_sensitive(family, name):
    return family in SENSITIVE and re.search(SENSITIVE[family], name)


def worse_than(bound, name, ops, family):
    """Lines about the results whose error is above bound(name of the case, result)."""
    lines = []
    for case_name, case, exact in cases_of(family, np.dtype(ops.dtype)):
        if "fused" in name and not re.search(EMULATED[family], case_name):
            continue
        for key, x in ALL[family].ours(ops, case).items():
            of, found = key.removesuffix(" of runs"), np.asarray(ops.to_host(x))
            off, most = error(found, exact[of], ALL[family].axis), bound(case_name, of)
            if not off <= most and (name, key) not in LEFT_OUT:
                lines.append(f"{case_name}: {key}: {off:.3g} > {most:.3g}")
    return lines


def fixed(family, ops):
    unit = EPS[np.dtype(ops.dtype)]
    return lambda case_name, _: np.inf if is_sensitive(family, case_name) else MOST * unit


@every
@pytest.mark.parametrize("family", ALL)
def test_every_function_is_its_formula(ops, name, family):
    if (name, family) not in LEFT_OUT:
        assert worse_than(fixed(family, ops), name, ops, family) == []


@pytest.mark.peers
@every
@pytest.mark.parametrize("family", ALL)
def test_every_error_is_within_four_times_pytorchs(ops, name, family):
    if (name, family) not in LEFT_OUT:
        bounds = bounds_of_torch(family, np.dtype(ops.dtype))
        assert worse_than(lambda case_name, key: bounds[case_name][key], name, ops, family) == []


@pytest.mark.peers
@pytest.mark.parametrize("name", ["plain", "numpy"])
@pytest.mark.parametrize("family", ALL)
def test_ordinary_numbers_have_pytorchs_results_in_float64(name, family):
    """Gradients by its autograd, to 1e-9 of the largest number of a result."""
    torch = pytest.importorskip("torch")
    ops, seen = plain() if name == "plain" else make("cpu", "float64"), 0
    for case_name, case in ALL[family].cases(np.random.default_rng(7)).items():
        if re.match(ORDINARY, case_name):
            case.kind, seen = np.dtype(np.float64), seen + 1
            theirs = ALL[family].theirs(torch, case)
            for key, x in ALL[family].ours(ops, case).items():
                expected = theirs[key.removesuffix(" of runs")].detach().numpy()
                assert error(x, expected, None) <= 1e-9, (case_name, key)
    assert seen > 1


def by_one_number(self, stats):
    """The log of the sum of exp(logit) as one number, as the maximum of a sum of 1."""
    loss, sums = ArrayOps.cross_entropy_combine(self, stats)
    lse = sums[:, 0] + np.log(sums[:, 1])
    return loss, np.stack([lse, np.ones_like(lse)], axis=-1)


def by_tanh(self, h, out=None):
    return 0.5 * h[..., 0, :] * (1 + np.tanh(0.5 * h[..., 0, :])) * h[..., 1, :]


def by_squares(self, x, w, b, eps, out=None):
    """The variance as the mean of the squares without the square of the mean."""
    mean = x.mean(axis=-1)
    rstd = 1 / np.sqrt(np.square(x).mean(axis=-1) - np.square(mean) + self.scalar(eps))
    return (x - mean[..., None]) * rstd[..., None] * w + b, mean, rstd


@pytest.mark.parametrize(
    ("family", "function", "twin"),
    [
        ("attention", "neg_max", np.float32(-1e30)),
        ("loss", "neg_max", np.float32(-1e30)),
        ("loss", "cross_entropy_combine", by_one_number),
        ("swiglu", "swiglu_forward", by_tanh),
        ("norms", "layernorm_forward", by_squares),
    ],
)
def test_a_broken_twin_is_seen(family, function, twin):
    ops = plain("float32")
    setattr(ops, function, twin.__get__(ops) if callable(twin) else twin)
    with np.errstate(all="ignore"):
        assert worse_than(fixed(family, ops), "plain", ops, family)


@pytest.mark.parametrize("size", [1e4, 1e10, 1e18])
@pytest.mark.parametrize("name", ["plain", "numpy", pytest.param("numba", marks=pytest.mark.numba)])
def test_one_token_of_large_scores_sees_itself_alone(rng, name, size):
    """In float64: its probability is 1, if both directions make the same score."""
    ops = plain() if name == "plain" else make("cpu", "float64", kernels=name)
    q, k, v, dy = (rng.standard_normal((3, 1, 4, 21)) for _ in range(4))
    q, k, here = size * q, size * k, np.array([5])
    y, stats = ops.attention_block_forward(q, k, v, here, here)
    grads = ops.attention_block_backward(
        dy, q, k, v, stats, ops.attention_delta(dy, y), q_pos=here, k_pos=here
    )
    assert np.array_equal(y, v)
    assert np.array_equal(grads[2], dy)
    assert np.abs(grads[0]).max() <= 1e-13 * size
    assert np.abs(grads[1]).max() <= 1e-13 * size


def test_the_formula_here_is_that_of_the_other_tests(rng):
    """Two ways to write attention down: by einsum, and a head and a query at a time."""
    case = ATTENTION.cases(rng)["shuffled"]
    y, _, dq, dk, dv = formula(case.q, case.k, case.v, case.dy, case.q_pos, case.k_pos)
    exact = ATTENTION.exact(case)
    for name, x in zip(("y", "dq", "dk", "dv"), (y, dq, dk, dv), strict=True):
        assert error(x, exact[f"block {name}"], -1) < 1e-13, name
