"""What tensor parallelism divides by its ranks, and what it does not, as the layers say."""

from __future__ import annotations

from typing import Any

from bench.claims.layouts import as_convnet, configure
from mpipar.layers.costs import Cost, Letters, together, value
from mpipar.plan.formulas import units_of

SIZES = (1, 2, 4, 8)
PASSES = 3  # forward, input gradient and weight gradient take the FLOPs of a forward each


def scaling() -> list[dict]:
    """FLOPs, memory, barriers and bytes of one rank and microbatch, both passes, against tp.

    times_ranks: the FLOPs of all ranks, as a multiple of those of one rank alone. flop_per_byte:
    what a rank computes for each byte that it sends.
    """
    rows = []
    for what in PARTS:
        alone = None
        for size in SIZES:
            first, cost, letters = part(what, configure({"tp": size}))
            flops = PASSES * value(cost.flops, letters) - value(first.flops, letters)
            alone = alone or flops
            barriers = [one for one in cost.barriers if one.axis == "tp" and size > 1]
            sent = sum(one.sent(letters, size) for one in barriers)
            rows.append({
                "part": what, "tp": size, "MFLOP": flops / 1e6, "times_ranks": size * flops / alone,
                "weights_KiB": value(cost.weights, letters) * letters["e"] / 1024,
                "stash_KiB": value(cost.stash, letters) / 1024,
                "barriers": sum(one.calls(size) for one in barriers), "sent_KiB": sent / 1024,
                "flop_per_byte": flops / sent if sent else "-"})
    return rows


PARTS = ("one block", "convnet")


def part(what: str, config: Any) -> tuple[Cost, Cost, Letters]:
    """The Cost of one block of the decoder, or of the whole convnet, and the sizes of a rank.

    In front of it: the Cost of what needs no input gradient, because nothing comes before it.
    """
    if what == "one block":
        units, letters = units_of(config)
        return Cost(), units.block, letters
    units, letters = units_of(as_convnet(config))
    return units.entry, together(units.entry, *units.blocks, units.head), letters
