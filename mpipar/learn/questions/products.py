"""Questions of chapters 6 to 10 and 12: products, losses, replicas, hybrids, zero bubble, tiles."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.learn.exercise import Number, numbers, plain, words
from mpipar.learn.questions.counted import (
    MIB,
    barriers,
    bubble_percent,
    predicted,
    sent,
    simulated,
)
from mpipar.ops.cuda.ladder import flop_per_byte, gemm
from mpipar.plan.formulas import one_block

STATISTICS = ((2.0, 1.5, 0.0), (1.0, 2.0, 1.0))  # of two shards
SHARED_BYTES = 48 << 10
RATE, PEAK = 20.0, 100.0  # GB/s and GFLOP/s


@numbers(
    "6a",
    "MIB",
    "A block has width D = 1024 and works on 4 rows of 1024 tokens in float32, on"
    " 4 ranks with tp=4. How many MiB does each rank send for it, forward and backward?",
)
def bytes_of_a_block():
    """Predict a step, for one block and one microbatch."""
    found = predicted(
        tp=4, layers=1, d_model=1024, heads=8, seq_len=1024, batch_size=4, num_microbatches=1
    )
    records = one_block(found.recorder.records)
    total = sum(record.wire_bytes for record in records)
    return [Number("MiB", total / MIB)], (
        f"{len(records)} all-reduces of {plain(records[0].payload_bytes / MIB)} MiB, two forward"
        " and two backward; in each, a rank sends 2 (q-1)/q of that"
    )


def barriers_of_a_step(cut: str):
    """Count the barriers of a step with this cut of the ffn."""
    found = barriers(
        predicted(tp=2, layers=24, num_microbatches=8, ffn_cut=cut, d_model=16, heads=2), "tp"
    )
    each = 4 if cut == "pair" else 6
    return [Number("barriers", found)], (
        f"for each microbatch {each} in each block, and 3 outside: embedding, loss, and the"
        f" head's input gradient. 8 * ({each} * 24 + 3) = {found}"
    )


PAIR = numbers(
    "7a",
    "BARRIERS",
    "A decoder has 24 blocks. With tp=2 and 8 microbatches, how many"
    " tensor-parallel barriers does one step have?",
)(partial(barriers_of_a_step, "pair"))
GATHER = numbers(
    "7b",
    "BARRIERS",
    "The same decoder has 24 blocks, tp=2 and 8 microbatches. With"
    " `--ffn-cut gather`, both products of the ffn are cut by columns. How many"
    " tensor-parallel barriers does one step have?",
)(partial(barriers_of_a_step, "gather"))


@numbers(
    "7c",
    "LOSS",
    "Two ranks share the vocabulary. For one token, rank 0 has the largest logit"
    " 2.0, the sum of exp(logit - largest) 1.5, and not the target. Rank 1 has 1.0, 2.0 and"
    " the target's logit 1.0. What is the token's loss?",
)
def combined_loss():
    """Combine both shards as every rank does."""
    ops = ops_module.make("cpu", "float64")
    losses, ((largest, total),) = ops.cross_entropy_combine(np.array(STATISTICS)[:, None, :])
    return [Number("loss", float(losses[0]), 0.005)], (
        "the sum of exp over both, relative to 2.0, is 1.5 + 2.0 exp(1.0 - 2.0) = 2.236; its"
        f" logarithm is {largest + math.log(total):.3f}, and the target's logit 1.0 is subtracted"
    )


@numbers(
    "8a",
    "MIB",
    "4 replicas train the preset tiny in float32, with dp=4. How many MiB of"
    " gradients does each rank send in a step?",
)
def gradient_bytes():
    """Count the bytes over dp in a predicted step."""
    found = predicted(dp=4)
    size = 4 * found.num_params / MIB
    return [Number("MiB", sent(found, "dp") / MIB, 0.02)], (
        f"{plain(found.num_params)} gradients of 4 bytes are {size:.3f} MiB, and a ring sends"
        " 2 (q-1)/q = 1.5 times as much"
    )


@numbers(
    "9a",
    "DP TP PP",
    "The layout is dp=2,pp=2,tp=2. With which world rank does rank 5 sum"
    " gradients, with which does it share products, and with which does it exchange"
    " activations?",
)
def neighbours_of_five():
    """Read the groups of rank 5."""
    grid = Grid(5, {"pp": 2, "dp": 2, "tp": 2})
    found = []
    for axis in ("dp", "tp", "pp"):
        (other,) = set(grid.group(axis)) - {5}
        found.append(Number(axis, other))
    return found, "5 is pp 1, dp 0, tp 1: each neighbour differs in one of the three"


@words(
    "9b",
    ("dp", "pp", "tp"),
    "A rank trains the preset tiny with dp=2,pp=2,tp=2. Over which"
    " axis does rank 0 send the most bytes in a step?",
)
def busiest_axis():
    """Return the axis with the most bytes in a predicted step of rank 0."""
    found = predicted(dp=2, pp=2, tp=2)
    sizes = {axis: sent(found, axis) / MIB for axis in ("dp", "pp", "tp")}
    text = ", ".join(f"{axis} {size:.2f} MiB" for axis, size in sizes.items())
    return max(sizes, key=sizes.get), (
        f"{text}: every product of every block and microbatch sends activations over tp. So tp"
        " belongs on the fastest links"
    )


@numbers(
    "10a",
    "BUBBLE",
    "4 workers run zb-h1 with 8 microbatches. F takes 2 units, I 3 and W 2."
    " What percentage of the step is bubble?",
)
def zero_bubble():
    """Simulate zb-h1."""
    found = simulated("zb-h1", 4, 8, costs=(2, 3, 2))
    return [Number("bubble %", bubble_percent(found), 0.1)], (
        f"{plain(found.global_bubble[0])} of {plain(found.makespan)} units: (p-1) max(F, I,"
        " F + I - W), because a W fills the gap in which a worker waits for an I"
    )


@numbers(
    "12a",
    "FLOP_PER_BYTE",
    "A block of threads computes 64 x 64 numbers of a float32 product."
    " It reads both operands from memory once for this tile. How many FLOPs does it do for"
    " each byte?",
)
def tile_of_64():
    """Take the tiles of the rung `register`, which have this size."""
    kernel = gemm("register", "NN")
    assert (kernel.rows, kernel.columns) == (64, 64), kernel
    return [Number("FLOP per byte", flop_per_byte(kernel, 4))], (
        "for each step along K it reads 64 + 64 numbers of 4 bytes, and does 2 * 64 * 64 FLOPs"
    )


@numbers(
    "12b",
    "SIDE",
    "Two square float32 tiles, one of each operand, must fit into 48 KiB of"
    " shared memory. What is the largest side that is a power of two?",
)
def largest_tile():
    """Return the largest power of two that fits."""
    side = 1
    while 2 * (2 * side) ** 2 * 4 <= SHARED_BYTES:
        side *= 2
    return [Number("side", side)], (
        f"2 * {side}^2 * 4 bytes = {2 * side**2 * 4 >> 10} KiB; twice the side needs four times"
        " as much"
    )


@numbers(
    "12c",
    "WITH_2 WITH_8",
    "Memory gives 20 GB/s, and the cores reach 100 GFLOP/s. What is"
    " the most GFLOP/s that a product with 2 FLOPs per byte can reach, and one with 8?",
)
def roofs():
    """Return the lower of the two limits."""
    found = [min(intensity * RATE, PEAK) for intensity in (2, 8)]
    return [
        Number(f"with {intensity}", roof) for intensity, roof in zip((2, 8), found, strict=True)
    ], (
        "memory allows FLOP/byte times 20 GB/s, which is 40 and 160; the cores allow 100. The"
        " smaller of both is the roof"
    )
