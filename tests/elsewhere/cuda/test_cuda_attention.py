"""Tiled attention against the plain functions in float64, and its broken twins."""

import numpy as np
import pytest
from attention_cases import CASES, ROUNDINGS, Case, Grouped, both_passes, check_forward
from cuda_fused import DTYPES, HostLoader, Poisoned, hosts, place, relative
from cuda_host import KernelError, counter
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


@pytest.mark.parametrize("of_keys", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_that_a_block_looks_for_more_than_once(where, rng, dtype, of_keys):
    case = Grouped.long(rng, dtype, of_keys)
    assert errors_of_long(case, case.run(where, True)) <= case.bound * 3**0.5


def flat(passes):
    """(y, lse, dq, dk, dv) of what `both_passes` returns."""
    y, lse, grads = passes
    return y, lse, *grads


def errors_of_long(case, found):
    y, _, *grads = found
    return max(relative(*pair) for pair in zip((y, *grads), (case.y, *case.grads), strict=True))


@pytest.fixture(params=[1, 2])
def few_parts(request, monkeypatch):
    """So few parts of dq that each has several tiles of keys; otherwise it has one."""
    monkeypatch.setattr(attention, "MOST_PARTS", request.param)
    return request.param


@pytest.mark.parametrize("kind", ["shuffled", "increasing"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_several_tiles(where, rng, dtype, kind, few_parts):
    case = Case(rng, dtype, (1, 300, 1, 64), kind)
    assert attention.parts_shape(case.dy, case.dy)[0] == few_parts
    dqkv = case.run(where)[2]
    for name, got, expected in zip(("dq", "dk", "dv"), parts(dqkv), parts(case.dqkv), strict=True):
        assert relative(got, expected) <= case.bound * ROUNDINGS[name] ** 0.5, name


def test_parts_are_enough_for_a_large_gpu_and_no_more():
    def count(batch, tokens, heads, kv_heads):
        q, k = (np.empty((batch, tokens, n, 64), DTYPES["bfloat16"]) for n in (heads, kv_heads))
        return attention.parts_shape(q, k)

    assert count(32, 1024, 12, 12) == (2, 32, 12, 1024, 64)
    assert count(64, 1024, 12, 12)[0] == 1
    assert count(2, 1000, 12, 12) == (8, 2, 12, 1024, 64)
    assert count(1, 300, 12, 4) == (3, 1, 12, 320, 64)


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
    for one, other in zip(
        (*case.run("forwards"), *grouped.run("forwards", True)),
        (*case.run("backwards"), *grouped.run("backwards", True)),
        strict=True,
    ):
        assert one.tobytes() == other.tobytes()


@pytest.mark.gpu
@pytest.mark.real_gpu
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
            kernels, (q, k, v), to_device(case.dy), *2 * [to_device(case.positions)]
        )
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


STATIC_SHARED = 128  # of `Visits`


def test_every_tile_fits_a_processor():
    """The limit is a block's shared memory on compute capabilities 8.6 and 8.9, the smallest."""
    for dtype in DTYPES:
        for kernel in attention.FILES:
            for width in (1, *attention.WIDTHS):
                chosen = attention.tile(kernel, dtype, width)
                assert chosen.shared_bytes + STATIC_SHARED <= 99 << 10


FORWARD, BACKWARD = "flash_forward.cu", "flash_backward.cu"
NO_BARRIER = [
    (file, (f"        __syncthreads();  // {why}\n", ""))
    for file, why in (
        (FORWARD, "this place is complete; the other one is no longer read"),
        (BACKWARD, "this place is complete; the other one and ds are no longer read"),
        (BACKWARD, "ds is complete"),
    )
]
NO_WAIT = [(file, ("        wait_copies<0>();\n", "")) for file in (FORWARD, BACKWARD)]
# One group of copies too few is waited for.
LATE = (FORWARD, ("        wait_copies<0>();\n", "        wait_copies<1>();\n"))
# float32 reads its queries from shared memory in each step, behind another wait and barrier.
OF_16_BITS = [
    (FORWARD, (line, ""))
    for line in (
        "    wait_copies<1>();\n",
        "    __syncthreads();  // q is complete, while k and v are on their way\n",
    )
]
MASK_LOST = (BACKWARD, ("= ds.sum[n][e] = 0.0f", "= 0.0f"))


LOOKS = [
    (f"        __syncthreads();  // {why}\n", "")
    for why in (
        "the results of the last look are no longer read",
        "all warps have written what they found",
    )
]


@pytest.mark.shim
@pytest.mark.parametrize(
    ("file", "edit", "of_keys"),
    [
        (FORWARD, LOOKS[0], True),
        (BACKWARD, LOOKS[1], False),
        *(
            pytest.param(*twin, marks=pytest.mark.slow)
            for twin in (
                (FORWARD, LOOKS[1], True),
                (BACKWARD, LOOKS[0], False),
                (BACKWARD, ("if (first_of_part) clear(0", "if (false) clear(0"), False),
            )
        ),
    ],
)
def test_broken_twin_of_a_look_is_seen(rng, file, edit, of_keys):
    """It gives wrong results, or comes to an end that no GPU allows."""
    case, errors = Grouped.long(rng, "float32", of_keys), []
    for order in (1, -1):
        kernels = Attention(Poisoned, HostLoader(order, edited=file, edit=edit))
        try:
            errors.append(
                errors_of_long(
                    case,
                    flat(
                        both_passes(
                            kernels,
                            (case.q, *case.kv(case.cache)),
                            case.dy,
                            case.q_pos,
                            case.k_pos,
                            True,
                        )
                    ),
                )
            )
        except KernelError:
            errors.append(np.inf)
    assert max(errors) > 100 * case.bound


@pytest.mark.shim
@pytest.mark.parametrize(
    "edit",
    [
        ("first += parts * Keys", "first += 2 * parts * Keys"),
        *(
            pytest.param(twin, marks=pytest.mark.slow)
            for twin in (
                ("bool first_of_part =", "bool first_of_part = true ||"),
                ("if (first_of_part) clear(now", "if (false) clear(now"),
            )
        ),
    ],
)
def test_broken_twin_of_the_parts_is_seen(rng, monkeypatch, edit):
    monkeypatch.setattr(attention, "MOST_PARTS", 1)
    case = Case(rng, "float32", (1, 200, 1, 32), "zigzag")
    _, _, grads = both_passes(
        Attention(Poisoned, HostLoader(edited=BACKWARD, edit=edit)),
        parts(case.qkv),
        case.dy,
        *2 * [case.positions],
    )
    assert relative(grads[0], parts(case.dqkv)[0]) > 100 * case.bound


SEES = "__device__ inline bool sees(long long row, long long column) {"
LOOK = "j < columns ?"
TOKENS, QUERIES = 384, 128  # a sequence, and the rows of a tile of forward for 16 bits


@pytest.mark.shim
@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        # The diagonal crosses QUERIES x QUERIES pairs of each block; earlier tiles are seen whole.
        ((SEES, f"{SEES} ++counted;"), TOKENS // QUERIES * QUERIES**2),
        ((LOOK, "j < columns && ++counted ?"), TOKENS // QUERIES * TOKENS),
    ],
    ids=["pairs compared", "positions of keys read to choose tiles"],
)
def test_positions_are_compared_where_the_diagonal_crosses(rng, edit, expected):
    case = Case(rng, "bfloat16", (1, TOKENS, 1, 64))
    chosen = attention.tile("flash_forward", "bfloat16", 64)
    assert (chosen.rows, TOKENS % chosen.rows) == (QUERIES, 0)
    loader = HostLoader(edited=FORWARD, edit=edit)
    Attention(Poisoned, loader).forward(*parts(case.qkv), *2 * [case.positions])
    assert counter(FORWARD, chosen.name, edit).value == expected


MMA = "const unsigned (&a)[4], const unsigned (&b)[2]) {"


@pytest.mark.shim
@pytest.mark.parametrize(("kernel", "products"), [("flash_forward", 2), ("flash_backward", 5)])
def test_number_of_products(rng, kernel, products):
    """Each tile that is seen takes part once. An instruction multiplies 16 x 8 x 16."""
    case, chosen = Case(rng, "bfloat16", (1, TOKENS, 1, 64)), attention.tile(kernel, "bfloat16", 64)
    edit, (file, rows, columns) = (
        (MMA, f"{MMA} ++counted;"),
        (chosen.file, chosen.rows, chosen.columns),
    )
    both_passes(
        Attention(Poisoned, HostLoader(edited=file, edit=edit)),
        parts(case.qkv),
        case.dy,
        *2 * [case.positions],
    )
    first = np.arange(0, TOKENS, rows)
    seen = (first + rows) // columns if products == 2 else (TOKENS - first) // columns
    each = rows * columns * chosen.width // (16 * 8 * 16)
    assert counter(file, chosen.name, edit).value == 32 * products * each * seen.sum()


def both_directions(loader, rng, dtype):
    """Return the Case and y, lse, dq, dk, dv."""
    case = Case(rng, dtype, (1, 70, 1, 32))
    y, lse, grads = both_passes(
        Attention(Poisoned, loader), parts(case.qkv), case.dy, case.positions, case.positions
    )
    return case, (y, lse, *grads)


@pytest.mark.shim
@pytest.mark.parametrize(
    ("file", "edit"),
    [
        NO_BARRIER[0],
        *(
            pytest.param(*twin, marks=pytest.mark.slow)
            for twin in (*NO_BARRIER[1:], *NO_WAIT, LATE, MASK_LOST, *OF_16_BITS)
        ),
    ],
)
def test_broken_twin_gives_wrong_results(rng, file, edit):
    """The result must be wrong in at least one of the two orders of threads."""
    dtype = "bfloat16" if (file, edit) in OF_16_BITS else "float32"
    errors = []
    for order in (1, -1):
        case, got = both_directions(HostLoader(order, edited=file, edit=edit), rng, dtype)
        expected = (case.y, case.lse, *parts(case.dqkv))
        errors += [relative(*pair) for pair in zip(got, expected, strict=True)]
    assert max(errors) > 100 * case.bound


@pytest.mark.shim
@pytest.mark.parametrize(
    ("file", "edit", "wrong"),
    [
        (FORWARD, ("job.head / (heads / kv_heads)", "job.head % kv_heads"), {"y", "lse", "dq"}),
        pytest.param(
            BACKWARD, ("member < members;", "member < 1;"), {"dk", "dv"}, marks=pytest.mark.slow
        ),
    ],
    ids=["another key head", "one head of each group"],
)
def test_broken_twin_of_a_group_gives_wrong_results(rng, file, edit, wrong):
    case = Grouped(rng, "float32", (1, 20, 33, 6, 2, 24))
    loader = HostLoader(edited=file, edit=edit)
    y, lse, grads = both_passes(
        Attention(Poisoned, loader),
        (case.q, *case.kv(case.cache)),
        case.dy,
        case.q_pos,
        case.k_pos,
        True,
    )
    seen = np.isfinite(case.lse)
    errors = {"y": relative(y, case.y), "lse": relative(lse[seen], case.lse[seen])}
    errors |= {
        name: relative(*pair)
        for name, *pair in zip(("dq", "dk", "dv"), grads, case.grads, strict=True)
    }
    assert wrong <= {name for name, error in errors.items() if error > 100 * case.bound}


@pytest.mark.slow
@pytest.mark.shim
@pytest.mark.parametrize(
    ("sanitizer", "message", "file", "edit"),
    [
        ("thread", "data race", *NO_BARRIER[0]),
        (
            "address",
            "heap-buffer-overflow",
            FORWARD,
            ("if (i < to.tokens && j", "if (i <= to.tokens && j"),
        ),
    ],
)
def test_sanitizer_sees_the_broken_twin(rng, sanitizer, message, file, edit):
    case = Case(rng, "float32", (1, 34, 1, 32))

    def reports(**edited):
        loader = HostLoader(sanitizer=sanitizer, **edited)
        kernels = Attention(Poisoned, loader)
        q, k, v = map(np.ascontiguousarray, parts(case.qkv))  # the program gets each array alone
        positions = case.positions, case.positions
        y, stats = kernels.forward(q, k, v, *positions)
        if file == BACKWARD:
            kernels.backward(
                case.dy,
                q,
                k,
                v,
                stats,
                kernels.delta(case.dy, y),
                q_pos=positions[0],
                k_pos=positions[1],
            )
        return loader.reports

    assert all(code == 0 and text == "" for _, code, text in reports())
    broken = [text for _, code, text in reports(edited=file, edit=edit) if code]
    assert broken
    assert all(message in text for text in broken)
