"""Experts on several ranks: barriers, bytes, time and imbalance, by ep, dispatch and routing.

Everything comes from the traces of real steps on four ranks of dp. Of barriers only those between
the ranks of an expert group count.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from typing import Any

from bench.claims.layouts import configure
from bench.claims.steps import STEPS, median_step, time_shares
from mpipar.comm.facts import broadcast_text, gather_facts
from mpipar.data.source import load_source
from mpipar.partition.experts import DISPATCHES
from mpipar.trace import trace_file
from mpipar.trace.analysis import analyse

MODEL = {"layers": 4, "d_model": 128, "heads": 4, "seq_len": 128, "experts": 8,
         "experts_per_token": 2, "expert_ffn": 512}
ROUTINGS = ("uniform", "learned", "zipf", "one-hot")
CASES = [(ep, dispatch, routing) for routing in ROUTINGS for ep in (1, 2, 4)
         for dispatch in DISPATCHES if ep > 1 or dispatch == "all-to-all"]


def experts(world: Any) -> list[dict] | None:
    """A row for each ep, dispatch and routing; on world rank 0, None elsewhere.

    Comm: everything of a few training steps per row.
    """
    rows, tokens = [], load_source((), 256).tokens
    for ep, dispatch, routing in CASES:
        config = configured(ep, dispatch, routing)
        config = replace(config, run=replace(config.run, trace=f"2:{STEPS}"))
        with tempfile.TemporaryDirectory() as own:
            folder = broadcast_text(world, own)
            seconds = gather_facts(world, median_step(config, tokens, world, folder))
            if seconds is not None:
                found = analyse(trace_file.read(folder))
                rows.append({"ep": ep, "dispatch": dispatch if ep > 1 else "-", "routing": routing,
                             **exchanged(found.trace), "waiting": time_shares(found)["waiting"],
                             "step_ms": max(seconds) * 1e3})
    return rows if world.rank == 0 else None


def configured(ep: int, dispatch: str, routing: str) -> Any:
    """The resolved configuration of a row, without a trace."""
    return configure({"dp": 4}, **MODEL | {
        "ep": ep, "expert_dispatch": dispatch, "routing": routing})


def exchanged(trace) -> dict[str, float]:
    """Barriers of experts per step of a rank, what the busiest rank sends, and the imbalance.

    busiest_expert, busiest_rank: rows that they get, times the mean.
    """
    calls, sent, ranks, loads = 0, [0], Counter(), Counter()
    for rank in trace.ranks:
        own = [one for one in rank.records if one.axis == "expert"]
        calls = len(own) / trace.num_steps
        sent.append(sum(one.wire_bytes for one in own) / trace.num_steps)
        for load in rank.loads:
            ranks[rank.world_rank] += sum(load.rows)
            for expert, count in enumerate(load.rows, load.first):
                loads[load.layer, expert] += count

    def over_mean(counts):
        return max(counts.values()) * len(counts) / counts.total()

    return {"barriers": calls, "sent_MiB": max(sent) / 2**20,
            "busiest_expert": over_mean(loads), "busiest_rank": over_mean(ranks)}
