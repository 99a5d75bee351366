"""Checks every array function of a GPU against float64 on the host, inside whole training steps.

    python -m bench.kernels.check [--small] [--json FILE]

Small models of several kinds each take a step on the device: head widths with and without tiles,
odd widths, shared heads of keys, experts, one token and many, in three types. Each call of a
function is made twice, on copies of what it writes to, and must leave the same bits; fresh memory
holds NaN. Then the plain formula of mpipar/ops/array_ops.py makes the call on the same numbers in
float64. error: the norm of the difference over the norm of the right result, the largest of all
calls; a row for each function, the one closest to its limit first. Exit code 1 if a limit is
exceeded or bits differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bench.kernels.gpu import TOLERANCE, Gpu
from bench.program import Outcome, Program
from bench.training import Trained, config_of
from mpipar.comm.recorder import Recorder
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK
from mpipar.ops import make
from mpipar.ops.array_ops import ArrayOps
from mpipar.ops.functions import FUNCTIONS, MEMORY, Ops
from mpipar.ops.signature import Function
from mpipar.run.process.mpi import OneRank

DTYPES = ("bfloat16", "float16", "float32")
CASES = (  # flags of a model: what is new in it
    "--d-model 128 --heads 2 --seq-len 1024",  # heads of 64, many tiles
    "--d-model 384 --heads 6 --seq-len 64",
    "--d-model 195 --heads 3 --ffn 333 --seq-len 63 --vocab-size 251",  # odd widths
    "--d-model 96 --heads 3 --seq-len 65",  # heads of 32
    "--d-model 64 --heads 2 --seq-len 1",
    "--d-model 64 --heads 1 --seq-len 2048",
    "--arch llama --d-model 128 --heads 1 --kv-heads 1 --seq-len 500",  # heads of 128
    "--arch llama --d-model 240 --heads 3 --kv-heads 1 --seq-len 65",  # of 80; keys are shared
    "--arch mixtral --d-model 128 --heads 2 --kv-heads 2 --expert-ffn 96 --seq-len 256",
)
SMALL = (
    "--d-model 32 --heads 2 --seq-len 33",
    "--d-model 21 --heads 3 --ffn 33 --seq-len 5 --vocab-size 31",
    "--arch llama --d-model 32 --heads 2 --kv-heads 1 --seq-len 17",
    "--arch mixtral --d-model 16 --heads 2 --kv-heads 2 --expert-ffn 8 --seq-len 9",
)
COMMON = "--layers 1 --batch-size 2 --num-microbatches 2 --vocab-size 1009 --device cuda".split()
TINY, SCALE = 1e-30, 1024.0


class Checked(Ops):
    """Behaves like the wrapped ops, and compares each call with the formula in float64.

    found: for each function its calls, largest error, and whether the bits of a call differed.
    """

    def __init__(self, ops: Any, found: dict[str, dict]) -> None:
        self._ops, self._found = ops, found
        self._exact = ArrayOps(np, "float64", "cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def _call(self, function: Function, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        real = getattr(self._ops, function.name)
        if function.name in MEMORY:
            return real(*arguments, **named)
        given = function.bind(arguments, named)
        written = [part.name for part, _ in function.arrays(given) if part.written]
        own = {k: x for k, x in given.items() if k != "out" or not isinstance(x, tuple)}
        wide = {name: self._wide(x) for name, x in own.items()}
        again = {name: x.copy() if name in written else x for name, x in own.items()}

        def call(method: Any, values: dict[str, Any]) -> Any:
            """Call as the layer does: some arguments are named, others are not."""
            first = list(values)[: len(arguments)]
            return method(
                *(values[name] for name in first),
                **{name: values[name] for name in named if name in values},
            )

        first = self._outcome(function, again, written, call(real, again))
        result = call(real, given)
        second = self._outcome(function, given, written, result)
        if "saved" in given:  # a device saves less than the formula
            heads = [wide[name] for name in ("q", "k", "v", "q_pos", "k_pos")]
            wide["saved"] = self._exact.attention_forward(*heads)[1]
        exact = call(getattr(self._exact, function.name), wide)
        right = self._outcome(function, wide, written, exact)
        noted = self._found.setdefault(function.name, {"calls": 0, "bits": "equal", "error": 0.0})
        noted["calls"] += 1
        for name, got in second.items():
            if got.tobytes() != first[name].tobytes():
                noted["bits"] = "differ"
            noted["error"] = max(noted["error"], error_of(got, right[name]))
        return result

    def _wide(self, x: Any) -> Any:
        """Return what the formula takes: floats of 64 bits on the host; no arrays as they are."""
        if not hasattr(x, "dtype"):
            return x
        host = np.array(self._ops.to_host(x))
        return host if host.dtype.kind in "iub" else host.astype(np.float64)

    def _outcome(
        self, function: Function, given: dict[str, Any], written: list[str], result: Any
    ) -> dict[str, np.ndarray]:
        """Return {name: array on the host} of all that a call makes and changes."""
        made = result if isinstance(result, tuple) else (result,)
        named = dict(zip((part.name for part in function.gives), made, strict=False))
        return {
            name: np.array(self._ops.to_host(x) if hasattr(x, "dtype") else x)
            for name, x in (named | {name: given[name] for name in written}).items()
            if name not in ("saved", *IN_BITS.get(function.name, ()))
        }


IN_BITS = {"checksum": ("total",)}  # results that depend on the bits of the type


def error_of(got: np.ndarray, right: np.ndarray) -> float:
    """Return the norm of the difference over that of the right result; infinite if not finite."""
    got, right = got.astype(np.float64), right.astype(np.float64)
    error = np.linalg.norm(got - right) / max(float(np.linalg.norm(right)), TINY)
    return float(error) if np.isfinite(error) else np.inf


def poison(xp: Any) -> None:
    """Fill all memory that is lent from now on with 0xFF, which is NaN in every type."""
    pool = xp.get_default_memory_pool()

    def lend(size: int) -> Any:
        block = pool.malloc(size)
        xp.cuda.runtime.memset(block.ptr, 0xFF, size)
        return block

    xp.cuda.set_allocator(lend)


def check(words: list[str], dtype: str, found: dict[str, dict]) -> None:
    """Take a step of a model, and note the errors of its functions."""
    config = config_of([*COMMON, *words, "--dtype", dtype])
    if dtype == "float16":  # the initial scale of a run may be too large at first
        config = replace(config, run=replace(config.run, loss_scale=SCALE))
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, 9000)
    ops = Checked(make("cuda", dtype), found)
    Trained(config, OneRank(), Recorder(), tokens.astype(np.uint16), ops).step(1)


def measure(args: Any, session: Any) -> Outcome:
    """Check all; code 1 if a function is wrong."""
    gpu, found = Gpu(1), {dtype: {} for dtype in DTYPES}
    poison(gpu.xp)
    for words in SMALL if args.small else CASES:
        for dtype in DTYPES:
            check(words.split(), dtype, found[dtype])
    rows = []
    for name in FUNCTIONS:
        own = {dtype: found[dtype][name] for dtype in DTYPES if name in found[dtype]}
        if own:
            row = {
                "function": name,
                "calls": sum(one["calls"] for one in own.values()),
                "bits": max((one["bits"] for one in own.values()), key=("equal", "differ").index),
                "of_limit": max(one["error"] / TOLERANCE[dtype] for dtype, one in own.items()),
            }
            rows.append(
                row | {dtype: own[dtype]["error"] if dtype in own else "-" for dtype in DTYPES}
            )
    rows.sort(key=lambda row: -row["of_limit"])
    wrong = any(row["of_limit"] > 1 or row["bits"] != "equal" for row in rows)
    return Outcome(
        rows,
        gpu.facts() | {"limits": TOLERANCE},
        EXIT_CHECK_FAILED if wrong else EXIT_OK,
        end="in no step here: "
        + ", ".join(name for name in FUNCTIONS if name not in {row["function"] for row in rows}),
    )


main = Program(
    "kernels.check",
    __doc__,
    measure,
    add=lambda parser: parser.add_argument(
        "--small", action="store_true", help="a few models of at most 33 tokens"
    ),
).started(__name__)
