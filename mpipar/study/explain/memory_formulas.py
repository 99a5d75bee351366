"""The closed forms of memory: what a rank keeps of its parameters, and what a block keeps.

N is the number of a rank's parameters, including padding, which x ranks shard (`--zero`).
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from mpipar.study.explain.formulas import bytes_of_numbers, own_lengths, text, units_of
from mpipar.study.explain.layer_costs import value


class Form(NamedTuple):
    """Bytes and their formula; None where there is no formula."""

    text: str = ""
    size: float | None = None


def states(config, prediction) -> dict[str, Form]:
    """Return {label: Form} of weights, gradients and optimizer. prediction: of the rank.

    u0 and u1 are the largest units of even and of odd number, which take turns in two buffers; u is
    the larger of the two. Source: arXiv 1910.02054, for a split backward.
    """
    e, s = bytes_of_numbers(config)
    level = config.memory.zero
    over = "/x" if level and config.grid.island_dp * config.grid.cp > 1 else ""
    numbers = sum(length for _, length in prediction.segments)
    own = own_lengths(config, prediction)
    pieces = sum(own)
    units = [
        [sum(length for _, length in unit) for unit in units] for units in prediction.reads.values()
    ]
    turns = [max((size for stage in units for size in stage[odd::2]), default=0) for odd in (0, 1)]
    found = {"weights": Form("N*e", numbers * e), "gradients": Form("N*s", numbers * s)}
    if level == 3:
        kept = pieces * e
        found["weights"] = Form("N*e/x + (u0 + u1)*e", kept + sum(turns) * e)
        if config.memory.keeps_gathered:
            found["weights"] = (
                Form("N*e/x + the stage's units", kept + sum(units[0]) * e)
                if len(units) == 1
                else Form()
            )
        found["gradients"] = Form("N*s/x + u*s", pieces * s + max(turns) * s)
    masters = int(np.dtype(config.run.dtype).itemsize < s)
    by_copies: Counter[int] = Counter()
    for length, moments in zip(own, prediction.moments, strict=True):
        by_copies[moments + masters] += length
    several = len(by_copies) > 1  # Nk: numbers of which it keeps k copies
    forms = [f"{k}N{k if several else ''}*s{over}" for k in sorted(by_copies) if k]
    if forms:
        size = s * sum(copies * length for copies, length in by_copies.items())
        found["optimizer"] = Form(" + ".join(forms), size)
    return found


def block(config) -> dict[str, Form]:
    """Return {"from F to I", "from I to W": Form} of what the first block keeps of one microbatch.

    From F to I these are inputs of norms, of products and of the activation function, and what
    attention saves. From I to W they are inputs and output gradients of norms and products. Source:
    arXiv 2205.05198, without dropout.
    """
    units, sizes = units_of(config)
    block = units.blocks[0]
    if config.memory.recompute == "block":
        block = block._replace(stash=units.stream)  # it keeps only its input
    return {
        f"one block, from {when}": Form(text(kept), value(kept, sizes))
        for when, kept in (("F to I", block.stash), ("I to W", block.kept))
    }
