"""Costs of passes and messages by stage, for the simulator, schedule choice and prediction."""

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

from mpipar.errors import UsageError

Number = int | float | Fraction  # a time or a size; exact as long as no float is involved
PER_STAGE = ("f", "i", "w", "units", "stash_bytes", "kept_bytes", "transient_bytes", "weight_bytes")


@dataclass(frozen=True)
class Costs:
    """Time and memory by stage: a tuple has a value per stage, a number applies to all of them.

    Times are in any unit, in seconds where measured. Arithmetic with ints and Fractions is exact.
    f, i, w: forward, input gradient, weight gradient of one microbatch; a full backward is i + w.
    overlap: cost of OVERLAP_F_B divided by that of its forward and backward one after the other.
    latency: of a message, besides its time on the link; `hop` is the sum of both. bandwidth: bytes
    per unit of time of a link, one way; None for unlimited. Messages on a link are sent one after
    another. message_bytes: one activation. eager_bytes: the largest message that travels while its
    ranks compute, None for any size (see `events`). sending: the fraction of its sender's core that
    a message takes while it occupies its link, 0 to 1. units: the number of equal parts of a pass;
    MPI is entered between them. cores: how many the pipeline's ranks share, None for one core each.
    sharing: how many times as much core time a pass takes while ranks share the core and its
    caches. stash_bytes: kept from F to B or I. kept_bytes: the part of these that stays from I to
    W. transient_bytes: what a recomputed layer holds in addition during I. weight_bytes: weights,
    gradients and optimizer state of one copy of a stage.
    """

    f: Number | tuple[Number, ...] = 1
    i: Number | tuple[Number, ...] = 1
    w: Number | tuple[Number, ...] = 1
    overlap: Number = 1
    latency: Number = 0
    bandwidth: Number | None = None
    message_bytes: Number = 0
    eager_bytes: Number | None = None
    sending: Number = 0
    units: Number | tuple[Number, ...] = 1
    cores: Number | None = None
    sharing: Number = 1
    stash_bytes: Number | tuple[Number, ...] = 0
    kept_bytes: Number | tuple[Number, ...] = 0
    transient_bytes: Number | tuple[Number, ...] = 0
    weight_bytes: Number | tuple[Number, ...] = 0

    def by_stage(self, name: str, num_stages: int) -> tuple[Number, ...]:
        """Return the values of a per-stage field; raises UsageError unless each stage has one."""
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return (value,) * num_stages
        if len(value) != num_stages:
            raise UsageError(f"costs have {len(value)} values of {name} for {num_stages} stages")
        return value

    def time_on_link(self) -> Number:
        """Return how long a message occupies its link before it can send the next one."""
        return 0 if self.bandwidth is None else self.message_bytes / self.bandwidth

    def hop(self) -> Number:
        """Return the time from the end of a pass until its result has arrived by a free link."""
        return self.latency + self.time_on_link()

    def is_rendezvous(self) -> bool:
        """Return whether messages are too large to travel while their ranks compute."""
        return self.eager_bytes is not None and self.message_bytes > self.eager_bytes

    def divided(self, parts: int) -> "Costs":
        """Return the costs of stages that are each 1/parts of these; messages keep their size."""
        share = Fraction(1, parts)
        scaled: dict[str, Any] = {}
        for name in PER_STAGE:
            value = getattr(self, name)
            many = isinstance(value, tuple)
            scaled[name] = tuple(part * share for part in value) if many else value * share
        return replace(self, **scaled)

    def merged(self, counts: tuple[int, ...]) -> "Costs":
        """Return costs of stages, given costs of layers: stage k sums the next counts[k] values.

        Of transient_bytes it takes the maximum, since layers are recomputed one after another.
        """
        layers = sum(counts)
        ends = [sum(counts[: k + 1]) for k in range(len(counts))]
        summed: dict[str, Any] = {}
        for name in PER_STAGE:
            values = self.by_stage(name, layers)
            join = partial(max, default=0) if name == "transient_bytes" else sum
            summed[name] = tuple(
                join(values[end - count : end]) for count, end in zip(counts, ends, strict=True)
            )
        return replace(self, **summed)
