"""A step in forty lines: the baseline for cost models. Its constants were chosen once, not fitted.

Products take a share of the peak, and elementwise operations their bytes over the memory's rate.
There are four sums over tp in a block, a bubble, and one ring over the replicas.
"""

from __future__ import annotations

from mpipar.plan.published import Run

PRODUCTS = {"a100": 0.75, "h100": 0.62}  # share of the peak
MEMORY = 0.8  # share of the memory's rate
NODE, NETWORK = 0.75, 0.8  # shares of the links' rates


def closed_form(run: Run) -> float:
    """Return the seconds of a run's step."""
    shape, layout, machine = run.shape, run.layout, run.cluster
    tokens = layout.rows * shape.tokens / layout.cp
    blocks = shape.layers / layout.pp
    peak = (
        max(
            machine.peak_tflops.values()
            if machine.efficiency == "a100"
            else [machine.peak_tflops["bfloat16"]]
        )
        * 1e12
    )
    passes = {"none": 3, "attention": 3, "block": 4}[layout.recompute]
    flops = 2 * shape.block_parameters + 4 * shape.tokens * shape.heads * shape.head_dim
    narrow = min(1.0, 0.7 + 0.3 * shape.width / layout.tp / 2048)
    products = passes * tokens * flops / layout.tp / (peak * PRODUCTS[machine.efficiency] * narrow)
    numbers = passes * tokens * (8 * shape.width + 3 * shape.ffn / layout.tp)
    if not run.stack.fused:
        numbers += passes * 5 * tokens * shape.tokens * shape.heads / layout.tp
    elementwise = 2 * numbers / (machine.hbm_gbytes_s * 1e9 * MEMORY)
    inner, outer = machine.links[0], machine.links[-1]
    sums = 4 if layout.recompute != "block" else 6
    rate = (inner.gbytes_s if layout.tp <= inner.joins else outer.gbytes_s * inner.joins) * NODE
    wire = sums * 2 * 2 * tokens * shape.width * (1 - 1 / layout.tp) / (rate * 1e9)
    block = products + elementwise + wire * (layout.tp > 1)
    head = 6 * tokens * shape.vocab * shape.width / layout.tp
    head /= peak * PRODUCTS[machine.efficiency]
    m = layout.num_microbatches
    bubble = 0 if layout.family.split else (layout.pp - 1) / layout.chunks
    parameters = shape.parameters / layout.pp / layout.tp
    across = layout.ranks > inner.joins
    ring = (outer.gbytes_s * NETWORK if across else inner.gbytes_s * NODE) * 1e9
    gathers = 1.5 * m if layout.zero == 3 else 1
    data = gathers * 4 * parameters / ring * (layout.dp > 1)
    hidden = 0.8 * data if run.stack.overlap else 0.0
    return (m + bubble) * blocks * block + m * head / layout.pp + data - hidden
