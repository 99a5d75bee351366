"""Attention in tiles against the plain functions in float64, and broken twins of it."""

import numpy as np
import pytest
from attention_cases import CASES, ROUNDINGS, Case, Grouped, both_passes, check_forward
from cuda_fused import DTYPES, HostLoader, Poisoned, hosts, place, relative
from ops_cases import parts

from mpipar.ops.cuda import attention
from mpipar.ops.cuda.attention import Attention


@pytest.fixture(params=[hosts()[0], hosts()[-1]])
def where(request):
    """One order of threads; a test below shows that the other one gives the same bits."""
    return request.param


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(where, rng, dtype, kind):
    case = Case(rng, dtype, CASES[kind], kind)
    y, lse, dqkv = case.run(where)
    check_forward(case, y, lse)
    assert dqkv.dtype == case.dtype
    for name, got, expected in zip(("dq", "dk", "dv"), parts(dqkv), parts(case.dqkv), strict=True):
        assert relative(got, expected) <= case.bound * ROUNDINGS[name] ** 0.5, name


# B, Tq, Tk, H, Hkv, d.
@pytest.mark.parametrize("sizes", [(2, 67, 41, 6, 2, 24), (1, 3, 70, 3, 1, 64)])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_key_heads_and_unequal_lengths(where, rng, dtype, wide, sizes):
    """wide: results in float32, the type in which results over parts of the keys are merged."""
    case = Grouped(rng, dtype, sizes)
    y, lse, *grads = case.run(where, wide)
    kind = np.float32 if wide else case.dtype
    assert {x.dtype for x in (y, *grads)} == {np.dtype(kind)}
    assert lse.dtype == np.float32
    nobody = np.isneginf(case.lse)
    assert nobody.any()
    assert np.array_equal(np.isneginf(lse), nobody)
    assert np.abs(lse[~nobody] - case.lse[~nobody]).max() <= 1e-5
    for name, got, expected in zip(ROUNDINGS, (y, *grads), (case.y, *case.grads), strict=True):
        assert relative(got, expected) <= case.bound * ROUNDINGS[name] ** 0.5, name


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
    grouped = Grouped(rng, dtype, (1, 67, 41, 6, 2, 24))
    for one, other in zip((*case.run("forwards"), *grouped.run("forwards", True)),
                          (*case.run("backwards"), *grouped.run("backwards", True)), strict=True):
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
        y, lse, grads = both_passes(
            kernels, (q, k, v), to_device(case.dy), *2 * [to_device(case.positions)])
        results.append([to_host(x) for x in (y, lse, *grads)])
    packed_y, packed_lse, dqkv = case.run(where)
    for result in results:
        for one, other in zip(result, (packed_y, packed_lse, *parts(dqkv)), strict=True):
            assert np.array_equal(one, other)


def test_what_no_query_of_a_tile_sees_is_not_read(where, rng):
    """A hidden tile holds NaN: if it were read, even times zero, NaN would be everywhere."""
    case = Case(rng, "float32", (1, 200, 1, 32))
    first_hidden = 192  # the tile of queries from 128 to 191 does not see it
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
        Attention(xp, loader).forward(x, x, x, *2 * [to_device(np.arange(2))])


def test_every_tile_fits_a_processor():
    """The limit is a block's shared memory on compute capabilities 8.6 and 8.9, the smallest."""
    for dtype in DTYPES:
        for kernel in attention.FILES:
            for width in (1, *attention.WIDTHS):
                assert attention.tile(kernel, dtype, width).shared_bytes <= 99 << 10


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
    y, lse, grads = both_passes(
        Attention(Poisoned, loader), parts(case.qkv), case.dy, case.positions, case.positions)
    return case, (y, lse, *grads)


@pytest.mark.shim
@pytest.mark.parametrize(("file", "edit"), [
    NO_BARRIER[0], *(pytest.param(*twin, marks=pytest.mark.slow)
                     for twin in (*NO_BARRIER[1:], NO_WAIT, MASK_LOST))])
def test_broken_twin_gives_wrong_results(rng, file, edit):
    """The result must be wrong in at least one of the two orders of threads."""
    errors = []
    for order in (1, -1):
        case, got = both_directions(HostLoader(order, edited=file, edit=edit), rng)
        expected = (case.y, case.lse, *parts(case.dqkv))
        errors += [relative(*pair) for pair in zip(got, expected, strict=True)]
    assert max(errors) > 100 * case.bound


@pytest.mark.shim
@pytest.mark.parametrize(("file", "edit", "wrong"), [
    (FORWARD, ("job.head / (heads / kv_heads)", "job.head % kv_heads"), {"y", "lse", "dq"}),
    pytest.param(BACKWARD, ("++member < members", "++member < members && false"), {"dk", "dv"},
                 marks=pytest.mark.slow)],
    ids=["another key head", "one head of each group"])
def test_broken_twin_of_a_group_gives_wrong_results(rng, file, edit, wrong):
    case = Grouped(rng, "float32", (1, 20, 33, 6, 2, 24))
    loader = HostLoader(edited=file, edit=edit)
    y, lse, grads = both_passes(Attention(Poisoned, loader), (case.q, *case.kv(case.cache)),
                                case.dy, case.q_pos, case.k_pos, True)
    seen = np.isfinite(case.lse)
    errors = {"y": relative(y, case.y), "lse": relative(lse[seen], case.lse[seen])}
    errors |= {name: relative(*pair) for name, *pair in zip(
        ("dq", "dk", "dv"), grads, case.grads, strict=True)}
    assert wrong <= {name for name, error in errors.items() if error > 100 * case.bound}


@pytest.mark.slow
@pytest.mark.shim
@pytest.mark.parametrize(("sanitizer", "message", "file", "edit"), [
    ("thread", "data race", *NO_BARRIER[1]),
    ("address", "heap-buffer-overflow", FORWARD,
     ("if (row < to.tokens && column", "if (row <= to.tokens && column")),
    ("thread", "data race", *NO_BARRIER[2])])
def test_sanitizer_sees_the_broken_twin(rng, sanitizer, message, file, edit):
    case = Case(rng, "float32", (1, 34, 1, 32))

    def reports(**edited):
        loader = HostLoader(sanitizer=sanitizer, **edited)
        kernels = Attention(Poisoned, loader)
        q, k, v = map(np.ascontiguousarray, parts(case.qkv))  # the program gets each array alone
        positions = case.positions, case.positions
        y, lse = kernels.forward(q, k, v, *positions)
        if file == BACKWARD:
            kernels.backward(case.dy, q, k, v, lse, kernels.delta(case.dy, y),
                             q_pos=positions[0], k_pos=positions[1])
        return loader.reports

    assert all(code == 0 and text == "" for _, code, text in reports())
    broken = [text for _, code, text in reports(edited=file, edit=edit) if code]
    assert broken
    assert all(message in text for text in broken)
