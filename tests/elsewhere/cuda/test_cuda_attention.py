"""Tiled attention beside test_cuda_kernels.py: its tiles, what it reads and counts, its twins."""

import ml_dtypes
import numpy as np
import ops_cases
import pytest
from attention_cases import NAMES, Case, many_keys
from cuda_host import KernelError, counter
from cuda_ops import HostLoader, HostOps, host_ops
from ops_cases import HALF_UNIT, Sizes, relative
from test_cuda_kernels import DTYPES, SIZES, is_wrong, slow_but_first

from mpipar.ops import make
from mpipar.ops.cuda import attention

KINDS = {name: getattr(ml_dtypes, name, name) for name in DTYPES}
# Values of 16 bits are rounded: p or ds before the last product, and the queries' gradients' parts.
TOL = {"float32": 1e-5, **{name: 3 * unit for name, unit in HALF_UNIT.items()}}


def errors(case, found):
    """The largest error of (y, dq, dk, dv)."""
    of_each = zip(NAMES, found, case.expected, strict=True)
    return max(relative(got, wanted) for name, got, wanted in of_each if name != "lse")


@pytest.mark.shim
@pytest.mark.parametrize("of_keys", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_that_a_block_looks_for_more_than_once(rng, dtype, of_keys):
    case = many_keys(rng, KINDS[dtype], of_keys)
    assert errors(case, case.block(host_ops(dtype))) <= TOL[dtype]


def in_order(rng, tokens, heads, width, dtype, kind="increasing"):
    """A Case whose queries and keys are the tokens of one sequence."""
    positions = ops_cases.positions_of(kind, tokens, rng)
    return Case(rng, (1, tokens, tokens, heads, heads, width), (positions, positions), KINDS[dtype])


@pytest.mark.shim
@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("kind", ["shuffled", "increasing"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_several_tiles(monkeypatch, rng, dtype, kind, most):
    """So few parts of dq that each has several tiles of keys; otherwise it has one."""
    monkeypatch.setattr(attention, "MOST_PARTS", most)
    case = in_order(rng, 300, 1, 64, dtype, kind)
    assert attention.parts_shape(case.dy, case.dy)[0] == most
    assert errors(case, case.block(host_ops(dtype))) <= TOL[dtype]


def test_parts_are_enough_for_a_large_gpu_and_no_more():
    def count(batch, tokens, heads, kv_heads):
        q, k = (np.empty((batch, tokens, n, 64), KINDS["bfloat16"]) for n in (heads, kv_heads))
        return attention.parts_shape(q, k)

    assert count(32, 1024, 12, 12) == (2, 32, 12, 1024, 64)
    assert count(64, 1024, 12, 12)[0] == 1
    assert count(2, 1000, 12, 12) == (8, 2, 12, 1024, 64)
    assert count(1, 300, 12, 4) == (3, 1, 12, 320, 64)


@pytest.mark.shim
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # float16: another instruction only
def test_every_order_of_threads_gives_the_same_bits(dtype):
    one, other = (
        ops_cases.call_every_op(
            host_ops(dtype, order=order), SIZES["odd"], "shuffled", only=ops_cases.attention
        )
        for order in (1, -1)
    )
    for name, x in one.items():
        assert x.tobytes() == other[name].tobytes(), name


@pytest.mark.gpu
@pytest.mark.real_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_run_gives_the_same_bits(dtype):
    ops, sizes = make("cuda", dtype), Sizes(4, 1000, 1, 1, 6, 64, 1)
    one, other = (ops_cases.call_every_op(ops, sizes, only=ops_cases.attention) for _ in range(2))
    for name, x in one.items():
        assert ops.to_host(x).tobytes() == ops.to_host(other[name]).tobytes(), name


@pytest.mark.shim
@pytest.mark.parametrize("width", [attention.MOST_WIDTH, attention.MOST_WIDTH + 8])
def test_what_runs_where(rng, width):
    """Heads that no tile takes go to the plain formula, with the same results."""
    ops, positions = host_ops(), (np.arange(5) * 3, np.arange(7) * 2 + 1)  # query 0 sees no key
    case = Case(rng, (1, 5, 7, 4, 2, width), positions, "float32")
    for found in (case.saved(ops), case.block(ops)):
        case.check(found, 2e-5)
    tiles = {"flash_forward", "flash_delta", "flash_backward", "flash_dq"}
    plain = {"flash_delta"}
    started = {name.split("<")[0] for name in ops.loader.started}
    assert started == (tiles if width == attention.MOST_WIDTH else plain)


@pytest.mark.shim
def test_other_strides_give_the_same_bits(rng):
    case, ops = in_order(rng, 40, 2, 24, "float32"), host_ops()
    expected = case.saved(ops)
    case.qkv = (
        np.repeat(case.qkv[0], 2, axis=-1)[..., ::2],
        *map(np.ascontiguousarray, case.qkv[1:]),
    )
    for one, other in zip(case.saved(ops), expected, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.shim
def test_what_no_query_of_a_tile_sees_is_not_read(rng):
    """A hidden tile holds NaN: if it were read, even times zero, NaN would be everywhere."""
    case, hidden = in_order(rng, 200, 1, 32, "float32"), slice(192, None)
    for x in (*case.qkv, case.dy):
        x[:, hidden] = np.nan  # the tile of queries from 128 to 191 does not see it
    y, lse, dq, _, _ = case.block(host_ops())
    assert relative(y[:, :192], case.expected[0][:, :192]) <= TOL["float32"]
    assert np.isnan(y[:, hidden]).all()
    assert np.isfinite(lse[..., :192]).all()
    assert np.isfinite(dq[:, :192]).all()


STATIC_SHARED = 128  # of `Visits`


def test_every_tile_fits_a_processor():
    """The limit is a block's shared memory on compute capabilities 8.6 and 8.9, the smallest."""
    for dtype in DTYPES:
        for kernel in attention.TILES[4]:
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
WAIT = "        wait_copies<0>();\n"
# float32 reads its queries from shared memory in each step, behind another wait and barrier.
OF_16_BITS = [
    (FORWARD, (line, ""), "bfloat16")
    for line in (
        "    wait_copies<1>();\n",
        "    __syncthreads();  // q is complete, while k and v are on their way\n",
    )
]
TWINS = [
    *NO_BARRIER,
    *((file, (WAIT, "")) for file in (FORWARD, BACKWARD)),
    (FORWARD, (WAIT, "        wait_copies<1>();\n")),  # one group of copies too few is waited for
    (BACKWARD, ("= ds.sum[n][e] = 0.0f", "= 0.0f")),  # the mask is lost
    (FORWARD, ("job.head / (heads / kv_heads)", "job.head % kv_heads")),
    (BACKWARD, ("member < members;", "member < 1;")),
    *OF_16_BITS,
]


@pytest.mark.shim
@pytest.mark.parametrize("twin", slow_but_first((one,) for one in TWINS))
def test_a_broken_twin_is_seen(twin):
    file, edit, *dtype = twin
    assert is_wrong(ops_cases.attention, "tiles", *dtype, edited=file, edit=edit)


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
        *slow_but_first(
            [
                (BACKWARD, LOOKS[1], False),
                (FORWARD, LOOKS[1], True),
                (BACKWARD, LOOKS[0], False),
                (BACKWARD, ("if (first_of_part) clear(0", "if (false) clear(0"), False),
            ]
        ),
    ],
)
def test_a_broken_twin_of_a_look_is_seen(rng, file, edit, of_keys):
    """It gives wrong results, or comes to an end that no GPU allows."""
    case, found = many_keys(rng, "float32", of_keys), []
    for order in (1, -1):
        try:
            found.append(errors(case, case.block(host_ops(order=order, edited=file, edit=edit))))
        except KernelError:
            found.append(np.inf)
    assert max(found) > 100 * TOL["float32"]


@pytest.mark.shim
@pytest.mark.parametrize(
    "edit",
    slow_but_first(
        (edit,)
        for edit in (
            ("first += parts * Keys", "first += 2 * parts * Keys"),
            ("bool first_of_part =", "bool first_of_part = true ||"),
            ("if (first_of_part) clear(now", "if (false) clear(now"),
        )
    ),
)
def test_a_broken_twin_of_the_parts_is_seen(rng, monkeypatch, edit):
    monkeypatch.setattr(attention, "MOST_PARTS", 1)
    case = in_order(rng, 200, 1, 32, "float32", "zigzag")
    found = case.block(host_ops(edited=BACKWARD, edit=edit))
    assert relative(found[2], case.expected[2]) > 100 * TOL["float32"]


SEES = "__device__ inline bool sees(long long row, long long column) {"
LOOK = "j < columns ?"
MMA = "const unsigned (&a)[4], const unsigned (&b)[2]) {"
TOKENS, QUERIES = 384, 128  # a sequence, and the rows of a tile of forward for 16 bits


def counted(rng, kernel, edit):
    """How often the edited place is passed in attention over TOKENS in bfloat16, and the Tile."""
    chosen = attention.tile(kernel, "bfloat16", 64)
    case = in_order(rng, TOKENS, 1, 64, "bfloat16")
    case.saved(HostOps(HostLoader(edited=chosen.file, edit=edit)))
    return counter(chosen.file, chosen.name, edit).value, chosen


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
    count, chosen = counted(rng, "flash_forward", edit)
    assert (chosen.rows, TOKENS % chosen.rows) == (QUERIES, 0)
    assert count == expected


@pytest.mark.shim
@pytest.mark.parametrize(("kernel", "products"), [("flash_forward", 2), ("flash_backward", 5)])
def test_number_of_products(rng, kernel, products):
    """Each tile that is seen takes part once. An instruction multiplies 16 x 8 x 16."""
    count, chosen = counted(rng, kernel, (MMA, f"{MMA} ++counted;"))
    rows, columns = chosen.rows, chosen.columns
    first = np.arange(0, TOKENS, rows)
    seen = (first + rows) // columns if products == 2 else (TOKENS - first) // columns
    each = rows * columns * chosen.width // (16 * 8 * 16)
    assert count == 32 * products * each * seen.sum()
