"""Time one training step of mpipar's decoder beside the same model in PyTorch, in one run.

    python -m bench.step                          # one rank beside PyTorch on one thread
    mpiexec -n 2 python -m bench.step             # two ranks beside PyTorch on two threads
    python -m bench.step --arch llama --kv-heads 2 --compiled
    python -m bench.step --device cuda --dtype bfloat16 [--peak-tflops 800]
    python -m bench.step --cable 200,1000         # on two hosts: see bench/step/cable.py

Each side is a row. mpipar's sides use NumPy and, if it is installed, Numba; on several ranks both
data and tensor parallelism. If PyTorch is installed, its side `torch` runs eagerly. It computes
attention explicitly (product, mask, softmax, product), as mpipar does. `torch fused attention` has
PyTorch's own function in its place. On a GPU, or with --compiled, both are also compiled as a
whole. All sides start from the same weights, and must give PyTorch's losses over three updates
before anything is timed. Their repetitions alternate, so that a slow spell of the machine hits all.

With 16 bits both sides update float32 weights and compute with a rounded copy; PyTorch does not use
autocast. Losses must then agree to one rounding of the type. float16 keeps mpipar's first loss
scale all the time.

Columns are medians over the repetitions. Of several ranks the slowest counts, from a barrier to its
last update. over_torch: step_ms over that of `torch`. best_over_torch: the same of the best
repetitions. over_best: step_ms over that of PyTorch's fastest side. blas: the library that
multiplies, and the processor that it chose its loops for. in_communication: share of the step
inside barriers or waiting for messages.
tflops: operations of the products, 6 B T P + 12 L B T^2 D (P: elements of the matrices of blocks
and head), per second. mfu: tflops over the peak of the devices of all ranks that computed. The peak
of a device is --peak-tflops, else that of the maker's data sheet for --dtype: dense, without TF32
(bench/kernels/gpu.py). If neither is known, as on a CPU, the column is missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import statistics
import sys

import numpy as np
from threadpoolctl import threadpool_limits

from bench import results
from bench.kernels import gpu
from bench.step import blas
from bench.step.cable import on_each_cable
from bench.step.sides import (
    PARTS,
    OurSide,
    add_sizes,
    configure,
    losses,
    measure_steps,
    random_batch,
    step_flops,
    torch_side,
)
from mpipar.comm.facts import gather_numbers
from mpipar.config import flags
from mpipar.errors import EXIT_CHECK_FAILED
from mpipar.job.session import guard
from mpipar.ops import KERNELS, make

TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # of losses


def parse(argv):
    """Read the flags: sizes of the model and of the measurement."""
    parser = flags.Parser(prog="python -m bench.step", description=__doc__)
    add_sizes(parser)
    parser.add_argument("--compiled", action="store_true", help="compile PyTorch's sides as well")
    parser.add_argument("--threads", type=flags.count,
                        help="threads of PyTorch, and of all ranks together (number of ranks)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32",
                        help="of weights and activations (float32); on a CPU 16 bits show numerics,"
                        " not speed: NumPy widens and rounds around every function")
    parser.add_argument("--peak-tflops", type=float, help="peak of one rank's device in --dtype")
    parser.add_argument("--cable", type=cables, metavar="MBIT[,MBIT]",
                        help="time mpipar's step on two hosts that a cable of each of these rates"
                        " joins, without and with what hides messages (see bench/step/cable.py)")
    parser.add_argument("--json", help="write the result to this file")
    args = parser.parse_args(argv)
    if args.peak_tflops is not None and not 0 < args.peak_tflops < math.inf:
        parser.error("--peak-tflops must be above 0")
    if args.cable and (args.device, args.dtype, args.threads) != ("cpu", "float32", None):
        parser.error("--cable measures float32 on the CPU, with one thread for each rank; leave out"
                     " --device, --dtype and --threads")
    return args


def cables(text: str) -> list[int]:
    """Rates in Mbit/s. Raises what `flags.count` raises."""
    return [flags.count(one) for one in text.split(",")]


def our_sides(args, batch, world, host_rank=0) -> dict:
    """Name -> OurSide, for every layout and set of kernels. Comm: makes their groups."""
    layouts = [{}] if world.size == 1 else [
        {axis: world.size} for axis, count in (("dp", args.batch_size), ("tp", args.heads))
        if count % world.size == 0]
    kernels = [name for name in KERNELS[args.device]
               if name != "numba" or importlib.util.find_spec("numba")]
    sides = {}
    for layout in layouts:
        config = configure(args, layout, world.size)
        for name in kernels:
            ops = make(args.device, args.dtype, kernels=name, host_rank=host_rank)
            shown = name if args.device == "cpu" else f"cupy {name}"
            shown += "".join(f", {axis} {count}" for axis, count in layout.items())
            sides[f"mpipar {shown}"] = OurSide(config, batch, ops, world)
    return sides


def disagreement(found, wanted, dtype) -> str | None:
    """The difference between the losses of a few full updates, or None.

    The second loss is right only if every gradient and the update were right.
    """
    for name, ours in found.items():
        for step, (a, b) in enumerate(zip(ours, wanted, strict=True), 1):
            if not abs(a - b) <= TOLERANCE[dtype] * abs(b):
                return f"{name}, step {step}: loss {a!r}, {b!r} in PyTorch"
    return None


def device_facts(args) -> dict:
    """Facts that the figures of this rank's device depend on, with its peak if that is known."""
    found = {}
    if args.device == "cuda":
        card = gpu.Gpu(args.repeats)
        found = card.facts()
        if args.dtype in card.roofs:
            found["peak_tflops"] = card.roofs[args.dtype]
    return found | ({"peak_tflops": args.peak_tflops} if args.peak_tflops else {})


def libraries(args, names) -> dict[str, str]:
    """Name of a side -> the library that its products run in."""
    if args.device == "cuda":
        return dict.fromkeys(names, "cuBLAS")
    return {name: blas.torch_blas() if name.startswith("torch") else blas.numpy_blas()
            for name in names}


def rows(args, names, seconds, peak_tflops=None) -> list[dict]:
    """The result as rows; seconds: all ranks' (ranks, names, repetitions, three)."""
    products = libraries(args, names)
    parts = seconds.max(axis=0)
    steps = seconds[..., :2].sum(axis=-1).max(axis=0)
    theirs = steps[names.index("torch")] if "torch" in names else None
    fastest = min((statistics.median(one) for name, one in zip(names, steps, strict=True)
                   if name.startswith("torch")), default=None)
    found = []
    for number, name in enumerate(names):
        step_s = statistics.median(steps[number])
        tflops = step_flops(args) / step_s * 1e-12
        # A rank without a part in this side has measured nothing.
        busy = seconds[:, number, :, :2].sum(axis=-1)
        found.append({
            "side": name,
            "blas": products[name],
            **{f"{part}_ms": statistics.median(parts[number, :, i]) * 1e3
               for i, part in enumerate(PARTS)},
            "step_ms": step_s * 1e3,
            **({} if theirs is None else {
                "over_torch": step_s / statistics.median(theirs),
                "best_over_torch": min(steps[number]) / min(theirs),
                "over_best": step_s / fastest}),
            "in_communication": float(seconds[:, number, :, 2].sum() / busy.sum()),
            "tokens_per_s": args.batch_size * args.seq_len / step_s,
            "tflops": tflops,
            **({} if peak_tflops is None else {
                "mfu": tflops / (peak_tflops * np.count_nonzero(busy.any(axis=-1)))}),
        })
    return found


def their_sides(args, batch, world) -> tuple[list[str], dict]:
    """(names of PyTorch's sides, sides that this rank runs: all on world rank 0), if installed."""
    if importlib.util.find_spec("torch") is None:
        return [], {}
    import torch

    torch.set_num_threads(args.threads)
    kinds = {"torch": {}, "torch fused attention": {"fused": True}}
    if args.compiled or args.device == "cuda":
        kinds |= {f"{name}, compiled": {"compiled": True} | how for name, how in kinds.items()}
    return list(kinds), {name: torch_side(torch, args, batch, **how)
                         for name, how in kinds.items() if world.rank == 0}


def compare_sides(args, world, host_rank) -> int:
    """Check, measure, print; return the exit code. Comm: that of `measure_steps`, and some sums."""
    batch = random_batch(args)
    sides = our_sides(args, batch, world, host_rank)
    ours = list(sides)
    theirs, more = their_sides(args, batch, world)
    sides |= more
    names = ours + theirs
    found = losses(sides, names, world)
    problem = disagreement({name: found[name] for name in sides}, found["torch"], args.dtype) \
        if theirs and world.rank == 0 else None
    wrong = np.array([problem is not None], np.int64)
    world.Allreduce(wrong.copy(), wrong)
    if wrong[0]:
        if problem:
            print(f"not timed, the models differ: {problem}", file=sys.stderr)
        return EXIT_CHECK_FAILED
    seconds = gather_numbers(world, measure_steps(sides, names, args.repeats, world))
    if seconds is not None:
        facts = device_facts(args)
        print_sides(args, rows(args, names, seconds, facts.get("peak_tflops")), world.size, facts)
    return 0


def print_sides(args, found, num_ranks, facts):
    """Print the table and write the file."""
    heads = f"{args.heads} heads" + (f" ({args.kv_heads} kv)" if args.kv_heads else "")
    print(f"{args.arch}, {args.layers} layers, D {args.d_model}, {heads}, batch {args.batch_size} x"
          f" {args.seq_len} tokens, V {args.vocab_size}, {args.dtype}, {num_ranks} rank(s), "
          f"{args.threads} thread(s), {args.repeats} steps, "
          + (f"losses equal to {TOLERANCE[args.dtype]:.1g}" if "over_torch" in found[0]
             else "PyTorch is not installed"))
    print(results.markdown_table(found))
    if args.json:
        versions = {name: importlib.metadata.version(name) for name in ("torch", "numba")
                    if importlib.util.find_spec(name)}
        sizes = {key: value for key, value in vars(args).items()
                 if key not in ("json", "peak_tflops")}
        results.write(args.json, "bench.step", found,
                      **{"ranks": num_ranks} | versions | sizes | facts)


def main(argv, session) -> int:
    """Measure on all ranks; returns the exit code."""
    args = parse(argv)
    if args.cable:
        return on_each_cable(session, args)
    world = session.start()
    results.check_writable(args.json, session)
    args.threads = args.threads or world.size
    with threadpool_limits(max(1, args.threads // world.size)):
        return compare_sides(args, world, session.host_rank)


if __name__ == "__main__":
    guard(main)
