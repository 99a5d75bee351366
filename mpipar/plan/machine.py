"""The cost model of a machine: the time of a message, a collective, a product or a block.

bench.calibrate fits it to measurements, and machine_file.py keeps it as JSON. An operation on n
bytes takes latency + n * time per byte, with separate parameters for each operation, kind of link,
number of ranks and range of sizes, because a library changes protocol and algorithm with all of
these. A time outside the measured range is refused, or marked in `Estimate.extrapolated`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from statistics import median
from typing import NamedTuple

from mpipar.errors import UsageError

HOP = "latency"  # the name of one message between two ranks
STREAM = "bandwidth"  # the name of one of many messages back to back
SENDING = "sending"  # the name of a message's time on its sender's core


def settings_of(model) -> dict:
    """Return the settings of a ModelConfig on which its passes depend, as a file keeps them."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(model).items()
        if name != "layers"
    }


class Estimate(NamedTuple):
    """A predicted time, and whether it is outside the measured range."""

    seconds: float
    extrapolated: bool


@dataclass(frozen=True)
class Piece:
    """A range of sizes; *_low and *_high are the ends of a parameter's 95 % confidence interval."""

    from_bytes: float
    to_bytes: float
    latency_us: float
    latency_low_us: float
    latency_high_us: float
    us_per_byte: float
    us_per_byte_low: float
    us_per_byte_high: float

    def microseconds(self, nbytes: float) -> float:
        """Return latency + size * time per byte."""
        return self.latency_us + nbytes * self.us_per_byte


@dataclass(frozen=True)
class Curve:
    """Time of one operation by size.

    The pieces ascend and are contiguous. fitted_bytes: the measured sizes. held_out_*: relative
    errors on sizes that a second fit left out; None when there were too few.
    """

    operation: str
    link: str
    ranks: int
    fitted_bytes: tuple[int, ...]
    pieces: tuple[Piece, ...]
    samples: int
    held_out_median: float | None = None
    held_out_max: float | None = None

    @classmethod
    def through(cls, operation: str, link: str, ranks: int, seconds: dict, samples: int) -> Curve:
        """Return straight lines between the times {size: seconds} of two sizes or more.

        Each ends in the time of its larger size, unless the smaller one took longer. No line has a
        latency below 0.
        """
        pieces = []
        for (small, first), (large, second) in pairwise(sorted(seconds.items())):
            slope = max(0.0, second - first) / (large - small) * 1e6
            slope = min(slope, second * 1e6 / large)
            start = max(0.0, max(first, second) * 1e6 - slope * large)
            pieces.append(Piece(small, large, start, start, start, slope, slope, slope))
        return cls(operation, link, ranks, tuple(sorted(seconds)), tuple(pieces), samples)

    def piece(self, nbytes: float) -> Piece:
        """Return the piece of a size; the last one continues beyond its end."""
        return next((piece for piece in self.pieces if nbytes <= piece.to_bytes), self.pieces[-1])

    def estimate(self, nbytes: float) -> Estimate:
        """Return the time for a size; the last piece's line continues beyond it."""
        piece = self.piece(nbytes)
        outside = not self.fitted_bytes[0] <= nbytes <= self.fitted_bytes[-1]
        return Estimate(piece.microseconds(nbytes) * 1e-6, outside)


@dataclass(frozen=True)
class Product:
    """One matrix product (M, K) x (K, N), on as many ranks at once as there are cores."""

    m: int
    k: int
    n: int
    seconds: float


@dataclass(frozen=True)
class Passes:
    """Seconds of forward, input gradient and weight gradient of one microbatch."""

    f: float
    i: float
    w: float

    def scaled(self, factor: float) -> Passes:
        return Passes(self.f * factor, self.i * factor, self.w * factor)


@dataclass(frozen=True)
class Units:
    """Passes of the parts of a model, measured with microbatches of `rows` rows.

    model: the ModelConfig's fields except the number of layers, since every block costs the same.
    tp, ep: ranks that share a block, and its experts; the times include their barriers.
    update_seconds_per_parameter: everything that a step does once per parameter, from clearing
    gradients to the optimizer. sharing: factor by which passes take more core time while ranks
    share a core; 1 where every rank has a core, or if it was not measured.
    """

    model: dict
    dtype: str
    optimizer: str
    tp: int
    rows: int
    embedding: Passes
    block: Passes
    head: Passes
    update_seconds_per_parameter: float
    sharing: float = 1.0
    ep: int = 1


@dataclass(frozen=True)
class Contention:
    """How much longer groups on an axis take when all run at once, by operation and size."""

    operation: str
    axis: str
    size_bytes: int
    factor: float


@dataclass(frozen=True)
class Duplex:
    """Bandwidth both ways over twice that of one way: 1 is full duplex, 0.5 a shared medium."""

    link: str
    factor: float


@dataclass(frozen=True)
class Eager:
    """The largest message that a link carries while its sender computes; None: any measured one."""

    link: str
    size_bytes: int | None


@dataclass(frozen=True)
class Machine:
    """The fitted model. call_overhead_us: time that mpipar.comm adds to a bare MPI call.

    ranks, cores: of the calibration, on all its hosts. Collectives were measured with `ranks` ranks
    at work; passes with as many ranks at once as have a core each.
    """

    curves: tuple[Curve, ...]
    duplex: tuple[Duplex, ...]
    eager: tuple[Eager, ...]
    contention: tuple[Contention, ...]
    call_overhead_us: float | None
    products: tuple[Product, ...]
    units: tuple[Units, ...]
    ranks: int
    cores: int
    provenance: dict

    def curve(self, operation: str, ranks: int = 2, link: str | None = None) -> Curve:
        """Return the curve of an operation.

        link: None selects the slowest kind measured with that many ranks, at the largest size that
        all of them have. Raises UsageError, which lists the calibrated curves.
        """
        same = [
            curve
            for curve in self.curves
            if curve.operation == operation and curve.ranks == ranks and link in (None, curve.link)
        ]
        if same:
            shared = min(curve.fitted_bytes[-1] for curve in same)
            return max(same, key=lambda curve: curve.estimate(shared).seconds)
        known = sorted(
            {
                f"{curve.ranks} ranks ({curve.link})"
                for curve in self.curves
                if curve.operation == operation
            }
        )
        raise UsageError(
            f"no {operation} of {ranks} ranks{f' ({link})' if link else ''} in this cost model: "
            f"{'measured with ' + ', '.join(known) if known else 'not measured at all'}; run "
            f"python -m bench.calibrate with {ranks} ranks"
        )

    def estimate(
        self, operation: str, nbytes: float, ranks: int = 2, link: str | None = None
    ) -> Estimate:
        """Return the seconds of an operation, 0 for a group of one. UsageError: see `curve`."""
        if ranks == 1:
            return Estimate(0.0, False)
        return self.curve(operation, ranks, link).estimate(nbytes)

    def eager_bytes(self, link: str) -> int | None:
        """Return the largest message that this kind of link carries while its sender computes, or
        None.
        """
        return next((one.size_bytes for one in self.eager if one.link == link), None)

    def contention_factor(self, operation: str) -> float:
        """Return the median of an operation's measured contention factors; 1 without any."""
        found = [one.factor for one in self.contention if one.operation == operation]
        return median(found) if found else 1.0

    def product_seconds(self, m: int, k: int, n: int) -> Estimate:
        """Return the seconds of a product (M, K) x (K, N), log-interpolated between measured
        shapes.

        Outside of them the nearest measured shape's rate is used. Raises UsageError without
        products.
        """
        if not self.products:
            raise UsageError(
                "this cost model has no products: run bench.calibrate without --no-compute"
            )
        known = {(one.m, one.k, one.n): one.seconds for one in self.products}
        axes = [sorted({shape[axis] for shape in known}) for axis in range(3)]
        inside = [
            min(max(size, ticks[0]), ticks[-1]) for size, ticks in zip((m, k, n), axes, strict=True)
        ]
        ends = [_between(size, ticks) for size, ticks in zip(inside, axes, strict=True)]
        total = sum(
            wm * wk * wn * math.log(known[am, ak, an])
            for (am, wm), (ak, wk), (an, wn) in product(*ends)
        )
        scale = m * k * n / math.prod(inside)
        return Estimate(math.exp(total) * scale, inside != [m, k, n])

    def units_of(self, model, dtype: str, tp: int, rows: int, ep: int = 1) -> Units:
        """Return the measured passes of a model (a ModelConfig), of the nearest number of rows.

        Raises UsageError, which lists the available ones.
        """
        wanted = settings_of(model) | {"dtype": dtype, "tp": tp, "ep": ep}
        others = [
            units.model | {"dtype": units.dtype, "tp": units.tp, "ep": units.ep}
            for units in self.units
        ]
        same = [units for units, have in zip(self.units, others, strict=True) if have == wanted]
        if same:
            return min(same, key=lambda units: abs(math.log(units.rows / rows)))
        found = dict.fromkeys(f"; measured: {_differences(have, wanted)}" for have in others)
        raise UsageError(
            "this cost model has no passes of this model; measure them with python -m "
            f"bench.calibrate --config FILE.toml --tp N{''.join(found)}"
        )


def _differences(have: dict, wanted: dict) -> str:
    """Return how the model of measured passes differs from the wanted one."""
    return ", ".join(
        f"{name} {have.get(name)} (not {wanted.get(name)})"
        for name in {**have, **wanted}
        if have.get(name) != wanted.get(name)
    )


def _between(size: float, ticks) -> list[tuple[int, float]]:
    """Return (tick, weight) of a size's neighbours, linear in its logarithm; no zero weights."""
    high = next(tick for tick in ticks if tick >= size)
    if high == size:
        return [(high, 1.0)]
    low = ticks[ticks.index(high) - 1]
    share = math.log(size / low) / math.log(high / low)
    return [(low, 1 - share), (high, share)]
