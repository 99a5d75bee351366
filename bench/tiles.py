"""Shows how the tile size determines the time of a kernel on the CPU.

    python -m bench.tiles [--json FILE]
    python -m bench.tiles --products [--json FILE]         # one product, from loops to BLAS

Each chain of mpipar/ops/array_ops.py runs over a tile of elements, and attention
(numpy_attention.py) over a tile of queries. Small tiles drown in interpreter overhead, and large
ones fall out of the cache. A large tile of queries also computes scores that the causal mask then
discards. Before anything is timed, every tile's result is compared with the plain functions of
array_ops.py.

Columns: tile: elements, or queries; "all" is no tiling, "numba" is the compiled loop, if Numba is
installed. tile_KiB: one array of that tile. over_best: time over that of the best tile. bytes_MiB:
every argument once and every result once, which any tiling has to move. percent_of_copy: bytes_MiB
per second, in percent of the rate at which NumPy copies an array larger than the caches. A copy
counts its bytes twice, and half of them are writes, so a chain that reads more can exceed 100.
percent_of_gemm: operations on visible pairs per second, in percent of a product of 2048 x 2048
matrices. Both peaks are measured in the same run.

With --products two matrices of --size rows and columns are multiplied on one core: by plain loops,
in tiles, in packed tiles, and by BLAS. Numba compiles the first three. percent_of_blas: speed over
that of BLAS. flop_per_byte: see bench/kernels/products.py.
"""

from __future__ import annotations

import importlib.util
import sys
import timeit
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import numpy as np
from threadpoolctl import threadpool_limits

from bench.kernels.attention import parts
from bench.program import Outcome, Program
from mpipar.config import flags
from mpipar.errors import EXIT_CHECK_FAILED, EnvironmentProblem
from mpipar.ops import make, numpy_attention, numpy_ops
from mpipar.ops.array_ops import ArrayOps
from mpipar.run.process import blas

ELEMENTS = (1 << 10, 1 << 14, 1 << 16, 1 << 20)
QUERIES = (4, 64, 256)
TOLERANCE = 2e-5  # of the largest entry, float32
PEAK_SIZE, COPY_BYTES = 2048, 1 << 28
SIZE = 768  # of --products
HEAD_WIDTH = 64
ADAMW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}


class Chain(NamedTuple):
    """One function with its arguments; it returns arrays or changes its arguments.

    constant: of the module, the tile. unit: elements of an array in a tile of 1. whole: the tile
    that is no tiling.
    """

    call: Callable
    arrays: tuple
    bytes: int
    flops: int
    tiles: tuple
    module: ModuleType
    constant: str
    unit: int
    whole: int


def add_flags(parser) -> None:
    """Add the flags for what is measured."""
    parser.add_argument("--products", action="store_true", help="one product, from loops to BLAS")
    parser.add_argument(
        "--size", type=flags.count, help=f"sides of its matrices, a multiple of 4 ({SIZE})"
    )


def check_flags(args, parser) -> None:
    """Check flags that depend on each other, and set their defaults. Raises UsageError."""
    if args.width < 2:
        parser.error("--width 1: a norm needs at least 2 elements")
    if args.size and not args.products:
        parser.error(f"--size {args.size}: is for --products; add it")
    args.size = args.size or SIZE
    if args.size % 4:
        parser.error(f"--size {args.size}: must be a multiple of 4")


def chains(args) -> dict[str, Chain]:
    """Return {name: chain}, on random arguments; attention is over one sequence."""
    rng = np.random.default_rng(0)

    def real(*shape):
        return rng.standard_normal(shape, np.float32)

    x, dy = real(args.rows, args.width), real(args.rows, args.width)
    w, mean, rstd = real(args.width), x.mean(axis=1), 1 / x.std(axis=1)
    state = (real(x.size), real(x.size), real(x.size), np.abs(real(x.size)))
    positions = np.arange(args.seq_len)
    qkv = real(1, args.seq_len, 3, args.heads, HEAD_WIDTH)
    dheads = real(1, args.seq_len, args.heads, HEAD_WIDTH)
    y, probs = make("cpu", "float32").attention_forward(*parts(qkv), positions, positions)
    flops = HEAD_WIDTH * args.heads * args.seq_len * (args.seq_len + 1)  # 2 for each pair
    elements = (0, ELEMENTS, numpy_ops, "TILE", 1, x.size)
    queries = (QUERIES, numpy_attention, "QUERY_TILE", args.seq_len * args.heads, args.seq_len)
    return {
        "gelu_forward": Chain(lambda ops, x: ops.gelu_forward(x), (x,), 2 * x.nbytes, *elements),
        "layernorm_backward_input": Chain(
            lambda ops, *of: ops.layernorm_backward_input(*of),
            (dy, x, w, mean, rstd),
            3 * x.nbytes,
            *elements,
        ),
        "adamw_step": Chain(
            lambda ops, *of: ops.adamw_step(*of, **ADAMW), state, 7 * x.nbytes, *elements
        ),
        "attention_forward": Chain(
            lambda ops, qkv: ops.attention_forward(*parts(qkv), positions, positions)[0],
            (qkv,),
            qkv.nbytes + y.nbytes + probs.nbytes,
            2 * flops,
            *queries,
        ),
        "attention_backward_input": Chain(
            lambda ops, dy, qkv, probs: backward(ops, dy, qkv, probs, positions),
            (dheads, qkv, probs),
            2 * qkv.nbytes + dheads.nbytes + probs.nbytes,
            4 * flops,
            *queries,
        ),
    }


def backward(ops, dy, qkv, saved, positions):
    """Return dqkv (B, T, 3, H, d) of attention, packed as the layer packs it."""
    dqkv = ops.empty(qkv.shape, qkv.dtype)
    ops.attention_backward_input(dy, *parts(qkv), saved, positions, positions, out=parts(dqkv))
    return dqkv


def outcome(chain, ops):
    """Return the result of one call on copies of the arguments.

    This is its return value or its first argument.
    """
    arrays = [array.copy() for array in chain.arrays]
    result = chain.call(ops, *arrays)
    return arrays[0] if result is None else result


def best_seconds(function, repeats) -> float:
    """Return the shortest of `repeats` calls, after one that is not timed."""
    function()
    return min(timeit.repeat(function, number=1, repeat=repeats))


def peaks(repeats) -> dict[str, float]:
    """Return GFLOP/s of a product and GB/s of a copy, on this thread now."""
    x = np.ones((PEAK_SIZE, PEAK_SIZE), np.float32)
    source, copy = np.ones((2, COPY_BYTES // 8), np.float32)  # pages of zeros may share memory
    out = np.empty_like(x)
    product = best_seconds(partial(np.matmul, x, x, out=out), repeats)
    moved = best_seconds(partial(np.copyto, copy, source), repeats)
    return {"gemm_gflops": 2e-9 * PEAK_SIZE**3 / product, "copy_gbs": 1e-9 * COPY_BYTES / moved}


def sweep(name, chain, args, peak) -> list[dict]:
    """Return the rows of one chain, one per tile. Raises ValueError if a result is wrong."""
    wanted = outcome(chain, ArrayOps(np, "float32", "cpu"))

    def row(shown, ops, tile_kib="-"):
        error = np.abs(outcome(chain, ops) - wanted).max() / np.abs(wanted).max()
        if not error <= TOLERANCE:
            raise ValueError(f"{name}, tile {shown}: off by {error:.1e} of the largest entry")
        copies = [array.copy() for array in chain.arrays]  # some chains work in place
        seconds = best_seconds(partial(chain.call, ops, *copies), args.repeats)
        return {
            "chain": name,
            "tile": shown,
            "tile_KiB": tile_kib,
            "ms": seconds * 1e3,
            "bytes_MiB": chain.bytes / 2**20,
            "percent_of_copy": 1e-7 * chain.bytes / seconds / peak["copy_gbs"],
            "percent_of_gemm": (
                1e-7 * chain.flops / seconds / peak["gemm_gflops"] if chain.flops else "-"
            ),
        }

    default, found = getattr(chain.module, chain.constant), []
    shown_as = {default: f"{default} (default)", chain.whole: "all"}
    for tile in (*(one for one in chain.tiles if one < chain.whole), chain.whole):
        with mock.patch.object(chain.module, chain.constant, tile):
            kib = tile * chain.unit * 4 / 1024
            found.append(row(shown_as.get(tile, tile), make("cpu", "float32"), kib))
    fastest = min(one["ms"] for one in found)
    if importlib.util.find_spec("numba"):
        found.append(row("numba", make("cpu", "float32", kernels="numba")))
    return [one | {"over_best": one["ms"] / fastest} for one in found]


def run(args) -> Outcome:
    """Sweep the tiles of the CPU. Raises ValueError if a result is wrong."""
    with threadpool_limits(1):
        peak = peaks(args.repeats)
        rows = [
            row for name, chain in chains(args).items() for row in sweep(name, chain, args, peak)
        ]
    facts = {name: getattr(args, name) for name in ("width", "seq_len", "heads", "repeats")}
    return Outcome(
        rows,
        {"tokens": args.rows} | facts | peak,
        head=(
            "one thread: product {gemm_gflops:.0f} GFLOP/s, copy {copy_gbs:.1f} GB/s".format(**peak)
        ),
    )


def run_products(args) -> Outcome:
    """Measure one product from loops to BLAS.

    Raises EnvironmentProblem without Numba, ValueError if a result is wrong.
    """
    if importlib.util.find_spec("numba") is None:
        raise EnvironmentProblem("--products needs Numba: pip install '.[cpu]'")
    from bench.kernels import products

    with threadpool_limits(1):
        copy_gbs = peaks(args.repeats)["copy_gbs"]
        rows = products.rows(args.size, partial(best_seconds, repeats=args.repeats))
    facts = {
        "size": args.size,
        "repeats": args.repeats,
        "blas": blas.shown(blas.pools()[0]).replace(", kernels for", ""),
        "copy_gbs": copy_gbs,
        "blas_gflops": rows[-1]["gflops"],
    }
    return Outcome(
        rows,
        facts,
        variant="--products",
        head=f"one thread: copy {copy_gbs:.1f} GB/s, {facts['blas']}",
    )


def measure(args, session) -> Outcome | int:
    """Measure; code 1 if a result is wrong."""
    try:
        return (run_products if args.products else run)(args)
    except ValueError as error:
        print(f"not timed: {error}", file=sys.stderr)
        return EXIT_CHECK_FAILED


main = Program(
    "tiles",
    __doc__,
    measure,
    add=add_flags,
    check=check_flags,
    counts={
        "--rows": (8192, "tokens of the chains"),
        "--width": (1536, "elements of each"),
        "--seq-len": (1024, "tokens of a sequence in attention"),
        "--heads": (6, f"attention heads, of {HEAD_WIDTH} elements each"),
        "--repeats": (5, "timed calls, of which the best counts"),
    },
).started(__name__)
