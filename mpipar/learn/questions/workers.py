"""Questions of chapters 1 to 5: one worker, a wire, layers on workers, microbatches."""

from __future__ import annotations

from fractions import Fraction

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.learn.exercise import Number, numbers, plain
from mpipar.learn.questions.counted import (
    MIB,
    bubble_percent,
    configured,
    predicted,
    ring_messages,
    simulated,
)

PERCENT = 0.1  # how far a percentage may be off


@numbers(
    "1a",
    "RANK",
    "A run has the layout dp=2,pp=2,tp=2. Which world rank has pp rank 1, dp rank 0 and tp rank 1?",
)
def place_of_a_rank():
    """Use the default order of axes."""
    found = Grid(0, {"pp": 2, "dp": 2, "tp": 2}).at(pp=1, dp=0, tp=1)
    return [Number("world rank", found)], (
        f"pp is the outermost axis and tp the innermost: (1 * 2 + 0) * 2 + 1 = {found}"
    )


@numbers(
    "1b",
    "TOKENS",
    "The preset tiny has a batch of 16 rows, and each row has 64 tokens. On"
    " how many tokens does one step train?",
)
def tokens_of_a_step():
    """Read the preset tiny."""
    config = configured()
    rows, length = config.train.batch_size, config.model.seq_len
    return [Number("tokens", rows * length)], (
        f"{rows} rows of {length} tokens; microbatches and ranks only divide them"
    )


@numbers(
    "2a",
    "PARAMETERS",
    "The preset tiny has width D = 128 and ffn width F = 512. How many"
    " parameters does one of its blocks have, biases and norms included?",
)
def parameters_of_a_block():
    """Subtract the parameters of a model from those of one with a block more."""
    found = predicted(layers=2).num_params - predicted(layers=1).num_params
    return [Number("parameters", found)], (
        "q, k, v and projection have 4 D^2, up and down have 2 D F, and biases and norms have"
        f" 9 D + F: together {plain(found)}"
    )


@numbers(
    "2b",
    "F I W",
    "A product multiplies x (2, 64, 128) by w (128, 512). How many"
    " floating-point operations take F, the input gradient I and the weight gradient W?",
)
def three_products():
    """Count on shapes, with the functions that compute the products."""
    recorder = Recorder()
    ops = ops_module.make("shapes", "float32", recorder)
    x, w, dy = (ops.empty(shape) for shape in ((2, 64, 128), (128, 512), (2, 64, 512)))
    for phase, product in (
        ("F", lambda: ops.matmul(x, w)),
        ("I", lambda: ops.matmul_nt(dy, w)),
        ("W", lambda: ops.matmul_tn_add(x, dy, ops.zeros(w.shape))),
    ):
        with recorder.at(phase):
            product()
    return [Number(phase, ops.flops[phase]) for phase in "FIW"], (
        "each multiplies three sizes, 2 * 64 tokens, 128 and 512, and counts a product and a sum"
    )


@numbers(
    "3a", "MIB", "4 ranks sum 6 MiB each by a ring all-reduce. How many MiB does each rank send?"
)
def ring_bytes():
    """Add up the messages."""
    messages = ring_messages(6 * MIB, 4)
    return [Number("MiB", sum(messages) / MIB)], (
        f"{len(messages)} messages of {plain(messages[0] / MIB)} MiB: 2 (q-1)/q of 6 MiB, q = 4"
    )


@numbers(
    "3b",
    "MESSAGES",
    "4 ranks sum an array by a ring all-reduce. How many messages does each rank send?",
)
def ring_sends():
    """Count the messages."""
    count = len(ring_messages(6 * MIB, 4))
    return [Number("messages", count)], (
        "q - 1 = 3 while the sums form, and q - 1 = 3 while the finished pieces travel round"
    )


@numbers(
    "4a",
    "BUSY MESSAGES",
    "12 blocks run on 12 workers, and one input passes through,"
    " forward and backward. What percentage of the step is each worker busy, and how many"
    " messages do all of them send?",
)
def twelve_workers():
    """Simulate the naive schedule with one input."""
    found = simulated("naive", 12, 1)
    busy = 100 * found.busy_share[0]
    return [Number("busy %", busy, PERCENT), Number("messages", sum(found.messages))], (
        "one worker of 12 computes at a time, and each of the 11 borders is crossed twice: see"
        " `mpipar schedule naive --pp 12 --num-microbatches 1`"
    )


@numbers(
    "4b",
    "DEALT RUNS",
    "12 layers run on 3 workers. Dealt out like cards, worker 0 has"
    " the layers 1, 4, 7 and 10. In runs, it has the layers 1 to 4. How many messages does one"
    " input need, forward and backward, dealt out and in runs?",
)
def dealt_messages():
    """Compare interleaving with four chunks and the naive schedule."""
    dealt, runs = simulated("interleaved", 3, 1, 4), simulated("naive", 3, 1)
    return [Number("dealt", sum(dealt.messages)), Number("runs", sum(runs.messages))], (
        "dealt out, each of the 11 borders between layers separates two workers; in runs,"
        " 2 borders do. Each is crossed twice"
    )


@numbers(
    "4c",
    "DEALT RUNS",
    "12 layers run on 3 workers, and 3 inputs pass through. F, I"
    " and W of a worker's layers take 1 unit each, and a message takes 0.1. How long is a step"
    " with the layers dealt out like cards, and in runs?",
)
def dealt_steps():
    """Simulate the same with three inputs and a hop."""
    hop = Fraction(1, 10)
    dealt, runs = simulated("interleaved", 3, 3, 4, hop=hop), simulated("1f1b", 3, 3, hop=hop)
    return [Number("dealt", dealt.makespan, 0.01), Number("runs", runs.makespan, 0.01)], (
        "a worker that has only a quarter of its layers to run first hands over sooner, so the"
        " others start sooner; the price is more messages. This is called interleaving"
    )


@numbers(
    "5a",
    "MICROBATCHES",
    "GPipe runs on 4 workers, and all microbatches take equally long."
    " What is the smallest number of microbatches with at most 10 % bubble?",
)
def least_microbatches():
    """Return the first count whose simulated bubble is small enough."""
    p, count = 4, 1
    while bubble_percent(simulated("gpipe", p, count)) > 10:
        count += 1
    return [Number("microbatches", count)], (
        f"the bubble is (p-1)/(m+p-1) = 3/{count + 3} of the step, whatever F and B take"
    )


@numbers(
    "5c",
    "GPIPE 1F1B",
    "A tutorial says that 4 workers with 8 microbatches have 27 % bubble"
    " with GPipe and 19 % with 1F1B. F takes 1 unit and B 2. What are the true percentages?",
)
def both_bubbles():
    """Simulate a backward of two units."""
    found = [bubble_percent(simulated(name, 4, 8)) for name in ("gpipe", "1f1b")]
    return [Number("gpipe %", found[0], PERCENT), Number("1f1b %", found[1], PERCENT)], (
        "both take 33 units, of which 9 are idle; 1F1B saves memory, not time: it holds 4"
        " microbatches instead of 8"
    )
