"""One GPU as the benchmarks see it: its data sheet's figures, and time on it."""

from __future__ import annotations

import statistics
import time
from functools import partial

import ml_dtypes
import numpy as np

from mpipar.errors import EXIT_CHECK_FAILED, UserError
from mpipar.ops import make

# Dense peaks in TFLOP/s and memory in GB/s, from NVIDIA's data sheets of the A100 (80 GB, SXM), the
# H100 (SXM) and the H200 (SXM), by the driver's name for them. Where a sheet says "with sparsity",
# this is half of its figure.
ROOFS = {
    "NVIDIA A100-SXM4-80GB": {
        "float32": 19.5,
        "bfloat16": 312,
        "float16": 312,
        "memory": 2039,
    },
    "NVIDIA H100 80GB HBM3": {
        "float32": 67,
        "bfloat16": 989,
        "float16": 989,
        "memory": 3350,
    },
    "NVIDIA H200": {"float32": 67, "bfloat16": 989, "float16": 989, "memory": 4800},
}
# Largest relative norm of an error. float32: sums are added in another order; 16 bits: one or
# two roundings of the type.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-7, "float16": 2.0**-10}
WARM_UP = 3
FLUSHES = 20  # times the device's cache is filled before each timed call: 0.3 ms of an H100


class WrongResultError(UserError):
    """A result on the device is wrong, so nothing is timed."""

    exit_code = EXIT_CHECK_FAILED


class Gpu:
    """The current device, its roofs, and random arrays on it. Raises EnvironmentProblem."""

    def __init__(self, repeats: int):
        self.ops, self.repeats = make("cuda", "float32"), repeats
        self.xp = self.ops.xp
        device = self.xp.cuda.Device().id
        self.name = self.xp.cuda.runtime.getDeviceProperties(device)["name"].decode()
        self.roofs = ROOFS.get(self.name, {})
        self.rng = np.random.default_rng(0)

    def random(self, *shape, dtype="float32"):
        """Return an array of normal deviates; zeros would draw less power and run faster."""
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        return self.xp.asarray(self.rng.standard_normal(shape, np.float32)).astype(kind)

    def percent(self, value: float, roof: str):
        """Return value in percent of the roof's, or "-" if the roof is not known."""
        return 100 * value / self.roofs[roof] if roof in self.roofs else "-"

    def check(self, what: str, got, expected, dtype: str) -> None:
        """Raise WrongResultError if got differs from expected by more than the type's tolerance."""
        wide = expected.astype(np.float64)
        error, size = (
            square**0.5
            for square in self.ops.to_floats(
                [self.ops.square_sum(x) for x in (got.astype(np.float64) - wide, wide)]
            )
        )
        error /= max(size, 1e-30)
        if not error <= TOLERANCE[dtype]:
            raise WrongResultError(f"not timed: {what}, {dtype}: off by {error:.1e}")

    def timed(self, call) -> tuple[float, float]:
        """Return the median seconds of a call on the device, by events, and on the host.

        Before every call the device fills FLUSHES times its cache, which evicts the operands. It
        also gives Python time to queue the call, so that the device does not wait for it.
        """
        events, hosts, cuda = [], [], self.xp.cuda
        cache_bytes = self.xp.cuda.Device().attributes["L2CacheSize"]
        flush = self.xp.empty(FLUSHES * cache_bytes // 4, np.float32)
        for _ in range(WARM_UP + self.repeats):
            flush.fill(0)
            start, stop = cuda.Event(), cuda.Event()
            start.record()
            before = time.perf_counter()
            call()
            hosts.append(time.perf_counter() - before)
            stop.record()
            events.append((start, stop))
        stop.synchronize()
        device_ms = [cuda.get_elapsed_time(*pair) for pair in events[WARM_UP:]]
        return statistics.median(device_ms) * 1e-3, statistics.median(hosts[WARM_UP:])

    def copy_seconds(self, count: int) -> float:
        """Return the seconds of a device copy that reads and writes `count` bytes together."""
        source = self.random(count // 8)
        return self.timed(partial(self.ops.copy, self.xp.empty_like(source), source))[0]

    def facts(self) -> dict:
        """Return facts that a figure depends on."""
        return {"gpu": self.name, "cupy": self.xp.__version__, "repeats": self.repeats}
