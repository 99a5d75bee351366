"""Textbook claims about partitioned training, one table each, on one model.

    python -m bench.claims barriers [--json FILE]         # barriers and bytes of a step, by layout
    python -m bench.claims memory [--json FILE]           # bytes per rank against dp, pp and tp
    python -m bench.claims scaling [--json FILE]          # FLOPs and bytes of a rank against tp
    mpiexec -n 4 python -m bench.claims hybrids [--json FILE]   # how four workers spend their time
    mpiexec -n 4 python -m bench.claims sharing [--json FILE]   # recomputation, ZeRO: their price
    mpiexec -n 4 python -m bench.claims moe [--json FILE]       # experts by ep

Barriers and memory come from the shapes-only run, which tests prove equal to the records of real
runs. Hybrids, moe, and the times of sharing are real training steps.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from bench.program import Outcome, Program
from bench.training import Trained
from mpipar.comm.grid import PIECES_PER_RANK
from mpipar.comm.objects import broadcast_text, gather_objects
from mpipar.comm.record import COMPUTE, POINT_TO_POINT, Sums
from mpipar.comm.recorder import Recorder
from mpipar.config.resolve import resolve
from mpipar.config.run import traced_steps
from mpipar.config.sections import build
from mpipar.ops.shape_ops import MEMORY_LABELS
from mpipar.run.trace import trace_file
from mpipar.run.trace.tracer import Tracer
from mpipar.study.explain.formulas import units_of
from mpipar.study.explain.layer_costs import value
from mpipar.study.explain.predict import fullest, predict
from mpipar.study.trace import segments
from mpipar.study.trace.analysis import Analysis

LAYOUTS = [
    {"tp": 1},
    {"tp": 2},
    {"tp": 4},
    {"tp": 8},
    {"pp": 2},
    {"pp": 4},
    {"pp": 8},
    {"dp": 2},
    {"dp": 4},
    {"dp": 8},
    {"dp": 2, "pp": 2, "tp": 2},
]


def table_cases() -> list[tuple]:
    """Return (layout, suffix of its name, other settings) of each row of a table."""
    again = [
        ({axis: size}, f" (recompute {what})", {"recompute": what})
        for axis, size in (("tp", 1), ("tp", 4), ("pp", 4))
        for what in ("attention", "block")
    ]
    return (
        [(layout, "", {}) for layout in LAYOUTS]
        + [
            ({"tp": size}, " (sequence-parallel)", {"sequence_parallel": True})
            for size in (2, 4, 8)
        ]
        + [
            ({"cp": size}, f" ({method})", {"cp_attention": method})
            for size in (2, 4)
            for method in PIECES_PER_RANK
        ]
        + again
    )


def barriers() -> list[dict]:
    """Return barriers (collectives) and messages per step and rank, and bytes sent, by layout."""
    rows = []
    cases = table_cases()
    cases += [({"tp": size}, " (ffn-cut gather)", {"ffn_cut": "gather"}) for size in (2, 4, 8)]
    for layout, variant, settings in cases:
        config = configure(layout, **settings)
        busiest = {"collectives": 0, "messages": 0, "sent": 0, "payload": 0}
        for rank in range(prod(layout.values())):
            totals = predict(config, rank).recorder.totals("operation")
            own = {
                "collectives": sum(
                    counter.calls
                    for (operation,), counter in totals.items()
                    if operation not in POINT_TO_POINT
                ),
                "messages": totals.get(("send",), Sums()).calls,
                "sent": sum(counter.wire_bytes for counter in totals.values()),
                "payload": sum(
                    counter.payload_bytes
                    for (operation,), counter in totals.items()
                    if operation != "recv"
                ),
            }
            busiest = {key: max(busiest[key], own[key]) for key in busiest}
        rows.append(
            {
                "layout": layout_name(layout) + variant,
                "collectives_per_step": busiest["collectives"],
                "messages_sent_per_step": busiest["messages"],
                "payload_MiB": busiest["payload"] / 2**20,
                "sent_MiB": busiest["sent"] / 2**20,
            }
        )
    return rows


def memory() -> list[dict]:
    """Return predicted peak bytes of the fullest rank, by purpose."""
    rows = []
    for layout, variant, settings in table_cases():
        config = configure(layout, **settings)
        most = fullest(config)
        rows.append(
            {"layout": layout_name(layout) + variant}
            | {
                f"{label}_MiB": most.peak_bytes.get(label, 0) / 2**20
                for label in (*MEMORY_LABELS, "scratch")
            }
            | {"peak_MiB": most.peak_total / 2**20}
        )
    return rows


SIZES = (1, 2, 4, 8)
PASSES = 3  # forward, input gradient and weight gradient take the FLOPs of a forward each


def scaling() -> list[dict]:
    """Return what tensor parallelism divides by its ranks, and what not, as a block declares.

    FLOPs, memory, barriers and bytes are of one rank and microbatch, both passes, against tp.
    times_ranks: the FLOPs of all ranks, as a multiple of those of one rank alone. flop_per_byte:
    what a rank computes for each byte that it sends.
    """
    rows, alone = [], 0
    for size in SIZES:
        units, letters = units_of(configure({"tp": size}))
        cost = units.block
        flops = PASSES * value(cost.flops, letters)
        alone = alone or flops
        barriers = [one for one in cost.barriers if one.axis == "tp" and size > 1]
        sent = sum(one.sent(letters, size) for one in barriers)
        rows.append(
            {
                "part": "one block",
                "tp": size,
                "MFLOP": flops / 1e6,
                "times_ranks": size * flops / alone,
                "weights_KiB": value(cost.weights, letters) * letters["e"] / 1024,
                "stash_KiB": value(cost.stash, letters) / 1024,
                "barriers": sum(one.calls(size) for one in barriers),
                "sent_KiB": sent / 1024,
                "flop_per_byte": flops / sent if sent else "-",
            }
        )
    return rows


MODEL = {"layers": 8, "d_model": 256, "heads": 8, "seq_len": 128}


def configure(layout: dict, num_microbatches: int = 8, schedule: str = "1f1b", **settings):
    """Return the claims' model in a layout, 16 rows per step, with some other settings."""
    values = {"dp": 1, "pp": 1, "tp": 1, "batch_size": 16} | MODEL | layout | settings
    values |= {"num_microbatches": num_microbatches // values["dp"], "schedule": schedule}
    return resolve(build(values), prod(layout.values()))[0]


def layout_name(layout: dict) -> str:
    """Return the axes with their sizes, as in "pp 2 x dp 2"."""
    return " x ".join(f"{axis} {size}" for axis, size in layout.items())


STEPS = 6  # of each run; the first is not counted
Table = Callable[[Any], list[dict] | None]


def median_step(config, world, folder: str) -> float:
    """Train STEPS steps, traced into `folder` if configured; return this rank's median seconds.

    The first step is not counted. Comm: everything of those steps and of their trace.
    """
    trained, seconds = Trained(config, world, Recorder(1 << 16)), []
    traced = traced_steps(config.run.trace or "none", 1, STEPS)
    tracer = Tracer(trained.worker, world, Path(folder), traced)
    for step in range(1, STEPS + 1):
        with tracer.step(step):
            seconds.append(trained.step(step).step_seconds)
    trained.worker.close()
    return statistics.median(seconds[1:])


def from_steps(
    cases: Iterable[tuple], configured: Callable, row: Callable, traced: bool = False
) -> Table:
    """Return the function of a table: a row for each case, on world rank 0, None elsewhere.

    configured(*case): its config. row(config, case, seconds, analysis): its row. seconds: of a step
    of the slowest rank. analysis: of the trace; None if not traced. Comm: everything of a few
    training steps per row.
    """

    def table(world: Any) -> list[dict] | None:
        rows = []
        for case in cases:
            config, found = configured(*case), None
            if traced:
                config = replace(config, run=replace(config.run, trace=f"2:{STEPS}"))
            with tempfile.TemporaryDirectory() as own:
                folder = broadcast_text(world, own)
                # After it every rank has written its file.
                seconds = gather_objects(world, median_step(config, world, folder))
                if seconds and traced:
                    found = Analysis(trace_file.read(folder))
            if seconds:
                rows.append(row(config, case, max(seconds), found))
        return rows if world.rank == 0 else None

    return table


def time_shares(analysis) -> dict[str, float]:
    """Return useful, waiting, transfer and idle of an analysed trace, which add up to 1."""
    sums = sum(map(segments.by_kind, analysis.segments), Counter())
    shares = {
        "useful": sum(sums[kind] for kind in COMPUTE),
        "waiting": sums["wait"],
        "transfer": sums["transfer"],
        "idle": sums["other"],
    }
    return {name: length / sums.total() for name, length in shares.items()}


HYBRIDS = [
    ({"pp": 4}, 8, "naive"),
    ({"pp": 4}, 8, "gpipe"),
    ({"pp": 4}, 8, "1f1b"),
    ({"pp": 4}, 8, "zb-h1"),
    ({"pp": 2, "dp": 2}, 8, "1f1b"),
    ({"pp": 2, "tp": 2}, 8, "1f1b"),
    ({"dp": 4}, 8, "1f1b"),
    ({"tp": 4}, 8, "1f1b"),
]


def hybrid_row(config, case, seconds: float, analysis) -> dict:
    """Return how four workers spend their time, and tokens/s.

    useful: compute spans less the communication inside them. waiting: blocked until the last rank
    arrived. transfer: blocked from there to the end. idle: the rest. All are shares of all ranks'
    time.
    """
    layout, _, schedule = case
    return {
        "layout": layout_name(layout),
        "schedule": schedule if "pp" in layout else "-",
        **time_shares(analysis),
        "step_ms": seconds * 1e3,
        "tokens_per_s": config.train.batch_size * config.model.seq_len / seconds,
    }


SHARING = [
    ({"dp": 4}, {}),
    ({"dp": 4}, {"recompute": "block"}),
    ({"dp": 4}, {"zero": 1}),
    ({"dp": 4}, {"zero": 3}),
    ({"dp": 4}, {"zero": 3, "reshard_after_forward": "no"}),
    ({"cp": 4}, {}),
    ({"cp": 4}, {"zero": 3, "recompute": "block"}),
]


def sharing_row(config, case, seconds: float, analysis) -> dict:
    """Return what one of four ranks keeps, by what it recomputes and shards, and the price.

    Bytes, barriers and messages are predicted, of one step and rank. step_ms is measured.
    """
    layout, settings = case
    found = predict(config, 0)
    bytes_of = {
        f"{label}_MiB": found.peak_bytes.get(label, 0) / 2**20
        for label in ("weights", "gradients", "optimizer", "stash")
    }
    words = [f"{name.replace('_', '-')} {value}" for name, value in settings.items()]
    return {
        "layout": layout_name(layout),
        "with": ", ".join(words) or "-",
        **bytes_of,
        "peak_MiB": found.peak_total / 2**20,
        "barriers": len(found.recorder.records),
        "sent_MiB": sum(one.wire_bytes for one in found.recorder.records) / 2**20,
        "step_ms": seconds * 1e3,
    }


EXPERTS = {
    "layers": 4,
    "d_model": 128,
    "heads": 4,
    "seq_len": 128,
    "experts": 8,
    "experts_per_token": 2,
    "expert_ffn": 512,
}
EXPERT_CASES = [(1,), (2,), (4,)]  # ep


def expert_row(config, case, seconds: float, analysis) -> dict:
    """Return barriers, bytes, time and imbalance of experts on several ranks."""
    (ep,) = case
    return {
        "ep": ep,
        **exchanged(config, analysis.trace),
        "waiting": time_shares(analysis)["waiting"],
        "step_ms": seconds * 1e3,
    }


def exchanged(config, trace) -> dict[str, float]:
    """Return a rank's expert barriers per step, what the busiest one sends, and the imbalance.

    busiest_rank: rows that its experts get, over the mean. These are what the rank's own tokens
    choose, less what it sends to others, and what it gets from them and sends back.
    """
    model, chosen = config.model, config.train.batch_size // config.grid.dp * config.model.seq_len
    chosen *= model.experts_per_token * model.d_model * 4 * model.layers * trace.num_steps  # bytes
    barriers, sent, gets = 0.0, [0.0], [0]
    for rank in trace.ranks:
        own = [one for one in rank.records if one.axis == "expert"]
        barriers = len(own) / trace.num_steps
        sent.append(sum(one.wire_bytes for one in own) / trace.num_steps)
        moved = Counter()
        for one in own:
            moved[one.phase, one.name.rpartition(".")[2]] += one.payload_bytes
        gets.append(moved["F", "combine"] - moved["F", "dispatch"])
    return {
        "barriers": barriers,
        "sent_MiB": max(sent) / 2**20,
        "busiest_rank": 1 + max(gets) / chosen,
    }


TABLES: dict[str, Table] = {
    "hybrids": from_steps(HYBRIDS, configure, hybrid_row, traced=True),
    "sharing": from_steps(
        SHARING, lambda layout, settings: configure(layout, **settings), sharing_row
    ),
    "moe": from_steps(
        EXPERT_CASES, lambda ep: configure({"dp": 4}, ep=ep, **EXPERTS), expert_row, traced=True
    ),
}


COMPUTED = {
    "barriers": barriers,
    "memory": memory,
    "scaling": scaling,
}


def make_table(args, session) -> Outcome | int:
    """Measure or compute the table that the first word names."""
    if args.table in COMPUTED:
        rows = COMPUTED[args.table]()
    elif (rows := TABLES[args.table](session.world)) is None:
        return 0
    facts = {"rows_per_step": 16, "microbatches": 8, **MODEL}
    return Outcome(rows, EXPERTS if args.table == "moe" else facts, variant=args.table)


main = Program(
    "claims",
    __doc__,
    make_table,
    together=lambda args: args.table in TABLES,
    add=lambda parser: parser.add_argument("table", choices=(*COMPUTED, *TABLES)),
).started(__name__)
