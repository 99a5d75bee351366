"""Writes a data sheet of this machine, as `mpipar plan` and `explain --machine` read it.

    python -m bench.calibrate --out here.toml                # a core or a GPU
    mpiexec -n 4 python -m bench.calibrate --out here.toml   # and the links between the ranks

Measured are matmuls, attention and a memory copy on one rank while the others do the same, each the
best of some rounds, because a sheet describes the undisturbed machine; and all-reduces inside each
host and between hosts, as `mpipar net --sheet` measures them. Memory and peak rates cannot be
measured: they are those of this host, and of the fastest matmul.
"""

from __future__ import annotations

import math
import os
import timeit
from pathlib import Path

import numpy as np

from bench import results
from bench.program import Outcome, Program
from mpipar import ops as ops_module
from mpipar.interconnect import files, job
from mpipar.interconnect.arguments import Arguments
from mpipar.study.plan.machine import GENERATIONS

SIDES = (64, 128, 256, 512, 1024, 2048)  # of square matmuls
TOKENS, HEADS, WIDTH = 512, 4, 64  # of attention
COPY_BYTES, ROUNDS = 1 << 26, 7
SUMS = (8, 1 << 24)  # bytes of all-reduces
GUESS = ((1, 1.0, 10.0), (0, 0.25, 40.0))  # joins, GB/s, us of links that were not measured


def add_flags(parser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--out", default="machine.toml", help="the data sheet (machine.toml)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(cpu)")
    parser.add_argument("--dtype", default="float32", help="number format of the matmuls (float32)")


def best(call, ops) -> float:
    """Return the seconds of the fastest of some calls, each followed by a drain of the device."""

    def drained() -> None:
        call()
        ops.synchronize()

    return min(timeit.repeat(drained, number=1, repeat=ROUNDS + 1)[1:])


def matmuls(ops) -> dict[str, float]:
    """Return start, rate and bytes per second of a matmul, and the fastest rate that was seen.

    The three are fitted by least squares to the relative errors of square matmuls.
    """
    rows, seconds = [], []
    for side in SIDES:
        a, b = (ops.zeros((side, side), label="scratch") for _ in range(2))
        seconds.append(best(lambda a=a, b=b: ops.matmul(a, b), ops))
        rows.append((1.0, 2.0 * side**3, 3.0 * side**2 * a.dtype.itemsize))
    scale = np.array(seconds)[:, None]
    start, flop, byte = np.linalg.lstsq(np.array(rows) / scale, np.ones(len(rows)), rcond=None)[0]
    fastest = max(row[1] / one for row, one in zip(rows, seconds, strict=True))
    rate = 1 / flop if flop > 0 else fastest
    return {
        "product_us": 1e6 * max(start, min(seconds) / 10),
        "product_tflops": min(rate, 1.2 * fastest) / 1e12,
        "product_gbytes_s": 1e-9 / byte if byte > 0 else 1e3,
        "ceiling_tflops": fastest / 1e12,
    }


def attention_tflops(ops) -> float:
    """Return the rate of causal attention forward: half of its square counts."""
    q, k, v = (ops.zeros((1, TOKENS, HEADS, WIDTH), label="scratch") for _ in range(3))
    places = ops.asarray(np.arange(TOKENS, dtype=np.int64))
    seconds = best(lambda: ops.attention_forward(q, k, v, places, places), ops)
    return 2 * TOKENS * TOKENS * HEADS * WIDTH / seconds / 1e12


def copy_gbytes(ops) -> float:
    """Return the bytes that memory moves in a second: a copy reads and writes."""
    source, target = (ops.zeros((COPY_BYTES // 8, 2), label="scratch") for _ in range(2))
    seconds = best(lambda: ops.copy(target, source), ops)
    return 2 * source.nbytes / seconds * 1e-9


def sums(args, session) -> list[files.Row]:
    """Return the rows of all-reduces inside each host and between hosts. Comm: these."""
    if session.world is None or session.world.size == 1:
        return []
    transport = "staged" if args.device == "cuda" else "mpi-host"
    words = Arguments(("all-reduce",), via="comm", transport=transport, sheet=args.out)
    bench = job.Bench(session, words)
    sections = [one for one in bench.sections if one.axis in ("host", "hosts")]
    return [row for one in sections for row in bench.run(one, SUMS, math.inf)]


def measure(args, session) -> Outcome | int:
    """Measure, and write the sheet."""
    ops = ops_module.make(args.device, args.dtype)
    figures = matmuls(ops) | {
        "attention_tflops": attention_tflops(ops),
        "hbm_gbytes_s": copy_gbytes(ops),
    }
    links = sums(args, session)
    if session.launcher.rank:
        return 0
    Path(args.out).write_text(sheet(args, figures, links, len(session.host_ranks or [0])))
    rows = [{"figure": name, "value": value} for name, value in figures.items()]
    return Outcome(rows, end=f"{args.out}: a data sheet; mpipar plan MODEL --machine {args.out}")


def sheet(args, figures: dict[str, float], links: list[files.Row], here: int) -> str:
    """Return the TOML text. here: ranks on this host."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / here / 2**30
    peak = figures["ceiling_tflops"] / 0.9
    lines = [
        f"# {results.machine()['cpu']}, measured by bench.calibrate with {args.dtype}.",
        f'basis = "measured, {here} ranks on a host"',
        f"memory_gib = {gib:.3g}",
        *(f"{name} = {value:.4g}" for name, value in figures.items()),
        f'efficiency = "{GENERATIONS[0]}"',
        f'device = "{args.device}"',
        "fused_attention = true",
        "peak_tflops = {"
        + ", ".join(f"{name} = {peak:.4g}" for name in ("bfloat16", "float16", "float32"))
        + f", float64 = {peak / 2:.4g}}}\n",
    ]
    text = "\n".join(lines)
    return (
        files.sheet(text, links)
        if links
        else text + "".join(files.LINKS.format(*one) for one in GUESS)
    )


main = Program("calibrate", __doc__, measure, together=True, add=add_flags).started(__name__)
