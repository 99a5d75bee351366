"""Times a training step of mpipar's decoder and of the same model in PyTorch, in one run.

    python -m bench.step                          # one rank beside PyTorch on one thread
    mpiexec -n 2 python -m bench.step             # two ranks beside PyTorch on two threads
    python -m bench.step --freed                  # neither BLAS asks who made the processor
    python -m bench.step --batch-size 8 --repeats 7
    python -m bench.step --recipe nanogpt         # nanoGPT's recipe for a CPU, on the default text
    python -m bench.step --arch llama --kv-heads 2
    python -m bench.step --device cuda --dtype bfloat16 [--peak-tflops 800]
    python -m bench.step --sides best             # the fastest form of each, or with `own` of ours
    mpiexec -n 2 python -m bench.step --sides own --all-reduce window,auto
    python -m bench.step --cable 200,1000         # on two hosts: see bench/step/cable.py
    python -m bench.step.against ../before        # the step of another checkout

Each side is a row. mpipar's sides use NumPy and, if it is installed, Numba. On several ranks they
are data and tensor parallelism, and pipelines (1f1b, zb-h1, zb-v). One rank alone is measured with
the whole batch at once, and in the microbatches of the pipelines. The side `apart` sends nothing:
every rank makes a whole step of its own, all at the same time. Its times are those of a step,
divided by the number of ranks, so its speedup is what the cores give to any layout. If PyTorch is
installed, its side `torch` runs eagerly. It computes attention explicitly (product, mask, softmax,
product), as mpipar does. Its other sides use its own attention, its own AdamW in one pass, and are
compiled as a whole, if a compiler is found. All sides start from the same weights, and must give
PyTorch's losses over three updates before anything is timed. Their repetitions alternate, so that a
slow spell of the machine hits all.

The sides `products` multiply what one rank's step multiplies, and do nothing else, by NumPy and by
PyTorch. Their tflops are the rates of both libraries at the shapes of the step. On several ranks
NumPy has one rank's threads, PyTorch all.

With 16 bits both sides update float32 weights and compute with a rounded copy; PyTorch does not use
autocast. Losses must then agree to one rounding of the type. float16 keeps mpipar's initial loss
scale throughout.

Columns are medians over the repetitions. On several ranks the slowest one is timed, from a barrier
to its last update. over_torch: step_ms over that of `torch`. best_over_torch: the same for the best
repetitions. over_best: step_ms over that of PyTorch's fastest side. over_products: over that of one
rank's products, in the same repetition. speedup: one rank's time over this one, likewise. blas: the
library that multiplies, and the processor that it chose its kernels for. in_communication: share of
the step inside barriers or waiting for messages. tflops: operations of the products, 6 B T P + 12 L
B T^2 D (P: elements of the matrices of blocks and head), per second. mfu: tflops over the peak of
the devices of all ranks that computed. The peak of a device is --peak-tflops, else that of the
maker's data sheet for --dtype (bench/kernels/gpu.py; dense, and without TF32). If neither is known,
as on a CPU, the column is missing.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
import statistics
import sys
from argparse import BooleanOptionalAction
from types import SimpleNamespace

import numpy as np
from threadpoolctl import threadpool_limits

from bench import results
from bench.kernels import gpu
from bench.step import blas
from bench.step.cable import SIZES, on_each_cable
from bench.step.sides import (
    CHECK_STEPS,
    PARTS,
    RECIPE,
    WARM_UP_STEPS,
    OurSide,
    Products,
    add_sizes,
    configure,
    losses,
    measure_steps,
    products_of,
    rows_of,
    step_flops,
    torch_side,
)
from mpipar.comm.facts import gather_numbers
from mpipar.config import flags
from mpipar.config.run import SUMS
from mpipar.errors import EXIT_CHECK_FAILED
from mpipar.files.text import counted
from mpipar.job.session import guard
from mpipar.ops import KERNELS, make

SIDES = ("all", "best", "own")
COMPILERS = {"cpu": ("g++",), "cuda": ("gcc", "clang")}  # that torch.compile needs
ALONE, APART = ", one rank", ", apart"
SCHEDULES, MICROBATCHES = ("1f1b", "zb-h1", "zb-v"), 8  # of the pipelines
TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # of losses


def parse(argv):
    """Read the flags: sizes of the model and of the measurement."""
    parser = flags.Parser(prog="python -m bench.step", description=__doc__)
    add_sizes(parser)
    parser.add_argument(
        "--compiled",
        action=BooleanOptionalAction,
        default=None,
        help="compile PyTorch's sides as well (where a compiler is found; "
        "--no-compiled leaves them out)",
    )
    parser.add_argument(
        "--sides",
        choices=SIDES,
        default="all",
        help="best: mpipar with its"
        " default kernels beside PyTorch with its own attention and AdamW, compiled"
        " where it can be; own: the first of the two alone (all)",
    )
    parser.add_argument(
        blas.FLAG,
        action="store_true",
        help="free both BLAS libraries from what"
        " they know of the processor's maker (see bench/step/blas.py)",
    )
    parser.add_argument(
        "--recipe",
        choices=("nanogpt",),
        help="its sizes and its learning rate, on the default text as bytes",
    )
    parser.add_argument(
        "--threads",
        type=flags.count,
        help="threads of PyTorch, and of all ranks together (number of ranks)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype",
        choices=tuple(TOLERANCE),
        default="float32",
        help="of weights and activations (float32); on a CPU 16 bits show numerics,"
        " not speed: NumPy widens and rounds around every function",
    )
    parser.add_argument("--peak-tflops", type=float, help="peak of one rank's device in --dtype")
    parser.add_argument(
        "--cable",
        type=flags.counts,
        metavar="MBIT[,MBIT]",
        help="time mpipar's step on two hosts that a cable of each of these rates"
        " joins, without and with what hides messages (see bench/step/cable.py)",
    )
    parser.add_argument(
        "--all-reduce",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME,NAME",
        help="data and tensor parallelism also with these algorithms of train's --all-reduce",
    )
    parser.add_argument("--json", help="write the result to this file")
    if parser.parse_known_args(argv)[0].recipe:
        parser.set_defaults(**RECIPE)
    args = parser.parse_args(argv)
    others = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(args).items()
        if name not in ("cable", "json", *SIZES) and value != parser.get_default(name)
    ]
    if args.cable and others:
        parser.error(
            "--cable compares ways to send, with gpt2 in float32 on the CPU, one thread "
            f"for each rank; leave out {', '.join(others)}"
        )
    if wrong := [name for name in args.all_reduce if name not in SUMS]:
        parser.error(f"--all-reduce: no {wrong[0]!r}; choose from {', '.join(SUMS)}")
    if args.compiled is None:
        args.compiled = any(map(shutil.which, COMPILERS[args.device]))
    if args.peak_tflops is not None and not 0 < args.peak_tflops < math.inf:
        parser.error("--peak-tflops must be above 0")
    return args


def layouts_of(args, num_ranks: int) -> tuple[dict[str, dict], dict[str, dict]]:
    """Return {what follows a side's name: its grid settings}, and the same for single ranks.

    One rank also takes the microbatches of the pipelines: what these cost, a pipeline costs too.
    """
    if num_ranks == 1:
        return {"": {}}, {}
    alone = {APART: {}, ALONE: {}}
    found = {
        f", {axis} {num_ranks}": {axis: num_ranks}
        for axis, count in (("dp", args.batch_size), ("tp", args.heads))
        if count % num_ranks == 0
    }
    found |= {
        f"{suffix} {name}": layout | {"all_reduce": name}
        for suffix, layout in found.items()
        for name in args.all_reduce
    }
    if args.device == "cpu" and args.layers >= num_ranks:
        piped = {"pp": num_ranks, "num_microbatches": math.gcd(args.batch_size, MICROBATCHES)}
        found |= {f", pp {num_ranks} {name}": piped | {"schedule": name} for name in SCHEDULES}
        if (count := piped["num_microbatches"]) > 1:
            alone[f"{ALONE}, {count} microbatches"] = {"num_microbatches": count}
    return found, alone


def our_sides(args, rows, world, host_rank=0) -> tuple[list[str], dict]:
    """Return (names of our sides, the OurSide of each that this rank runs), per set of kernels.

    One rank alone is world rank 0; apart is every rank. Comm: makes the groups of each.
    """
    names, sides = [], {}
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


def product_sides(args, names, sides, world) -> dict:
    """Return {name: the products of one rank's step}, on world rank 0; on every rank the names.

    sides: ours and PyTorch's.
    """
    if (args.device, args.dtype, args.sides) != ("cpu", "float32", "all"):
        return {}
    found = {"products, numpy": None} | ({"products, torch": None} if "torch" in names else {})
    if world.rank == 0:
        one = next(
            name
            for name in names
            if name.startswith("mpipar numpy") and (world.size == 1 or name.endswith(ALONE))
        )
        taken = products_of(sides[one], CHECK_STEPS + WARM_UP_STEPS + args.repeats + 1)
        found["products, numpy"] = Products(taken)
        if "torch" in names:
            torch = sides["torch"].torch
            found["products, torch"] = Products(taken, torch.matmul, torch.from_numpy)
    return found


def disagreement(found, wanted, dtype) -> str | None:
    """Return the difference between the losses of a few full updates, or None.

    The second loss is right only if every gradient and the update were right.
    """
    for name, ours in found.items():
        for step, (a, b) in enumerate(zip(ours, wanted, strict=True), 1):
            if not abs(a - b) <= TOLERANCE[dtype] * abs(b):
                return f"{name}, step {step}: loss {a!r}, {b!r} in PyTorch"
    return None


def device_facts(args) -> dict:
    """Return facts that the figures of this rank's device depend on, with its peak if known."""
    found = {}
    if args.device == "cuda":
        card = gpu.Gpu(args.repeats)
        found = card.facts()
        if args.dtype in card.roofs:
            found["peak_tflops"] = card.roofs[args.dtype]
    return found | ({"peak_tflops": args.peak_tflops} if args.peak_tflops else {})


def libraries(args, names) -> dict[str, str]:
    """Return {name of a side: the library that its products run in}."""
    if args.device == "cuda":
        return dict.fromkeys(names, "cuBLAS")
    known = {True: "", False: blas.numpy_blas()}
    if any("torch" in name for name in names):
        known[True] = blas.torch_blas(args.freed)
    return {name: known["torch" in name] for name in names}


def paired(before, after) -> float:
    """Return the median of how many times as long `before` took, by repetition."""
    return statistics.median(float(a / b) for a, b in zip(before, after, strict=True))


def rows(args, names, seconds, peak_tflops=None, flops=None) -> list[dict]:
    """Return the result as rows; seconds: all ranks' (ranks, names, repetitions, three).

    flops: name -> those of a side that only multiplies.
    """
    steps_at_once = [len(seconds) if name.endswith(APART) else 1 for name in names]
    seconds = seconds / np.reshape(steps_at_once, (-1, 1, 1))
    libs, parts = libraries(args, names), seconds.max(axis=0)
    steps = dict(zip(names, seconds[..., :2].sum(axis=-1).max(axis=0), strict=True))
    theirs = steps.get("torch")
    fastest = min(
        (statistics.median(one) for name, one in steps.items() if name.startswith("torch")),
        default=None,
    )
    found = []
    for number, name in enumerate(names):
        step_s = statistics.median(steps[name])
        tflops = (flops or {}).get(name, step_flops(args)) / step_s * 1e-12
        # A rank without a part in this side has measured nothing.
        busy = seconds[:, number, :, :2].sum(axis=-1)
        found.append(
            {
                "side": name,
                "blas": libs[name],
                **{
                    f"{part}_ms": statistics.median(parts[number, :, i]) * 1e3
                    for i, part in enumerate(PARTS)
                },
                "step_ms": step_s * 1e3,
                **(
                    {}
                    if theirs is None
                    else {
                        "over_torch": step_s / statistics.median(theirs),
                        "best_over_torch": min(steps[name]) / min(theirs),
                    }
                ),
                **({} if fastest is None else {"over_best": step_s / fastest}),
                **compared(name, steps),
                "in_communication": float(seconds[:, number, :, 2].sum() / busy.sum()),
                "tokens_per_s": args.batch_size * args.seq_len / step_s,
                "tflops": tflops,
                **(
                    {}
                    if peak_tflops is None
                    else {"mfu": tflops / (peak_tflops * np.count_nonzero(busy.any(axis=-1)))}
                ),
            }
        )
    return found


def compared(name, steps) -> dict:
    """Return columns that compare a side of ours with one rank's products, and with one rank."""
    found, ours = {}, name.startswith("mpipar ")
    alone = {one.removesuffix(ALONE): one for one in steps if one.endswith(ALONE)}
    if "products, numpy" in steps:
        one_rank = ours and (not alone or name in alone.values())
        found["over_products"] = paired(steps[name], steps["products, numpy"]) if one_rank else "-"
    if alone:
        found["speedup"] = paired(steps[alone[name.split(",")[0]]], steps[name]) if ours else "-"
    return found


def their_sides(args, rows, world) -> tuple[list[str], dict]:
    """Return (names of PyTorch's sides, those that this rank runs: all on world rank 0).

    There are none if PyTorch is not installed.
    """
    if args.sides == "own" or importlib.util.find_spec("torch") is None:
        return [], {}
    if args.freed and not blas.free_mkl() and world.rank == 0:
        print("no C compiler: MKL keeps its own choice", file=sys.stderr)
    import torch

    torch.set_num_threads(args.threads)
    attention, update = {"fused": True}, {"fused_update": True}
    kinds = {
        "torch": {},
        "torch fused attention": attention,
        "torch fused attention, AdamW": attention | update,
    }
    if args.compiled:
        compiled = update | {"compiled": True}
        kinds |= {
            "torch compiled": compiled,
            "torch fused attention, compiled": attention | compiled,
        }
    names = [*kinds] if args.sides == "all" else [*kinds][-1:]
    return names, {
        name: torch_side(torch, args, rows, **kinds[name]) for name in names if world.rank == 0
    }


def compare_sides(args, world, host_rank) -> int:
    """Check, measure, print; return the exit code. Comm: that of `measure_steps`, and some sums."""
    batches = rows_of(args)
    ours, sides = our_sides(args, batches, world, host_rank)
    theirs, more = their_sides(args, batches, world)
    sides |= more
    names = ours + theirs
    found = losses(sides, names, world)
    problem = (
        disagreement({name: found[name] for name in sides}, found[theirs[0]], args.dtype)
        if theirs and world.rank == 0
        else None
    )
    wrong = np.array([problem is not None], np.int64)
    world.Allreduce(wrong.copy(), wrong)
    if wrong[0]:
        if problem:
            print(f"not timed, the models differ: {problem}", file=sys.stderr)
        return EXIT_CHECK_FAILED
    alone = product_sides(args, names, sides, world)
    names += alone
    sides |= alone if world.rank == 0 else {}
    seconds = gather_numbers(world, measure_steps(sides, names, args.repeats, world))
    if seconds is not None:
        facts, flops = device_facts(args), {name: one.flops for name, one in alone.items()}
        print_sides(
            args, rows(args, names, seconds, facts.get("peak_tflops"), flops), world.size, facts
        )
    return 0


def print_sides(args, found, num_ranks, facts):
    """Print the table and write the file."""
    heads = counted(args.heads, "head") + (f" ({args.kv_heads} kv)" if args.kv_heads else "")
    print(
        f"{args.arch}, {counted(args.layers, 'layer')}, D {args.d_model}, {heads}, batch"
        f" {args.batch_size} x {args.seq_len} tokens, V {args.vocab_size}, {args.dtype},"
        f" {counted(num_ranks, 'rank')}, {counted(args.threads, 'thread')},"
        f" {counted(args.repeats, 'step')}, "
        + (
            f"losses equal to {TOLERANCE[args.dtype]:.1g}"
            if "over_best" in found[0]
            else "without PyTorch"
        )
    )
    print(results.markdown_table(found))
    sizes = {key: value for key, value in vars(args).items() if key not in ("json", "peak_tflops")}
    results.write(
        args.json,
        "bench.step",
        found,
        ranks=num_ranks,
        **results.versions("torch", "numba") | sizes | facts,
    )


def main(argv, session) -> int:
    """Measure on all ranks; return the exit code."""
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
