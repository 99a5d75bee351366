"""The tables of bench.claims that come from real training steps.

With experts, only barriers between the ranks of an expert group are counted, on four ranks of dp.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.claims.computed import configure, layout_name
from bench.training import Trained
from mpipar.comm.objects import broadcast_text, gather_objects
from mpipar.comm.record import COMPUTE, Recorder
from mpipar.config.run import traced_steps
from mpipar.run.trace import trace_file
from mpipar.run.trace.tracer import Tracer
from mpipar.study.explain.predict import predict
from mpipar.study.trace import segments
from mpipar.study.trace.analysis import Analysis

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
