"""A training step on a GPU, function by function, beside the least time of each.

    python -m bench.kernels.functions --preset gpt2 --dtype bfloat16 --batch-size 32 [--json FILE]

Flags besides --repeats, --small and --json are those of `mpipar explain`. Columns: device_us:
between two events around each call, of a step; where the device is idle, Python's own time is in
it. host_us: of Python in the calls. floor_us: the greater of the bytes that every call has to move
over the rate of a copy, and its operations over the rate of a large product; both rates are
measured before. A function without a floor moves no arrays.

Below: the step without events, its share of the device's peak, how much of it Python needs, memory
as predicted and as the pool got it, and losses.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import numpy as np

from bench.kernels.gpu import Gpu
from bench.program import Outcome, Program
from bench.training import Trained, config_of, take_step
from mpipar import ops as ops_module
from mpipar.comm.recorder import Recorder
from mpipar.ops import make_for
from mpipar.ops.cuda.gemm import BlasGemm
from mpipar.ops.functions import MEMORY, Ops
from mpipar.ops.signature import Function
from mpipar.run.process.mpi import OneRank
from mpipar.study.explain.predict import predict

ONLY_WRITTEN = {("fill", "x"), ("copy", "dst"), ("adamw_runs", "copy")}  # arrays that are not read


class CountedOps(Ops):
    """Behaves like the wrapped ops on shapes; `found` has what calls of each function move and
    compute. Each array that a function reads or writes counts once, and of a table of embeddings as
    many rows as there are tokens.

    bytes: of all arrays. largest: of each call's largest array, so that `bytes` are a number of
    passes over it.
    """

    def __init__(self, ops: Any) -> None:
        self._ops, self.found = ops, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def _call(self, function: Function, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        before = sum(self._ops.flops.values())
        result = getattr(self._ops, function.name)(*arguments, **named)
        if function.name in MEMORY:
            return result
        if sizes := moved_bytes(function, function.bind(arguments, named), result):
            own = self.found.setdefault(
                function.name, dict.fromkeys(("calls", "bytes", "largest", "flops"), 0)
            )
            for name, more in (
                ("calls", 1),
                ("bytes", sum(sizes)),
                ("largest", max(sizes)),
                ("flops", sum(self._ops.flops.values()) - before),
            ):
                own[name] += more
        return result


def moved_bytes(function: Function, given: dict[str, Any], result: Any) -> list[int]:
    """Return the bytes of each array that a call reads or writes; what it changes counts twice."""
    arrays, found = function.arrays(given), []
    tokens = max((x.size for part, x in arrays if part.name in ("ids", "positions")), default=0)
    for part, x in arrays:
        size = x.nbytes if "table" not in part.name else min(len(x), tokens) * x.nbytes // len(x)
        changed = part.written and (function.name, part.name) not in ONLY_WRITTEN
        found += [size] * (2 if changed else 1)
    made = result if isinstance(result, tuple) else (result,)
    return found + [
        x.nbytes
        for part, x in zip(function.gives, made, strict=False)
        if part in function.makes and hasattr(x, "nbytes")
    ]


def counted(words: list[str]) -> tuple[Any, dict[str, dict[str, int]]]:
    """Return the config of flags of `mpipar explain`, and the counts of its first rank's step."""
    config, recorder = config_of(words), Recorder()
    ops = CountedOps(ops_module.shapes_for(config.run, recorder))
    take_step(config, 0, recorder, ops)
    return config, ops.found


WARM_UP, PRODUCT, COPY_BYTES = 3, 8192, 1 << 30
GIB = 2**30


class EventOps(Ops):
    """Behaves like the wrapped ops; while `active`, notes (function, two events, host seconds)."""

    def __init__(self, ops: Any) -> None:
        self._ops, self.active, self.noted = ops, False, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def _call(self, function: Function, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        real = getattr(self._ops, function.name)
        if not self.active or function.name in MEMORY:
            return real(*arguments, **named)
        start, before = self.timestamp(), time.perf_counter()
        result = real(*arguments, **named)
        spent = time.perf_counter() - before
        self.noted.append((function.name, start, self.timestamp(), spent))
        return result

    def times(self) -> dict[str, tuple[float, float]]:
        """Return {function: seconds on the device and of Python} of all that was noted."""
        self.synchronize()
        found: dict[str, tuple[float, float]] = {}
        for name, start, stop, spent in self.noted:
            device, host = found.get(name, (0.0, 0.0))
            passed = self.xp.cuda.get_elapsed_time(start, stop) * 1e-3
            found[name] = device + passed, host + spent
        return found


def roofs_of(gpu: Gpu, dtype: str, small: bool) -> tuple[float, float]:
    """Return FLOP/s of a large product and bytes/s of a large copy, measured."""
    side, size = (256, 1 << 20) if small else (PRODUCT, COPY_BYTES)
    a, b = (gpu.random(side, side, dtype=dtype) for _ in range(2))
    out = gpu.xp.empty_like(a)
    product, _ = gpu.timed(partial(BlasGemm(gpu.xp), a, b, out))
    return 2 * side**3 / product, size / gpu.copy_seconds(size)


def table(times: dict, counts: dict, roofs: tuple[float, float], steps: int) -> list[dict]:
    """Return a row for each function, the longest first; times: of `steps` steps."""
    rows = []
    for name, (device, host) in sorted(times.items(), key=lambda one: -one[1][0]):
        row = {"function": name, "calls": "-", "device_us": device / steps * 1e6}
        row |= {"host_us": host / steps * 1e6, "floor_us": "-", "over_floor": "-", "bound": "-"}
        if own := counts.get(name):
            computing, moving = own["flops"] / roofs[0], own["bytes"] / roofs[1]
            floor = max(computing, moving)
            bound = "memory" if moving > computing else "products"
            row |= {"calls": own["calls"], "floor_us": floor * 1e6, "bound": bound}
            row["over_floor"] = device / steps / floor if floor else "-"
        rows.append(row)
    return rows


def measure(args: Any, session: Any) -> Outcome:
    """Measure one model."""
    words = [*args.words, "--device", "cuda"]
    config, counts = counted(words)
    gpu = Gpu(args.repeats)
    roofs = roofs_of(gpu, config.run.dtype, args.small)
    pool = gpu.xp.get_default_memory_pool()
    pool.free_all_blocks()
    ops = EventOps(make_for(config.run))
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, 1 << 18)
    trained = Trained(config, OneRank(), Recorder(), tokens.astype(np.uint16), ops)
    losses = [trained.step(step).loss for step in range(1, WARM_UP + 1)]
    ops.synchronize()
    whole = [
        seconds_of(trained, ops, step) for step in range(WARM_UP + 1, WARM_UP + args.repeats + 1)
    ]
    ops.active = True
    for step in range(1, args.repeats + 1):
        trained.step(WARM_UP + args.repeats + step)
    rows = table(ops.times(), counts, roofs, args.repeats)
    step_s = statistics.median(whole)
    flops = sum(own["flops"] for own in counts.values())
    batch = config.train.batch_size * config.model.seq_len
    facts = {
        "step_ms": step_s * 1e3,
        "tokens_per_s": batch / step_s,
        "tflops": flops / step_s * 1e-12,
        "percent_of_peak": gpu.percent(flops / step_s * 1e-12, config.run.dtype),
        "device_ms": sum(row["device_us"] for row in rows) * 1e-3,
        "python_ms": sum(row["host_us"] for row in rows) * 1e-3,
        "floors_ms": sum(row["floor_us"] for row in rows if row["floor_us"] != "-") * 1e-3,
        "predicted_GiB": predict(config, 0).peak_total / GIB,
        "pool_GiB": pool.total_bytes() / GIB,
        "product_tflops": roofs[0] * 1e-12,
        "copy_GBps": roofs[1] * 1e-9,
        "losses": losses,
    }
    shown = ", ".join(
        f"{name} {value:.4g}" for name, value in facts.items() if isinstance(value, float)
    )
    end = f"{' '.join(args.words)}: {shown}, losses {', '.join(f'{one:.5f}' for one in losses)}"
    return Outcome(rows, facts | gpu.facts() | {"words": " ".join(args.words)}, end=end)


def seconds_of(trained: Trained, ops: Any, step: int) -> float:
    """Return the seconds of a step, from an idle device to an idle device."""
    start = time.perf_counter()
    trained.step(step)
    ops.synchronize()
    return time.perf_counter() - start


main = Program(
    "kernels.functions",
    __doc__,
    measure,
    takes_words=True,
    counts={"--repeats": (5, "timed steps without events, and with them")},
    add=lambda parser: parser.add_argument(
        "--small", action="store_true", help="measure the device's rates on small arrays"
    ),
).started(__name__)
