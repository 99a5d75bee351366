"""Times one product and its two gradients, cut over ranks in every way; bytes and memory too.

    mpiexec -n 4 python -m bench.matmul [--tokens 1024 --inner 1024 --outer 1024] [--json FILE]

A row is one cut of y (T, N) = x (T, K) w (K, N). It times forward, input gradient and weight
gradient: the median over the repetitions of the slowest rank. Before anything is timed, the results
are compared with the product of one rank.

Columns: sent_MiB: bytes that one rank sends by the stated algorithms. blocks_MiB: its blocks of x,
w, y and their gradients. beside_MiB: the most that the cut needs in addition to the blocks.
in_communication: share of the time inside barriers or waiting for messages. hidden: share of the
time from posting a message to its arrival in which the rank computed instead of waiting.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from bench.matmul.cut_product import PHASES, CutProduct, Sizes, cases, connect, shown, whole
from bench.program import Outcome, Program
from mpipar import ops as ops_module
from mpipar.comm.objects import gather_objects
from mpipar.comm.record import POINT_TO_POINT, Recorder, Sums
from mpipar.errors import EXIT_CHECK_FAILED
from mpipar.study.measured_step import flight_ns

TOLERANCE = {"float32": 1e-4, "float64": 1e-12}  # of the largest entry
MIB = 2**20


def memory(case, sizes, dtype, world_rank) -> tuple[int, int]:
    """Return the bytes of the blocks, and the most bytes besides, from the shapes-only run.

    tests/equal/layers/test_cuts.py proves both equal to the measured bytes.
    """
    recorder = Recorder()
    ops = ops_module.make("shapes", dtype, recorder)
    comms, mesh = connect(*case, world_rank, ops, recorder)
    product = CutProduct(ops, recorder, case[0], comms, mesh, sizes)
    product.take(whole(sizes, dtype))
    held, worst = sum(ops.live.values()), 0
    for phase, result in zip(PHASES, ("y", "dx", None), strict=True):
        before = sum(ops.live.values())
        ops.reset_peak()
        product.run(phase)
        own = getattr(product, result).nbytes if result else 0
        worst = max(worst, sum(ops.peak.values()) - before - own)
        held += own
    return held, worst


def measure_product(case, sizes, dtype, repeats, world, full) -> dict:
    """Return this rank's figures of a cut. Comm: the cut's, and a barrier per repetition."""
    ops, recorder = ops_module.make("cpu", dtype), Recorder(1 << 16)
    comms, mesh = connect(*case, world.rank, ops, recorder, mpi_world=world)
    product = CutProduct(ops, recorder, case[0], comms, mesh, sizes)
    product.take(full)
    for phase in PHASES:
        product.run(phase)
    wrong = [
        f"{name} is off by {error:.1e}"
        for name, error in product.errors(full).items()
        if not error <= TOLERANCE[dtype]
    ]
    seconds, inside = [], []
    recorder.clear()
    for _ in range(repeats):
        comms.world.barrier("start")
        before, start = recorder.comm_ns(), time.perf_counter()
        for phase in PHASES:
            product.run(phase)
        seconds.append(time.perf_counter() - start)
        inside.append((recorder.comm_ns() - before) * 1e-9)
    totals = recorder.totals("phase")
    sent = sum(totals.get((phase,), Sums()).wire_bytes for phase in PHASES) // repeats
    flight, hidden = flight_ns(recorder, "tp", POINT_TO_POINT)
    comms.close()
    held, beside = memory(case, sizes, dtype, world.rank)
    return {
        "wrong": wrong,
        "seconds": seconds,
        "inside": inside,
        "sent": sent,
        "hidden": hidden / flight if flight else None,
        "held": held,
        "beside": beside,
    }


def row(case, num_ranks, facts) -> dict:
    """Return one line of the table, made from all ranks' figures."""
    slowest = [max(times) for times in zip(*(fact["seconds"] for fact in facts), strict=True)]
    shares = [
        inside / seconds
        for fact in facts
        for inside, seconds in zip(fact["inside"], fact["seconds"], strict=True)
    ]
    hidden = [fact["hidden"] for fact in facts if fact["hidden"] is not None]
    return {
        "cut": case[0],
        "ranks": num_ranks,
        "grid": shown(*case),
        "median_ms": statistics.median(slowest) * 1e3,
        "best_ms": min(slowest) * 1e3,
        "sent_MiB": max(fact["sent"] for fact in facts) / MIB,
        "blocks_MiB": max(fact["held"] for fact in facts) / MIB,
        "beside_MiB": max(fact["beside"] for fact in facts) / MIB,
        "in_communication": statistics.mean(shares),
        "hidden": statistics.mean(hidden) if hidden else "-",
    }


def measure(args, session) -> Outcome | int:
    """Measure every cut that these ranks allow; code 1 if one computes something else."""
    world, sizes = session.world, Sizes(1, args.tokens, args.inner, args.outer)
    rows, full = [], whole(sizes, args.dtype)
    for case in cases(world.size):
        fact = measure_product(case, sizes, args.dtype, args.repeats, world, full)
        facts = gather_objects(world, fact)
        wrong = np.array([len(fact["wrong"])])
        world.Allreduce(wrong.copy(), wrong)
        if wrong[0]:
            for number, one in enumerate(facts or []):
                for text in one["wrong"]:
                    print(f"{case[0]} on grid {shown(*case)}, rank {number}: {text}")
            return EXIT_CHECK_FAILED
        if facts is not None:
            rows.append(row(case, world.size, facts))
    return 0 if world.rank else Outcome(rows, sizes._asdict() | {"dtype": args.dtype})


main = Program(
    "matmul",
    __doc__,
    measure,
    together=True,
    counts={
        "--tokens": (1024, "rows T of x"),
        "--inner": (1024, "columns K of x"),
        "--outer": (1024, "columns N of w"),
        "--repeats": (7, "repetitions"),
    },
    add=lambda parser: parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32"),
).started(__name__)
