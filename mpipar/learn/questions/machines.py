"""Questions of chapters 13 to 17: 16 bits, predictions, memory, long context, state, experts."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from mpipar.comm.grid import chunk_size, token_pieces
from mpipar.data.routing import shares
from mpipar.learn.exercise import Number, numbers, plain
from mpipar.learn.questions.counted import MIB, predicted, ring_messages, sent, simulated
from mpipar.plan.formulas import SENDS
from mpipar.train.gradsync import LossScale

STATES = ("weights", "gradients", "optimizer")  # labels of what a rank keeps between steps
LATENCY_S, RATE = 20e-6, 3e9  # of a hop, and bytes per second
OVERFLOWS = (True, True, False, False, False, False)


@numbers(
    "13a",
    "UPDATE",
    "A bfloat16 weight is 1.0. What is the smallest power of two that can be"
    " added to it so that it changes? Type it as 1/N.",
)
def smallest_update():
    """Try powers of two."""
    one, update = ml_dtypes.bfloat16(1.0), 1.0
    while ml_dtypes.bfloat16(1.0 + update / 2) != one:
        update /= 2
    return [Number("update", update)], (
        f"bfloat16 stores 7 bits after the first, so the next number above 1 is 1 + 1/"
        f"{round(1 / update)}. Half of that is rounded back to 1"
    )


@numbers(
    "13b",
    "SCALE",
    "A float16 run starts with the loss scale 65,536 and the interval 3. Two"
    " steps overflow, and then four are good. What is the loss scale after them?",
)
def scale_after():
    """Move the loss scale as a run does."""
    scale = LossScale(SimpleNamespace(dtype="float16", loss_scale=None, loss_scale_interval=3))
    values = [scale.value]
    for overflow in OVERFLOWS:
        scale.update(overflow)
        values.append(scale.value)
    return [Number("loss scale", scale.value)], (
        "it halves with each overflow, and doubles after 3 good steps in a row: "
        + ", ".join(map(plain, values))
    )


@numbers(
    "13c",
    "SCALE",
    "A gradient is 3.0, and float16 ends at 65,504. What is the largest power"
    " of two with which it can be scaled without overflow?",
)
def largest_scale():
    """Compare with the largest float16 number."""
    scale, most = 1.0, float(np.finfo(np.float16).max)
    while 3.0 * scale * 2 <= most:
        scale *= 2
    return [Number("scale", scale)], (
        f"3 * {plain(scale)} = {plain(3 * scale)}, and twice as much is above 65,504"
    )


@numbers(
    "14a",
    "MS",
    "4 ranks sum 24 MiB by a ring all-reduce. A message takes 20 us and its bytes"
    " at 3 GB/s (3 * 10^9). How many ms does the sum take?",
)
def ring_time():
    """Add up the messages of the ring, one after the other."""
    messages = ring_messages(24 * MIB, 4)
    seconds = sum(LATENCY_S + size / RATE for size in messages)
    return [Number("ms", seconds * 1e3, 0.05)], (
        f"{len(messages)} messages of {plain(messages[0] / MIB)} MiB, one after the other:"
        f" {len(messages)} * (0.02 ms + {messages[0] / RATE * 1e3:.3f} ms)"
    )


@numbers(
    "14b",
    "MS",
    "4 workers run 1F1B with 4 microbatches. F, I and W take 2 ms each, and a"
    " message takes 0.5 ms. How many ms is the step?",
)
def simulated_step():
    """Simulate with a time for every hop."""
    found = simulated("1f1b", 4, 4, costs=(2, 2, 2), hop=Fraction(1, 2))
    return [Number("ms", found.makespan, 0.01)], (
        "see `mpipar schedule 1f1b --pp 4 --num-microbatches 4 --costs 2,2,2 --latency 0.5`:"
        f" without hops it is {plain(simulated('1f1b', 4, 4, costs=(2, 2, 2)).makespan)}, and"
        " every hop on the longest path adds 0.5"
    )


def kept(prediction) -> int:
    """Return the bytes that a rank keeps between steps."""
    return sum(prediction.peak_bytes.get(label, 0) for label in STATES)


@numbers(
    "15a",
    "BYTES",
    "A model trains in float16 with AdamW. Gradients and master weights are"
    " float32. How many bytes does a rank keep for each parameter?",
)
def bytes_per_parameter():
    """Divide what a predicted rank keeps by its parameters."""
    found = predicted(dtype="float16")
    each = {label: found.peak_bytes[label] / found.num_params for label in STATES}
    text = ", ".join(f"{label} {size:.3g}" for label, size in each.items())
    return [Number("bytes", round(kept(found) / found.num_params))], (
        f"{text}: weights of 2 bytes, gradients of 4, and for the optimizer master weights of 4"
        " and two moments of 4"
    )


@numbers(
    "16a",
    "MIB",
    "4 replicas train the preset tiny in float32 with `--zero 1`. How many MiB"
    " of weights, gradients and moments does each rank keep?",
)
def sharded_state():
    """Predict a rank."""
    found = predicted(dp=4, zero=1)
    return [Number("MiB", kept(found) / MIB, 0.05)], (
        f"{plain(found.num_params)} parameters: 4 bytes of weights and 4 of gradients whole, and"
        " a quarter of the 8 bytes of moments"
    )


@numbers(
    "16b",
    "RUNS ZIGZAG",
    "A row of 4,096 tokens spans 4 ranks. The busiest rank"
    " computes most pairs of query and key. How many are they with one run of tokens on each"
    " rank, and how many with the zig-zag of `--cp 4`?",
)
def pairs():
    """Count the pairs of the busiest rank."""
    tokens, ranks = 4096, 4

    def seen(pieces):
        return sum(place + 1 for one in pieces for place in range(one.start, one.stop))

    width = chunk_size(tokens, ranks)
    runs = max(seen([slice(index * width, (index + 1) * width)]) for index in range(ranks))
    zigzag = max(seen(token_pieces(tokens, "ring", ranks, index)) for index in range(ranks))
    return [Number("runs", runs), Number("zig-zag", zigzag)], (
        "the token at position t sees t + 1 keys. The last quarter of a row has 7/16 of all pairs;"
        " a piece from the start and one from the end have 1/4 of them on every rank"
    )


@numbers(
    "16c",
    "TIMES",
    "4 replicas train with `--zero 3` and 8 microbatches. Each rank keeps"
    " whole gradients during a step. How many times the size of all weights does a rank send"
    " in a step?",
)
def bytes_of_zero_3():
    """Compare bytes over dp in a predicted step with its weights, without padding of small
    segments.
    """
    found = predicted(
        dp=4, zero=3, num_microbatches=8, batch_size=32, tied=False, d_model=256, heads=2
    )
    times = sent(found, "dp") / (4 * found.num_params)
    return [Number("times", round(times, 2), 0.3)], (
        "each microbatch gathers the weights for F and again for B, and gradients are scattered"
        " once: (q-1)/q * (2 * 8 + 1) = 12.75"
    )


@numbers(
    "17a",
    "KIB",
    "4 ranks hold 8 equally popular experts, and a token passes 2."
    " Each rank has 64 tokens of width 128 in float32. How many KiB does it send in one"
    " dispatch?",
)
def bytes_of_dispatch():
    """Take the first exchange of a predicted step."""
    found = predicted(
        dp=4, ep=4, experts=8, num_microbatches=1, batch_size=4, d_model=128, seq_len=64
    )
    sent_bytes = next(
        one.wire_bytes for one in found.recorder.records if one.name.endswith("moe.dispatch")
    )
    return [Number("KiB", sent_bytes / 1024)], (
        "2 rows for each of 64 tokens, 3/4 of them for experts of other ranks, 512 bytes each"
    )


@numbers(
    "17b",
    "EXPERT RANK",
    "Every token passes the first of 8 experts, and one of the other 7,"
    " which are equally popular. 4 ranks hold 2 experts each. How many times the mean do the"
    " first expert and its rank get?",
)
def times_the_mean():
    """Use the shares that --routing one-hot has."""
    loads = shares("one-hot", 8, 2)
    ranks = loads.reshape(4, -1).sum(axis=1)
    return [
        Number("expert", loads.max() / loads.mean()),
        Number("rank", ranks.max() / ranks.mean(), 0.01),
    ], (
        "all tokens pass the expert, and the mean is 2/8 of them. Its rank has 1 + 1/7 rows for a"
        " token, and the mean is 2/4"
    )


@numbers(
    "17c",
    "EXPERTS",
    "4 ranks hold 8 experts. How many of them must a token pass"
    " at least, so that an all-gather of all tokens sends less than an all-to-all?",
)
def gathers_less():
    """Compare the factors of both dispatches."""
    (_, exchanged), (_, gathered) = (SENDS[name] for name in ("all-to-all", "all-gather"))
    least = next(k for k in range(1, 9) if gathered(k, 4) < exchanged(k, 4))
    return [Number("experts", least)], (
        "an all-to-all sends 3k/4 times a rank's tokens and an all-gather 3 times, so k must be"
        " above 4"
    )
