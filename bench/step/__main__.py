"""Times a training step of mpipar's decoder and of the same model in PyTorch, in one run.

    python -m bench.step                          # one rank beside PyTorch on one thread
    mpiexec -n 2 python -m bench.step             # two ranks beside PyTorch on two threads
    python -m bench.step --batch-size 8 --repeats 7
    python -m bench.step --arch llama --kv-heads 2
    python -m bench.step --arch mixtral           # 8 experts, 2 for each token
    python -m bench.step --device cuda --dtype bfloat16
    python -m bench.step --sides best             # the fastest form of each, or with `own` of ours
    mpiexec -n 2 python -m bench.step --sides own

Each side is a row. mpipar's sides use NumPy and, if it is installed, Numba. On several ranks they
are data and tensor parallelism, ZeRO, and pipelines (1f1b, zb-h1, zb-v). One rank alone is measured
with the whole batch at once, and in the microbatches of the pipelines. The side `apart` sends
nothing: every rank makes a whole step of its own, all at the same time. Its times are those of a
step, divided by the number of ranks, so its speedup is what the cores give to any layout.

If PyTorch is installed, its side `torch` runs eagerly. It computes attention explicitly (product,
mask, softmax, product), as mpipar does. Its other sides use its own attention, its own AdamW in one
pass, and are compiled as a whole, if a compiler is found. On several ranks, `torch DDP` and `torch
FSDP2` (a unit for each block) have its own attention and AdamW, and send by gloo. PyTorch runs in
processes of its own, because the threads of two libraries in one process slow each other down. Its
experts are grouped products, as those of transformers.

All sides start from the same weights, and must give PyTorch's losses over three updates before
anything is timed. Their repetitions alternate, so that a slow spell of the machine hits all. With
16 bits both sides update float32 weights and compute with a rounded copy; PyTorch does not use
autocast. Losses must then agree to one rounding of the type. float16 keeps mpipar's initial loss
scale throughout.

Columns are medians over the repetitions. On several ranks the slowest one is timed, from a barrier
to its last update. over_torch: step_ms over that of `torch`. over_best: the same over PyTorch's
fastest side. speedup: one rank's time over this one, in the same repetition. in_communication:
share of the step inside barriers or waiting for messages. tflops: operations of the products, 6 B T
P + 12 L B T^2 D (P: elements of the matrices of blocks and head), per second. mfu: tflops over the
peak of the devices of all ranks that computed. The peak of a device is that of the maker's data
sheet for --dtype (bench/kernels/gpu.py; dense). If it is not known, as on a CPU, the column is
missing.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from threadpoolctl import threadpool_limits

from bench.kernels import gpu
from bench.program import Outcome, Program, count
from bench.results import versions
from bench.step.sides import OurSide, add_sizes, configure, rows_of, step_flops
from bench.step.torch_process import ALONE, TOGETHER, TorchProcess
from mpipar.comm.hosts import quiet_barrier
from mpipar.comm.objects import all_gather_objects, broadcast_text, gather_numbers
from mpipar.config.model import ARCHS
from mpipar.config.text import counted
from mpipar.errors import EXIT_CHECK_FAILED
from mpipar.ops import KERNELS, make

COMPILERS = {"cpu": ("g++",), "cuda": ("gcc", "clang")}  # that torch.compile needs
ONE, APART = ", one rank", ", apart"
SCHEDULES, MICROBATCHES = ("1f1b", "zb-h1", "zb-v"), 8  # of the pipelines
TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # of losses
CHECK_STEPS, WARM_UP_STEPS = 3, 2
SETTLE_SECONDS = 0.1  # idle threads of products spin for a while after a step


def add_flags(parser) -> None:
    """Add the flags of the model, of the sides, and of the device."""
    add_sizes(parser)
    parser.add_argument(
        "--sides",
        choices=("all", "best", "own"),
        default="all",
        help="best: mpipar with its default kernels beside PyTorch with its own attention and"
        " AdamW, compiled where it can be; own: the first of the two alone (all)",
    )
    parser.add_argument(
        "--no-compiled", dest="compiled", action="store_false", help="leave out torch.compile"
    )
    parser.add_argument(
        "--threads",
        type=count,
        help="threads of PyTorch, and of all ranks together (number of ranks)",
    )
    parser.add_argument("--device", choices=tuple(COMPILERS), default="cpu")
    parser.add_argument(
        "--dtype",
        choices=tuple(TOLERANCE),
        default="float32",
        help="of weights and activations (float32); on a CPU 16 bits show numerics,"
        " not speed: NumPy widens and rounds around every function",
    )


def check_flags(args, parser) -> None:
    """Check what was typed. Raises UsageError."""
    compiler = any(map(shutil.which, COMPILERS[args.device]))
    grouped = "experts" in ARCHS[args.arch]  # a product that torch.compile takes in bfloat16 only
    args.compiled = args.compiled and compiler and not grouped


def layouts_of(args, num_ranks: int) -> tuple[dict[str, dict], dict[str, dict]]:
    """Return {what follows a side's name: its grid settings}, and the same for single ranks.

    One rank also takes the microbatches of the pipelines: what these cost, a pipeline costs too.
    """
    if num_ranks == 1:
        return {"": {}}, {}
    alone, found = {APART: {}, ONE: {}}, {}
    for axis, size in (("dp", args.batch_size), ("tp", args.heads)):
        if size % num_ranks == 0:
            name = f", {axis} {num_ranks}"
            found[name] = {axis: num_ranks}
            if axis == "dp":
                found |= {f"{name} zero {one}": {axis: num_ranks, "zero": one} for one in (1, 3)}
    if args.device == "cpu" and args.layers >= num_ranks:
        piped = {"pp": num_ranks, "num_microbatches": math.gcd(args.batch_size, MICROBATCHES)}
        found |= {f", pp {num_ranks} {name}": piped | {"schedule": name} for name in SCHEDULES}
        if (count := piped["num_microbatches"]) > 1:
            alone[f"{ONE}, {count} microbatches"] = {"num_microbatches": count}
    return found, alone


def our_sides(args, world, host_rank=0) -> tuple[list[str], dict]:
    """Return (names of our sides, the OurSide of each that this rank runs), per set of kernels.

    One rank alone is world rank 0; apart is every rank. Comm: makes the groups of each.
    """
    names, sides, rows = [], {}, rows_of(args)
    together, alone = layouts_of(args, world.size)
    for suffix, layout in (together | alone).items():
        for name in KERNELS[args.device][: None if args.sides == "all" else 1]:
            if name == "numba" and importlib.util.find_spec("numba") is None:
                continue
            shown = f"mpipar {name if args.device == 'cpu' else f'cupy {name}'}{suffix}"
            names.append(shown)
            here = world if suffix in together else SimpleNamespace(rank=0, size=1)
            if here is world or world.rank == 0 or suffix == APART:
                ops = make(args.device, args.dtype, kernels=name, host_rank=host_rank)
                sides[shown] = OurSide(configure(args, layout, here.size), rows, ops, here)
    return names, sides


def their_sides(args, world, folder: Path) -> tuple[list[str], dict, list[TorchProcess]]:
    """Return (names of PyTorch's sides, those of this rank, and this rank's processes)."""
    if args.sides == "own" or importlib.util.find_spec("torch") is None:
        return [], {}, []
    names = [name for name, how in ALONE.items() if args.compiled or not how.get("compiled")]
    names = names if args.sides == "all" else names[-1:]
    processes, sides, together = [], {}, []
    if world.rank == 0:
        processes.append(TorchProcess(folder, args, args.threads))
        sides = {name: processes[0].side(name) for name in names}
    if world.size > 1 and args.batch_size % world.size == 0 and args.device == "cpu":
        together, threads = [*TOGETHER], max(1, args.threads // world.size)
        processes.append(TorchProcess(folder, args, threads, world.rank, world.size))
        sides |= {name: processes[-1].side(name) for name in together}
    return names + together, sides, processes


def take_steps(sides, names, steps, world) -> np.ndarray:
    """Return (names, steps, four) of this rank: losses and TIMES, NaN without a part in a side.

    The sides take turns; a rank that has no part in one sleeps. Comm: barriers around each step of
    each side, and the sides' own.
    """
    found = np.full((len(names), len(steps), 4), np.nan)
    for place, step in enumerate(steps):
        for number, name in enumerate(names):
            time.sleep(SETTLE_SECONDS)
            quiet_barrier(world)
            if name in sides:
                found[number, place] = sides[name].take(step)
    quiet_barrier(world)  # a rank that spins in MPI would slow down the last side's threads
    return found


def disagreement(names, losses, dtype) -> str | None:
    """Return the difference between the losses of a few full updates, or None.

    losses: (ranks, names, steps). The second loss is right only if every gradient and the update
    were right. A rank of DDP or FSDP2 has the mean of its own rows.
    """
    reference = next((place for place, name in enumerate(names) if name in ALONE), None)
    if reference is None:
        return None
    for place, name in enumerate(names):
        own = losses[~np.isnan(losses[:, place, 0]), place]
        for rank in [own.mean(axis=0)] if name in TOGETHER else own:
            for step, (a, b) in enumerate(zip(rank, losses[0, reference], strict=True), 1):
                if not abs(a - b) <= TOLERANCE[dtype] * abs(b):
                    return f"{name}, step {step}: loss {float(a)}, {float(b)} in PyTorch"
    return None


def table(args, names, seconds, peak_tflops=None) -> list[dict]:
    """Return the result as rows; seconds: TIMES of all ranks (ranks, names, repetitions, three)."""
    steps_at_once = [len(seconds) if name.endswith(APART) else 1 for name in names]
    seconds = seconds / np.reshape(steps_at_once, (-1, 1, 1))
    parts = np.median(np.nanmax(seconds, axis=0), axis=1) * 1e3
    steps = dict(zip(names, np.nanmax(seconds[..., :2].sum(axis=-1), axis=0), strict=True))
    medians = {name: statistics.median(times) for name, times in steps.items()}
    fastest = min((ms for name, ms in medians.items() if name in ALONE), default=None)
    alone = {one.removesuffix(ONE): one for one in steps if one.endswith(ONE)}
    found = []
    for number, (name, step_s) in enumerate(medians.items()):
        busy = seconds[:, number, :, :2].sum(axis=-1)
        row = {
            "side": name,
            "forward_backward_ms": parts[number, 0],
            "update_ms": parts[number, 1],
            "step_ms": step_s * 1e3,
        }
        if "torch" in medians:
            row["over_torch"] = step_s / medians["torch"]
        if fastest is not None:
            row["over_best"] = step_s / fastest
        if alone:
            one = alone.get(name.partition(",")[0])
            row["speedup"] = np.median(steps[one] / steps[name]) if one else "-"
        row["in_communication"] = np.nansum(seconds[:, number, :, 2]) / np.nansum(busy)
        row["tokens_per_s"] = args.batch_size * args.seq_len / step_s
        row["tflops"] = step_flops(args) / step_s * 1e-12
        if peak_tflops is not None:
            computed = np.count_nonzero(~np.isnan(busy[:, 0]))
            row["mfu"] = row["tflops"] / (peak_tflops * computed)
        found.append({key: one if isinstance(one, str) else float(one) for key, one in row.items()})
    return found


def device_facts(args) -> dict:
    """Return facts that the figures of this rank's device depend on, with its peak if known."""
    card = gpu.Gpu(args.repeats) if args.device == "cuda" else None
    peak = card and card.roofs.get(args.dtype)
    return (card.facts() if card else {}) | ({"peak_tflops": peak} if peak else {})


def head_of(args, num_ranks: int, compared: bool) -> str:
    """Return the line above the table."""
    heads = counted(args.heads, "head") + (f" ({args.kv_heads} kv)" if args.kv_heads else "")
    return (
        f"{args.arch}, {counted(args.layers, 'layer')}, D {args.d_model}, {heads}, batch"
        f" {args.batch_size} x {args.seq_len} tokens, V {args.vocab_size}, {args.dtype},"
        f" {counted(num_ranks, 'rank')}, {counted(args.threads, 'thread')},"
        f" {counted(args.repeats, 'step')}, "
        + (f"losses equal to {TOLERANCE[args.dtype]:.1g}" if compared else "without PyTorch")
    )


def measure(args, session) -> Outcome | int:
    """Check and measure on all ranks; code 1 if losses differ.

    Comm: that of the sides, quiet barriers, two gathers and a sum.
    """
    world = session.world
    args.threads = args.threads or world.size
    with (
        tempfile.TemporaryDirectory() as own,
        threadpool_limits(max(1, args.threads // world.size)),
    ):
        names, sides = our_sides(args, world, session.host_rank)
        theirs, more, processes = their_sides(args, world, Path(broadcast_text(world, own)))
        names, sides = names + theirs, sides | more
        first, last = CHECK_STEPS + 1, CHECK_STEPS + WARM_UP_STEPS + args.repeats
        checked = gather_numbers(world, take_steps(sides, names, range(1, first), world))
        problem = disagreement(names, checked[..., 0], args.dtype) if world.rank == 0 else None
        if any(all_gather_objects(world, problem is not None)):
            if problem:
                print(f"not timed, the models differ: {problem}", file=sys.stderr)
            return EXIT_CHECK_FAILED
        found = gather_numbers(world, take_steps(sides, names, range(first, last + 1), world))
        for process in processes:
            process.close()
    if found is None:
        return 0
    facts = device_facts(args)
    rows = table(args, names, found[:, :, WARM_UP_STEPS:, 1:], facts.get("peak_tflops"))
    sizes = {key: value for key, value in vars(args).items() if key != "json"}
    facts = {"ranks": world.size} | versions("torch", "numba") | sizes | facts
    return Outcome(rows, facts, head=head_of(args, world.size, bool(theirs)))


main = Program(
    "step",
    __doc__,
    measure,
    together=True,
    add=add_flags,
    check=check_flags,
).started(__name__)
