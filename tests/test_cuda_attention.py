"""Attention in tiles against the plain functions in float64, and broken twins of it."""

import numpy as np
import pytest
from cuda_fused import BOUNDS, DTYPES, HostLoader, Poisoned, hosts, place, relative
from ops_cases import plain

from mpipar.ops.cuda import attention
from mpipar.ops.cuda.attention import Attention

# (B, T, H, d) and the order of positions. Tiles are 16 to 128 tokens by 32, 64 or 128 of width: no
# shape fills them, some tiles are hidden, some have more tokens than there are.
CASES = {
    "increasing": (2, 150, 2, 40),
    "shuffled": (1, 71, 2, 33),  # no address of 16 bytes
    "zigzag": (1, 133, 1, 128),
    "ties": (1, 7, 3, 64),
    "narrow": (1, 201, 1, 16),
}
# Values of 16 bits are rounded: p or ds before the last product, the result, and y before delta is
# made of it. Independent, they add up in squares.
ROUNDINGS = {"y": 2, "dq": 3, "dk": 3, "dv": 2}


def positions_of(kind, tokens, rng):
    """Positions (T,); zigzag: two parts of a longer sequence, as a rank of a context group has."""
    increasing = np.arange(tokens) * 2 + 3
    return {"shuffled": rng.permutation(tokens), "ties": np.sort(rng.integers(0, 4, tokens)),
            "zigzag": np.concatenate([increasing[tokens // 3 :] + 900, increasing[: tokens // 3]]),
            }.get(kind, increasing)


def parts(packed):
    """The views (B, T, H, d) of a packed (B, T, 3, H, d) array."""
    return tuple(packed[:, :, i] for i in range(3))


class Case:
    """Random arrays of one type and shape, and the float64 results of the same values."""

    def __init__(self, rng, dtype, shape, kind="increasing"):
        batch, tokens, heads, width = shape
        self.dtype, self.bound, self.factor = DTYPES[dtype], BOUNDS[dtype], width**-0.5
        self.positions = positions_of(kind, tokens, rng)
        self.qkv, self.dy = (rng.standard_normal(size).astype(self.dtype) for size in
                             ((batch, tokens, 3, heads, width), shape))
        ops, qkv = plain("float64"), self.qkv.astype(np.float64)
        self.y, probs = ops.attention_forward(qkv, self.positions)
        self.dqkv = ops.attention_backward_input(self.dy.astype(np.float64), qkv, probs,
                                                 self.positions)
        q, k, _ = parts(qkv)
        own = np.einsum("bthd,bthd->bht", q, k) * self.factor  # of each token with itself
        self.lse = own - np.log(np.diagonal(probs, axis1=2, axis2=3))

    def run(self, where):
        """Return host arrays y, lse, dqkv, with gradients written to the packed one."""
        xp, loader, to_device, to_host = place(where)
        kernels = Attention(xp, loader)
        qkv, dy, positions = map(to_device, (self.qkv, self.dy, self.positions))
        dqkv = to_device(np.full(self.qkv.shape, np.nan, self.dtype))
        y, lse = kernels.forward(*parts(qkv), positions, self.factor)
        kernels.backward(dy, *parts(qkv), y, lse, positions, self.factor, parts(dqkv))
        return tuple(map(to_host, (y, lse, dqkv)))


@pytest.fixture(params=[hosts()[0], hosts()[-1]])
def where(request):
    """One order of threads: a test below says that the other one gives the same bits."""
    return request.param


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(where, rng, dtype, kind):
    case = Case(rng, dtype, CASES[kind], kind)
    y, lse, dqkv = case.run(where)
    assert (y.dtype, lse.dtype, dqkv.dtype) == (case.dtype, np.float32, case.dtype)
    pairs = zip((y, *parts(dqkv)), (case.y, *parts(case.dqkv)), strict=True)
    errors = {name: relative(*pair) for name, pair in zip(ROUNDINGS, pairs, strict=True)}
    assert all(errors[name] <= case.bound * ROUNDINGS[name] ** 0.5 for name in errors), errors
    assert np.abs(lse - case.lse).max() <= 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token_sees_itself(where, rng, dtype):
    case = Case(rng, dtype, (2, 1, 3, 64))
    y, lse, dqkv = case.run(where)
    dq, dk, dv = parts(dqkv)
    assert np.array_equal(y, parts(case.qkv)[2])
    assert relative(dv, case.dy.astype(np.float64)) <= case.bound  # exp of nearly 0
    assert np.abs(lse - case.lse).max() <= 1e-5
    # The softmax of one score is constant; two float32 sums of `width` products are all but equal.
    assert max(np.abs(x.astype(np.float64)).max() for x in (dq, dk)) <= 1e-5


@pytest.mark.shim
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # float16: another instruction only
def test_every_order_of_threads_gives_the_same_bits(rng, dtype):
    case = Case(rng, dtype, (1, 150, 2, 40), "shuffled")
    for one, other in zip(case.run("forwards"), case.run("backwards"), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_run_gives_the_same_bits(rng, dtype):
    case = Case(rng, dtype, (4, 1000, 6, 64))
    for one, other in zip(case.run("gpu"), case.run("gpu"), strict=True):
        assert one.tobytes() == other.tobytes()


def test_separate_arrays_and_other_strides(where, rng):
    case = Case(rng, "float32", (2, 40, 2, 24))
    xp, loader, to_device, to_host = place(where)
    kernels = Attention(xp, loader)
    results = []
    for change in (np.ascontiguousarray, lambda x: np.repeat(x, 2, axis=-1)[..., ::2]):
        q, k, v = map(to_device, parts(case.qkv))
        q = to_device(change(parts(case.qkv)[0]))
        y, lse = kernels.forward(q, k, v, to_device(case.positions), case.factor)
        grads = kernels.backward(to_device(case.dy), q, k, v, y, lse, to_device(case.positions),
                                 case.factor)
        results.append([to_host(x) for x in (y, lse, *grads)])
    packed_y, packed_lse, dqkv = case.run(where)
    for result in results:
        for one, other in zip(result, (packed_y, packed_lse, *parts(dqkv)), strict=True):
            assert np.array_equal(one, other)


def test_what_no_query_of_a_tile_sees_is_not_read(where, rng):
    """Times a probability of zero, the NaN of a hidden tile would be everywhere."""
    case = Case(rng, "float32", (1, 200, 1, 32))
    first_hidden = 192  # what the tile of queries from 128 to 191 does not see
    case.qkv[:, first_hidden:] = np.nan
    case.dy[:, first_hidden:] = np.nan
    y, lse, dqkv = case.run(where)
    assert relative(y[:, :first_hidden], case.y[:, :first_hidden]) <= case.bound
    assert np.isnan(y[:, first_hidden:]).all()
    assert np.isfinite(lse[..., :first_hidden]).all()
    assert np.isfinite(parts(dqkv)[0][:, :first_hidden]).all()


def test_another_type_is_refused(where, rng):
    xp, loader, to_device, _ = place(where)
    x = to_device(np.ones((1, 2, 1, 8)))
    with pytest.raises(KeyError, match="float64"):
        Attention(xp, loader).forward(x, x, x, to_device(np.arange(2)), 1.0)


def test_every_tile_fits_a_processor():
    """Shared memory of one block on compute capability 8.0, the smallest that is aimed at."""
    for dtype in DTYPES:
        for kernel in attention.FILES:
            for width in (1, *attention.WIDTHS):
                assert attention.tile(kernel, dtype, width).shared_bytes <= 163 << 10


FORWARD, BACKWARD = "flash_forward.cu", "flash_backward.cu"
NO_BARRIER = [(file, (f"        __syncthreads();  // {why}\n", "")) for file, why in (
    (FORWARD, "k is whole; the last step's v is no longer read"),
    (FORWARD, "v is whole; k is no longer read"),
    (BACKWARD, "this place is whole; the other one is no longer read"))]
NO_WAIT = (BACKWARD, ("        wait_copies<0>();\n", ""))
MASK_LOST = (BACKWARD, ("seen ? one * (", "true ? one * ("))


def both_directions(loader, rng):
    """Return the Case and y, lse, dq, dk, dv."""
    case = Case(rng, "float32", (1, 70, 1, 32))
    kernels = Attention(Poisoned, loader)
    q, k, v = parts(case.qkv)
    y, lse = kernels.forward(q, k, v, case.positions, case.factor)
    return case, (y, lse, *kernels.backward(case.dy, q, k, v, y, lse, case.positions, case.factor))


@pytest.mark.shim
@pytest.mark.parametrize(("file", "edit"), [
    *NO_BARRIER, *(pytest.param(*twin, marks=pytest.mark.slow) for twin in (NO_WAIT, MASK_LOST))])
def test_broken_twin_gives_wrong_results(rng, file, edit):
    """In one of the two orders of threads at least."""
    errors = []
    for order in (1, -1):
        case, got = both_directions(HostLoader(order, edited=file, edit=edit), rng)
        expected = (case.y, case.lse, *parts(case.dqkv))
        errors += [relative(*pair) for pair in zip(got, expected, strict=True)]
    assert max(errors) > 100 * case.bound


@pytest.mark.shim
@pytest.mark.parametrize(("sanitizer", "message", "file", "edit"), [
    ("thread", "data race", *NO_BARRIER[1]),
    pytest.param("address", "heap-buffer-overflow", FORWARD,
                 ("if (row < to.tokens && column", "if (row <= to.tokens && column"),
                 marks=pytest.mark.slow),
    pytest.param("thread", "data race", *NO_BARRIER[2], marks=pytest.mark.slow)])
def test_sanitizer_sees_the_broken_twin(rng, sanitizer, message, file, edit):
    case = Case(rng, "float32", (1, 34, 1, 32))

    def reports(**edited):
        loader = HostLoader(sanitizer=sanitizer, **edited)
        kernels = Attention(Poisoned, loader)
        q, k, v = map(np.ascontiguousarray, parts(case.qkv))  # the program gets each array alone
        y, lse = kernels.forward(q, k, v, case.positions, case.factor)
        if file == BACKWARD:
            kernels.backward(case.dy, q, k, v, y, lse, case.positions, case.factor)
        return loader.reports

    assert all(code == 0 and text == "" for _, code, text in reports())
    broken = [text for _, code, text in reports(edited=file, edit=edit) if code]
    assert broken
    assert all(message in text for text in broken)
