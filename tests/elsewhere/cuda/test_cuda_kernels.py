"""Every fused kernel and those of embeddings against the plain functions in float64, and twins.

On the CPU a case runs with all kernels of `mpipar/ops/cuda`, whose threads run in either order, in
memory that is NaN at first. Tests marked gpu run the same on a GPU.
"""

import itertools

import numpy as np
import ops_cases
import pytest
from cuda_host import KernelError
from cuda_ops import HostLoader, HostOps, gpu_ops, host_ops
from ops_cases import OPERANDS, Sizes, call_every_op, check_every_op, relative

from mpipar.ops.array_attention import rope_table
from mpipar.ops.cuda import fused
from mpipar.ops.cupy_ops import MERGE, SORT, SORT_THREADS

DTYPES = ("float32", "bfloat16", "float16")
FLOAT32 = 2e-6  # of a few steps before the rounding of the result
# Rows and columns are no multiples of a warp, a slab or a tile. "packs": more packs of 16 bytes
# than a warp has threads, and rows that are more than a block of columns.cuh has above each other.
# "tiles": several tiles of attention.
SIZES = {
    "few": Sizes(batch=1, tokens=3, width=3, inner=1, heads=1, head=1, rows=3),
    "odd": Sizes(batch=2, tokens=37, width=130, inner=33, heads=3, head=33, rows=11),
    "packs": Sizes(batch=3, tokens=23, width=264, inner=72, heads=1, head=128, rows=552),
    "tiles": Sizes(batch=1, tokens=150, width=33, inner=130, heads=2, head=40, rows=130),
}
# "+1": arrays begin an element behind a multiple of 16 bytes, which packs and tiles need.
KINDS = ("increasing", "shuffled", "zigzag", "ties")
OFF = ("packs+1", "tiles+1")
by_case = [
    pytest.mark.parametrize("kind", KINDS),
    pytest.mark.parametrize("where", [*SIZES, *OFF]),
    pytest.mark.parametrize("dtype", DTYPES),
]


def every(test):
    """The test with every pair of sizes, types, alignments and orders of positions."""
    for mark in by_case:
        test = mark(test)
    return test


def check(ops, size="odd", kind="ties", **options):
    """Compare functions with float64; the norm of an error counts."""

    def close(got, expected, roundings, name):
        assert np.shape(got) == np.shape(expected), name
        error = relative(got, expected)
        assert error <= FLOAT32 + roundings, (name, error)

    check_every_op(ops, SIZES[size], close, OPERANDS, kind=kind, **options)


@pytest.mark.shim
@pytest.mark.parametrize("way", ["many blocks, tiles", "few blocks, whole scores"])
@pytest.mark.parametrize("order", [1, -1])
@every
def test_every_function(monkeypatch, dtype, where, kind, order, way):
    """few blocks: a thread takes several elements in turn. whole scores: as of wide heads."""
    if way == "few blocks, whole scores":
        for name, most in (("MOST_BLOCKS", 2), ("MOST_BLOCKS_OF_RUN", 1), ("MOST_SLABS", 2)):
            monkeypatch.setattr(fused, name, most)
        monkeypatch.setattr(HostOps, "tiled_head_width", 0)
    size, _, off = where.partition("+")
    check(host_ops(dtype, order=order, off=int(off or 0)), size, kind)


def check_on_a_gpu(dtype, where, kind):
    size, _, off = where.partition("+")
    check(gpu_ops(dtype, int(off or 0)), size, kind)


@pytest.mark.gpu
@pytest.mark.real_gpu
@pytest.mark.pairs
@every
def test_every_function_on_a_gpu(dtype, where, kind):
    check_on_a_gpu(dtype, where, kind)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "where"), [*zip(itertools.cycle(DTYPES), SIZES), *itertools.product(DTYPES, OFF)]
)
def test_launches_of_every_function(dtype, where):
    """The emulated kernels run with all pairs above: here they are launched as on a GPU.

    The CUDA machine also sees a load or store off its alignment.
    """
    check_on_a_gpu(dtype, where, "ties")


@pytest.mark.shim
def test_embeddings_in_float64():
    check(HostOps(dtype="float64"), only=ops_cases.embeddings)


@pytest.mark.shim
def test_a_wider_sum_after_a_narrow_one_starts_from_zero():
    """The counters of columns.cuh are left at 0, and there are enough of them."""
    ops = host_ops()
    for size in ("few", "odd", "packs", "few"):
        check(ops, size, only=ops_cases.norm)


@pytest.mark.shim
@pytest.mark.parametrize("part", [ops_cases.norm, ops_cases.products, ops_cases.embeddings])
def test_the_order_of_threads_changes_no_bit(part):
    """Atomics would add up in the order of threads."""
    one, other = (
        call_every_op(host_ops(order=order), SIZES["odd"], only=part) for order in (1, -1)
    )
    for name, x in one.items():
        assert x.tobytes() == other[name].tobytes(), name


@pytest.mark.shim
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_overflow_reaches_the_loss(value):
    ops, logits = host_ops(), np.zeros((3, 200), np.float32)
    logits[1, 150] = value
    stats = ops.cross_entropy_forward(logits, np.array([3, 3, 3]), 0, 200)
    loss, _ = ops.cross_entropy_combine(stats[None])
    assert np.isfinite(loss).tolist() == [True, False, True]


@pytest.mark.shim
def test_a_shard_of_padding_alone():
    ops, logits = host_ops(), np.full((5, 20), np.nan, np.float32)
    stats = ops.cross_entropy_forward(logits, np.zeros(5, np.int64), 20, 20)
    assert stats.tolist() == [[np.finfo(np.float32).min, 0.0, 0.0]] * 5
    sums = np.ones((5, 2), np.float32)
    assert not ops.cross_entropy_backward_input(
        logits, np.zeros(5, np.int64), sums, 20, 20, 0.2
    ).any()


def test_what_no_kernel_takes_is_refused():
    """None computes in float64, and none rounds it silently; none knows heads with gaps."""
    ops, x, five = HostOps(), np.ones((2, 5, 3, 8)), np.arange(5)
    for call in (
        lambda: ops.gelu_forward(x),
        lambda: ops.attention_forward(x, x, x, five, five),
    ):
        with pytest.raises(KeyError, match="float64"):
            call()
    table = rope_table(9, 6, 10.0, ()).astype(np.float32)
    with pytest.raises(AssertionError):
        ops.rope_forward(x.astype(np.float32)[..., :6], five, table)


# Broken twins by the functions that show them. A barrier is missed in one order of threads.
BEFORE_READS = ("    __syncthreads();\n    float whole", "    float whole")
TWINS = {
    ops_cases.products: [
        ("columns.cu", ("    __syncthreads();  // all sums have been written\n", "")),
        # Not the last block of some columns adds their slabs up, or every block does, or the next
        # launch finds the counter as it was left.
        ("columns.cu", ("int(gridDim.y) - 1", "0")),
        ("columns.cu", ("if (is_last_slab(done))", "if (is_last_slab(done) || true)")),
        ("columns.cu", ("if (last) done[blockIdx.x] = 0;", "")),
    ],
    ops_cases.loss: [("cross_entropy.cu", BEFORE_READS)],
    ops_cases.llama: [
        ("swiglu.cu", ("load(h + columns, at), d", "load(h, at), d")),
        ("swiglu.cu", ("s[i] + silu[i] * (1.0f - s[i])", "s[i]")),
        ("rope.cu", ("% period", "% 1")),
        ("rope.cu", ("first[i] * cosine[i] - second[i]", "first[i] * cosine[i] + second[i]")),
        ("rope.cu", ("token * stride", "token * (stride - 1)")),
    ],
    ops_cases.embeddings: [
        ("embedding.cu", edit)
        for edit in (
            ("if (inside)", "if (true)"),
            ("blockIdx.x % n", "blockIdx.x % 2 % n"),
            ("(first > 0 && ids[order[first - 1]] == id)", "false"),
            ("i < n && ids[order[i]] == id", "i < n"),
            ("b < batch", "b < batch - 1"),
            ("for (int i = 1; i < SUM_HEIGHT; ++i) sum", "for (int i = 1; i < 2; ++i) sum"),
            ("__syncthreads();  // the sums of all threads have been written", ""),
        )
    ],
}


def is_wrong(only, size="odd", dtype="float32", **edited):
    """Whether the comparison fails in one of the orders of threads, or the kernel ends."""
    for order in (1, -1):
        try:
            check(host_ops(dtype, order=order, **edited), size, only=only)
        except (AssertionError, KernelError):
            return True
    return False


def slow_but_first(cases):
    """The first case for every run of these tests, the others for the slow ones."""
    first, *others = cases
    return [pytest.param(*first), *(pytest.param(*one, marks=pytest.mark.slow) for one in others)]


@pytest.mark.shim
@pytest.mark.parametrize(
    ("part", "file", "edit"),
    [
        case
        for part, twins in TWINS.items()
        for case in slow_but_first((part, *one) for one in twins)
    ],
)
def test_a_broken_twin_is_seen(part, file, edit):
    assert is_wrong(part, edited=file, edit=edit)


# The sort of ids.


@pytest.mark.shim
@pytest.mark.parametrize(
    ("tiles", "edit"),
    [
        (5, None),
        (0, ("|| (tile[i] == id && i < int(threadIdx.x))", "")),
        (0, ("__syncthreads();  // all ids have been read", "")),
        (1, ("(second && there == id)", "there == id")),
        (1, ("high = min(other + length, n)", "high = min(other + length, n - 1)")),
    ],
)
def test_ids_are_sorted_and_equal_ones_stay_in_order(rng, tiles, edit):
    """Six tiles: whole and half pairs of runs, and a last run that is short.

    What a broken kernel makes is no index, so none is read in a twin.
    """
    right = []
    for order in (1, -1):
        ids = rng.integers(-3, 9, tiles * SORT_THREADS + 5)
        ids[0], ids[-1] = 9, ids[-2]  # the largest is in the first run; the last two are equal
        found = HostOps(HostLoader(order, edited="embedding.cu", edit=edit))._order(ids)
        right.append(np.array_equal(found, np.argsort(ids, kind="stable")))
    assert all(right) == (edit is None)


def test_the_steps_of_a_sort():
    """One for each doubling of a run, in which an id is compared with a few: n^2 would be more."""
    ops = HostOps()
    ops.loader.launch = lambda file, name, *rest: ops.loader.started.append(name)
    ops._order(np.zeros(64 * SORT_THREADS, np.int64))
    assert ops.loader.started == [SORT, *6 * [MERGE]]
