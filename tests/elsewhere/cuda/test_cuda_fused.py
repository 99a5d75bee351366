"""The fused kernels against the plain functions in float64, and broken twins of them."""

import numpy as np
import pytest
from cuda_fused import BOUNDS, DTYPES, HostLoader, Poisoned, hosts, place, relative
from ops_cases import ADAMW, plain, runs_of

from mpipar.ops.array_attention import rope_table
from mpipar.ops.cuda.fused import Fused

# Rows, columns: not multiples of a warp or of a slab; in the last, packs of 16 bytes that are more
# than a warp has threads, and rows that are more than a block of columns.cuh has above each other.
SIZES = [(1, 1), (3, 130), (75, 33), (69, 264)]
SHAPES = [(1, 1), (2, 3, 171), (3, 3, 264)]
# Of one shard: rows, columns, where it starts, columns of padding.
VOCABULARIES = [
    (1, 1, 0, 0),
    (7, 261, 0, 5),
    (9, 130, 130, 0),
    (5, 20, 20, 20),
    (3, 1104, 0, 5),
    (2, 24, 24, 24),
]
# Types, and how far arrays begin behind an address of 16 bytes.
CASES = [*((dtype, 0) for dtype in DTYPES), ("bfloat16", 1)]
# On the CPU one order of threads for each.
EMULATED = [
    pytest.param((order, *one), marks=pytest.mark.shim)
    for order, one in zip(2 * ["forwards", "backwards"], CASES, strict=True)
]
ON_A_GPU = [pytest.param(("gpu", *one), marks=pytest.mark.gpu) for one in CASES]


class Case:
    """Random arrays of one type on one device, the same in float64, and the kernels.

    off: elements between a 16-byte address and where each array begins.
    """

    def __init__(self, where, dtype, rng, off=0):
        xp, loader, put, self.to_host = place(where)
        self.to_device = lambda host: put(np.pad(host.reshape(-1), (off, 0)))[off:].reshape(
            host.shape
        )
        self.fused, self.dtype, self.rng = Fused(xp, loader), DTYPES[dtype], rng
        self.bound = BOUNDS[dtype]
        self.ops = plain("float64")

    def array(self, *shape, scale=1.0, dtype=None):
        """Return (device array, float64 array of the same values)."""
        host = (scale * self.rng.standard_normal(shape)).astype(dtype or self.dtype)
        return self.to_device(host), host.astype(np.float64)

    def check(self, got, expected, dtype=None, bound=None):
        assert got.dtype == (dtype or self.dtype)
        assert got.shape == expected.shape
        error = relative(self.to_host(got), expected)
        assert error <= (bound or self.bound), (expected.shape, error)


@pytest.fixture(params=hosts())
def where(request):
    return request.param


@pytest.fixture(params=[*EMULATED, *ON_A_GPU], ids=str)
def case(request, rng):
    where, dtype, off = request.param
    return Case(where, dtype, rng, off)


def test_gelu(case):
    for shape in SHAPES:
        (x, x64), (dy, dy64) = case.array(*shape), case.array(*shape)
        case.check(case.fused.gelu_forward(x), case.ops.gelu_forward(x64))
        case.check(case.fused.gelu_backward_input(dy, x), case.ops.gelu_backward_input(dy64, x64))


def test_gelu_where_tanh_is_one(case):
    x = np.array([-80.0, -6.0, 0.0, 6.0, 80.0]).astype(case.dtype)
    got = case.to_host(case.fused.gelu_forward(case.to_device(x))).astype(np.float64)
    expected = case.ops.gelu_forward(x.astype(np.float64))
    assert np.all(np.abs(got - expected) <= 1e-5 + case.bound * np.abs(expected))


def test_elements_beyond_one_per_thread(where, rng, monkeypatch):
    monkeypatch.setattr("mpipar.ops.cuda.fused.MOST_BLOCKS", 2)
    case = Case(where, "float32", rng)
    for columns in (1701, 1704):
        x, x64 = case.array(5, columns)
        case.check(case.fused.gelu_forward(x), case.ops.gelu_forward(x64))


def test_column_sums(case):
    for shape in SIZES:
        x, x64 = case.array(*shape)
        for dtype in {np.float32, case.dtype}:
            out, out64 = case.array(shape[-1], dtype=dtype)
            case.fused.bias_backward_weight(x, out)
            case.check(out, out64 + x64.sum(axis=0), dtype, BOUNDS[np.dtype(dtype).name])


def test_sums_in_many_slabs_are_the_same_bits(where, rng):
    case = Case(where, "float32", rng)
    x, x64 = case.array(1201, 5)
    results = []
    for _ in range(2):
        out = case.to_device(np.zeros(5, np.float32))
        case.fused.bias_backward_weight(x, out)
        results.append(case.to_host(out).copy())
    assert np.array_equal(*results)
    assert relative(results[0], x64.sum(axis=0)) <= 2e-6


def test_a_wider_sum_after_a_narrow_one_starts_from_zero(where, rng):
    """The counters of columns.cuh are left at 0, and there are enough of them."""
    case = Case(where, "float32", rng)
    for columns in (3, 3, 200, 70):
        x, x64 = case.array(300, columns)
        out, out64 = case.array(columns)
        case.fused.bias_backward_weight(x, out)
        case.check(out, out64 + x64.sum(axis=0), bound=2e-6)


def test_losses_of_all_shards(where, rng):
    for shards in (1, 3):
        case = Case(where, "float32", rng)
        stats = rng.uniform(1.0, 5.0, (shards, 300, 3)).astype(np.float32)
        found = case.fused.cross_entropy_combine(case.to_device(stats))
        expected = case.ops.cross_entropy_combine(stats.astype(np.float64))
        for one, other in zip(found, expected, strict=True):
            case.check(one, other)
        stats[-1, 7, 0] = np.nan
        loss, _ = case.fused.cross_entropy_combine(case.to_device(stats))
        assert np.flatnonzero(np.isnan(case.to_host(loss))).tolist() == [7]


def test_layernorm(case):
    for shape in SIZES:
        columns = shape[-1]
        (x, x64), (w, w64), (b, b64) = case.array(*shape), case.array(columns), case.array(columns)
        x64 += 2.0
        x = case.to_device(x64.astype(case.dtype))
        x64 = case.to_host(x).astype(np.float64)
        got, expected = (
            one.layernorm_forward(*arrays, 1e-5)
            for one, arrays in ((case.fused, (x, w, b)), (case.ops, (x64, w64, b64)))
        )
        case.check(got[0], expected[0])
        for one, other in zip(got[1:], expected[1:], strict=True):
            case.check(one, other, np.float32, 1e-6)
        dy, dy64 = case.array(*shape)
        if columns > 1:  # of one column every gradient is 0, and its error has no relative norm
            case.check(
                case.fused.layernorm_backward_input(dy, x, w, *got[1:]),
                case.ops.layernorm_backward_input(dy64, x64, w64, *expected[1:]),
            )
            case.check(
                case.fused.layernorm_backward_input(dy, x, w, *got[1:], x),
                case.ops.layernorm_backward_input(dy64, x64, w64, *expected[1:], x64),
            )
        (dw, dw64), (db, db64) = (case.array(columns, dtype=np.float32) for _ in range(2))
        case.fused.layernorm_backward_weight(dy, x, *got[1:], dw, db)
        case.ops.layernorm_backward_weight(dy64, x64, *expected[1:], dw64, db64)
        for one, other in ((dw, dw64), (db, db64)):
            case.check(one, other, np.float32, 2e-6)


def test_rmsnorm(case):
    for shape in SIZES:
        columns = shape[-1]
        (x, x64), (w, w64), (dy, dy64) = case.array(*shape), case.array(columns), case.array(*shape)
        y64, rstd64 = case.ops.rmsnorm_forward(x64, w64, 1e-5)
        y, rstd = case.fused.rmsnorm_forward(x, w, 1e-5)
        case.check(y, y64)
        case.check(rstd, rstd64, np.float32, 1e-6)
        if columns > 1:
            case.check(
                case.fused.rmsnorm_backward_input(dy, x, w, rstd),
                case.ops.rmsnorm_backward_input(dy64, x64, w64, rstd64),
            )
            case.check(
                case.fused.rmsnorm_backward_input(dy, x, w, rstd, x),
                case.ops.rmsnorm_backward_input(dy64, x64, w64, rstd64, x64),
            )
        # From 0 where there is one column: a single sum may cancel to nothing but its rounding.
        dw, dw64 = case.array(columns, scale=float(columns > 1), dtype=np.float32)
        case.fused.rmsnorm_backward_weight(dy, x, rstd, dw)
        case.ops.rmsnorm_backward_weight(dy64, x64, rstd64, dw64)
        case.check(dw, dw64, np.float32, 2e-6)


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("copy", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("size", [1003, 5100])
def test_adamw(where, rng, step, copy, size, monkeypatch):
    """Of 5100 elements the first run is longer than a block takes, and the last can be packed."""
    monkeypatch.setattr("mpipar.ops.cuda.fused.MOST_BLOCKS_OF_RUN", 1)
    case = Case(where, "float32", rng)
    buffers = [case.array(size) for _ in range(4)]
    buffers[3] = tuple(abs(one) for one in buffers[3])
    got, expected = zip(*buffers, strict=True)
    numbers = ADAMW | {"step": step}
    rounded = None
    if copy is not None:
        rounded = case.to_device(np.full(size, np.nan, DTYPES[copy]))
    case.fused.adamw_runs(*got, runs_of(size), **numbers, copy=rounded)
    case.ops.adamw_runs(*expected, runs_of(size), **numbers)
    for one, other in zip(got, expected, strict=True):
        case.check(one, other)
    if copy is not None:
        assert np.array_equal(case.to_host(rounded), case.to_host(got[0]).astype(DTYPES[copy]))


def test_cross_entropy(case):
    """One shard's view of a vocabulary in two shards; the last is all padding."""
    for rows, columns, start, padding in VOCABULARIES:
        logits, wide = case.array(rows, columns, scale=4.0)
        num_valid = start + columns - padding
        targets = case.rng.integers(0, max(num_valid, 1), rows)
        device_targets = case.to_device(targets)
        stats = case.fused.cross_entropy_forward(logits, device_targets, start, num_valid)
        expected = case.ops.cross_entropy_forward(wide, targets, start, num_valid)
        if padding == columns:
            expected[:, 0] = np.finfo(np.float32).min
        case.check(stats, expected, np.float32, 1e-6)
        sums64 = case.rng.uniform(9.0, 10.0, (rows, 2))
        sums = case.to_device(sums64.astype(np.float32))
        sums64 = case.to_host(sums).astype(np.float64)
        case.fused.cross_entropy_backward_input(logits, device_targets, sums, start, num_valid, 0.2)
        case.check(
            logits,
            case.ops.cross_entropy_backward_input(wide, targets, sums64, start, num_valid, 0.2),
            bound=2 * case.bound,
        )


def test_cross_entropy_of_what_is_no_number(where, rng):
    """An overflow must reach the loss."""
    for value in (np.nan, np.inf):
        case = Case(where, "float32", rng)
        host = np.zeros((1, 200), np.float32)
        host[0, 150] = value
        stats = case.fused.cross_entropy_forward(
            case.to_device(host), case.to_device(np.array([3])), 0, 200
        )
        with np.errstate(invalid="ignore"):
            loss, _ = case.ops.cross_entropy_combine(case.to_host(stats)[None].astype(np.float64))
        assert not np.isfinite(loss).any()


def test_causal_softmax(case):
    tokens = 141
    for order in (
        np.arange(tokens) * 2 + 3,
        case.rng.permutation(tokens),
        np.sort(case.rng.integers(0, 60, tokens)),  # with ties
    ):
        check_causal_softmax(case, tokens, order)


def check_causal_softmax(case, tokens, order):
    scores, wide = case.array(2, 1, tokens, tokens, scale=3.0)
    case.fused.causal_softmax_forward(scores, *2 * [case.to_device(order)], 0.5)
    wide = np.where(order[None, :] <= order[:, None], 0.5 * wide, -np.inf)
    wide = np.exp(wide - wide.max(axis=-1, keepdims=True))
    wide /= wide.sum(axis=-1, keepdims=True)
    case.check(scores, wide)
    assert np.all(case.to_host(scores)[wide == 0] == 0)
    dprobs, dwide = case.array(2, 1, tokens, tokens)
    wide = case.to_host(scores).astype(np.float64)
    case.fused.causal_softmax_backward(scores, dprobs, 0.5)
    case.check(dprobs, 0.5 * wide * (dwide - (wide * dwide).sum(axis=-1, keepdims=True)))


def test_swiglu(case):
    for shape in SHAPES:
        (h, h64), (dy, dy64) = case.array(*shape[:-1], 2, shape[-1]), case.array(*shape)
        case.check(case.fused.swiglu_forward(h), case.ops.swiglu_forward(h64))
        for got, expected in zip(
            case.fused.swiglu_backward_input(dy, h),
            case.ops.swiglu_backward_input(dy64, h64),
            strict=True,
        ):
            case.check(got, expected)


def test_swiglu_far_out(case):
    gate = np.array([-1e4, -80.0, 0.0, 80.0, 1e4]).astype(case.dtype)
    h = np.stack([gate, np.full(5, 2.0, case.dtype)])[None]
    got = case.to_host(case.fused.swiglu_forward(case.to_device(h))).astype(np.float64)
    assert np.allclose(got[0], 2 * np.maximum(gate.astype(np.float64), 0.0), rtol=0, atol=1e-30)


def test_rope_turns_the_first_heads_of_an_array(case):
    for by_row in (False, True):
        for width in (6, 48):
            x, x64 = case.array(2, 5, 14, width)
            places = case.rng.integers(0, 9, (2, 5) if by_row else 5)
            table64 = rope_table(9, width, 10.0, ()).astype(np.float32)
            table, positions = case.to_device(table64), case.to_device(places)
            for function in ("rope_forward", "rope_backward_input"):
                getattr(case.fused, function)(x[:, :, :13], positions, table)
                getattr(case.ops, function)(x64[:, :, :13], places, table64.astype(np.float64))
                case.check(x, x64, bound=2 * case.bound)  # the second turns a rounded result
                x64 = case.to_host(x).astype(np.float64)


def test_rope_of_an_array_with_gaps_is_refused(rng):
    case = Case("forwards", "float32", rng)
    x, _ = case.array(2, 5, 3, 8)
    table = case.to_device(rope_table(9, 6, 10.0, ()).astype(np.float32))
    with pytest.raises(AssertionError):
        case.fused.rope_forward(x[..., :6], case.to_device(np.arange(5)), table)


def test_another_type_is_refused(rng):
    """No kernel computes in float64, and none rounds it silently."""
    case = Case("forwards", "float32", rng)
    x = case.to_device(np.ones((2, 3)))
    with pytest.raises(KeyError, match="float64"):
        case.fused.gelu_forward(x)


# The barrier of block_fold before the warps' values are read; test_cuda_shim.py tries the other.
BEFORE_READS = ("    __syncthreads();\n    float whole", "    float whole")
TWINS = [
    ("cross_entropy.cu", "cross_entropy_stats", BEFORE_READS),
    ("softmax.cu", "causal_softmax_forward", BEFORE_READS),
    ("columns.cu", "column_sums", ("    __syncthreads();  // all sums have been written\n", "")),
]
# Not the last block of some columns adds their slabs up, or every block does, or the next launch
# finds the counter as it was left.
NOT_LAST = [
    ("int(gridDim.y) - 1", "0"),
    ("if (is_last_slab(done))", "if (is_last_slab(done) || true)"),
    ("if (last) done[blockIdx.x] = 0;", ""),
]
# One element too far, or one pack too far: with 33 columns a kernel takes single elements.
ELEMENT = ("i < end; i += threads)", "i <= end; i += threads)")
PACK = ("i < end; i += threads * Wide)", "i <= end; i += threads * Wide)")
TOO_FAR = [
    ("gelu.cu", "gelu_forward", ELEMENT),
    ("norm.cu", "layernorm_forward", ELEMENT),
    ("cross_entropy.cu", "cross_entropy_backward", ELEMENT),
    ("norm.cu", "layernorm_forward", PACK),
]


def call(kernel, loader, columns=33):
    """Run one function with tiny arrays of one or two rows."""
    fused = Fused(Poisoned, loader)
    x = np.linspace(-1.0, 1.0, 2 * columns, dtype=np.float32).reshape(2, columns)
    if kernel == "gelu_forward":
        return fused.gelu_forward(x)
    if kernel == "layernorm_forward":
        return fused.layernorm_forward(x, x[0], x[1], 1e-5)[0]
    if kernel == "column_sums":
        out = np.zeros(columns, np.float32)
        fused.bias_backward_weight(x, out)
        return out
    if kernel == "cross_entropy_stats":
        return fused.cross_entropy_forward(x, np.array([3, 5]), 0, columns)
    if kernel == "cross_entropy_backward":
        sums = np.ones((2, 2), np.float32)
        return fused.cross_entropy_backward_input(x, np.array([3, 5]), sums, 0, columns, 1.0)
    scores = x[:1, :25].reshape(5, 5).copy()
    fused.causal_softmax_forward(scores, np.arange(5), np.arange(5), 1.0)
    return scores


@pytest.mark.shim
@pytest.mark.parametrize(
    ("file", "kernel", "edit"),
    [TWINS[0], *(pytest.param(*twin, marks=pytest.mark.slow) for twin in TWINS[1:])],
)
def test_missing_barrier_gives_wrong_results(file, kernel, edit):
    """The result must be wrong in at least one of the two orders of threads."""
    right = call(kernel, HostLoader())
    assert np.isfinite(right).all()
    twins = [call(kernel, HostLoader(order, edited=file, edit=edit)) for order in (1, -1)]
    assert any(not np.array_equal(twin, right) for twin in twins)


@pytest.mark.shim
@pytest.mark.parametrize("edit", NOT_LAST)
def test_slabs_are_added_up_by_the_last_block_alone(rng, edit):
    x = rng.standard_normal((100, 33)).astype(np.float32)
    fused = Fused(Poisoned, HostLoader(edited="columns.cu", edit=edit))
    found = [np.zeros(33, np.float32) for _ in range(2)]
    for out in found:
        fused.bias_backward_weight(x, out)
    assert any(relative(out, x.sum(axis=0)) > 1e-3 for out in found)


@pytest.mark.slow
@pytest.mark.shim
@pytest.mark.parametrize(
    ("sanitizer", "message", "file", "kernel", "edit"),
    [
        ("thread", "data race", *TWINS[0]),
        ("address", "heap-buffer-overflow", *TOO_FAR[1]),
        *(("address", "heap-buffer-overflow", *twin) for twin in (TOO_FAR[0], *TOO_FAR[2:])),
    ],
)
def test_sanitizer_sees_the_broken_twin(sanitizer, message, file, kernel, edit):
    whole, columns = HostLoader(sanitizer=sanitizer), 32 if edit is PACK else 33
    call(kernel, whole, columns)
    assert all(code == 0 and text == "" for _, code, text in whole.reports), whole.reports
    broken = HostLoader(sanitizer=sanitizer, edited=file, edit=edit)
    call(kernel, broken, columns)
    name, code, text = broken.reports[0]
    assert kernel in name
    assert code
    assert message in text


OF_LLAMA = [
    ("swiglu.cu", "load(h + columns, at), d", "load(h, at), d"),
    ("swiglu.cu", "s[i] + silu[i] * (1.0f - s[i])", "s[i]"),
    ("rope.cu", "% period", "% 1"),
    ("rope.cu", "first[i] * cosine[i] - second[i]", "first[i] * cosine[i] + second[i]"),
    ("rope.cu", "token * stride", "token * (stride - 1)"),
]


@pytest.mark.shim
@pytest.mark.parametrize(("file", "right", "wrong"), OF_LLAMA)
def test_a_broken_kernel_is_seen(monkeypatch, rng, file, right, wrong):
    twin = HostLoader(edited=file, edit=(right, wrong))
    case = Case("forwards", "float32", rng)
    case.fused = Fused(Poisoned, twin)
    test = {"rope.cu": test_rope_turns_the_first_heads_of_an_array, "swiglu.cu": test_swiglu}[file]
    with pytest.raises(AssertionError):
        test(case)
