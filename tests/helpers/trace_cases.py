"""Small handmade traces: each rank's work is written down, so the results are known."""

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from random import Random

import planted_delays
from planted_delays import MS, record

from mpipar.comm.record import Span
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.run.trace import trace_file
from mpipar.run.trace.clock import CommonClock
from mpipar.run.trace.trace_file import LayerOperation, Trace, common_facts, schedule_json
from mpipar.run.trace.trace_file import RankTrace as Rank
from mpipar.study.schedules.simulate import Costs, simulate
from mpipar.study.trace import segments, waits


def blocking(operation, name, axis, start, done, **other):
    """A record of an operation that blocks from where it is posted."""
    return record(operation, name, axis, start, start, done, **other)


def span(kind, start, end, stage=0, mb=0, step=1):
    """A compute span with times in milliseconds."""
    return Span(kind, round(start * MS), round(end * MS), step, stage, mb)


def trace(records, spans=None, end=100, groups=None, steps=1):
    """A Trace of one step from 0 to `end` ms; records, spans: one list per rank."""
    count = len(records)
    everybody = tuple(range(count))
    groups = groups or [{"tp": everybody, "pp": everybody, "world": everybody}] * count
    ranks = [
        Rank("drawn", i, f"host{i}", {"pp": 0, "dp": 0, "cp": 0, "tp": i}, (0,), groups[i],
             [(step + 1, round(end * MS * step / steps), round(end * MS * (step + 1) / steps))
              for step in range(steps)],
             list(records[i]), list(spans[i]) if spans else [])
        for i in range(count)
    ]  # fmt: skip
    meta = common_facts(
        make_schedule("gpipe", 1, 1),
        (2,),
        {"pp": 1, "dp": 1, "cp": 1, "tp": count},
        "embedding",
        recording="drawn",
        rank_order=["pp", "dp", "cp", "tp"],
        batch_size=4,
        dtype="float32",
        model={"layers": 2, "d_model": 8, "heads": 2, "ffn": 32, "seq_len": 4, "vocab_size": 16},
    )
    return Trace(Path("run"), meta, ranks, CommonClock((0,) * count, {}, {}), [])


def waits_and_segments(case):
    """Who waited for whom in a trace, and its ranks' time without gaps."""
    found = waits.find(case)
    return found, segments.of_trace(case, found)


def busy_trace(ranks=8, barriers=320, seed=0):
    """A trace of many slices: ranks compute and meet again and again, never at the same time."""
    random = Random(seed)
    clock, records, spans = [0.0] * ranks, [[] for _ in range(ranks)], [[] for _ in range(ranks)]
    for number in range(barriers):
        arrivals = [now + random.uniform(0.1, 0.5) for now in clock]
        for rank in range(ranks):
            axis = ("tp", "world")[number % 2]
            spans[rank].append(span("FB"[number % 2], clock[rank], arrivals[rank], mb=number % 4))
            clock[rank] = max(arrivals) + random.uniform(0.01, 0.05)
            records[rank].append(
                blocking(
                    "all_reduce",
                    f"block{number % 5}.ffn.down",
                    axis,
                    arrivals[rank],
                    clock[rank],
                    payload_bytes=4096 * (number % 5 + 1),
                    mb=number % 4,
                )
            )
    made = trace(records, spans, end=max(clock) + 1)
    made.metrics.extend(
        {"step": step, "loss": 5 / step, "step_seconds": 0.1} for step in range(1, 20)
    )
    return made


def with_operations(made):
    """The trace, each of its passes filled by three operations of one length."""
    for rank in made.ranks:
        found = []
        for one in rank.spans:
            if one.kind not in ("F", "B", "I", "W"):
                continue
            third = (one.end_ns - one.start_ns) // 3
            where = one.step, one.stage, one.mb, "I" if one.kind == "B" else one.kind
            for part in range(3):
                begin = one.start_ns + part * third
                name = f"block{part}.ffn.down"
                found.append(LayerOperation(name, "matmul", begin, begin + third, *where))
        planted_delays.with_operations(rank, found)
    return made


def pipeline_trace(name="zb-h1", ranks=4, microbatches=8, steps=2):
    """Steps that run as the simulator says: 10 ms a pass, messages without delay.

    The measured values of this trace must equal the values simulated from it.
    """
    schedule = make_schedule(name, ranks, microbatches)
    timeline = simulate(schedule, Costs(f=10, i=10, w=10))
    length = float(timeline.makespan) + 5  # the optimizer's
    made = trace([[]] * ranks, end=length * steps, steps=steps)
    made.meta.update(
        layout={"pp": ranks, "dp": 1, "cp": 1, "tp": 1},
        schedule=schedule_json(schedule),
        stage_layers=[1] * ranks,
        stages=[f"{stage}: block {stage}" for stage in range(ranks)],
    )
    for place, own in enumerate(timeline.spans):
        rank = made.ranks[place]
        rank.place, rank.stages = {"pp": place, "dp": 0, "cp": 0, "tp": 0}, (place,)
        for step in range(steps):
            begin, now = step * length, step * length
            rank.spans.append(span("pipeline", begin, begin + length - 5, step=step + 1))
            for one in own:
                start, end = begin + float(one.start), begin + float(one.end)
                kind, stage, mb = one.instr.kind, one.instr.stage, one.instr.mb
                sends, needs = {"F": (1, -1), "I": (-1, 1)}.get(kind, (0, 0))
                facts = {
                    "stage": stage,
                    "mb": mb,
                    "phase": kind,
                    "step": step + 1,
                    "payload_bytes": 2**16,
                    "wire_bytes": 2**16,
                }
                what = "activations" if kind == "F" else "gradients"
                tag = 2 * mb + (kind == "I")
                if needs and 0 <= place + needs < ranks:
                    rank.records.append(
                        record(
                            "recv",
                            what,
                            "pp",
                            begin,
                            now,
                            start,
                            tag=tag,
                            peer=place + needs,
                            **facts,
                        )
                    )
                rank.spans.append(span(kind, start, end, stage, mb, step + 1))
                if sends and 0 <= place + sends < ranks:
                    rank.records.append(
                        record(
                            "send", what, "pp", end, end, end, tag=tag, peer=place + sends, **facts
                        )
                    )
                now = end
            rank.spans.append(span("opt", begin + length - 5, begin + length, step=step + 1, mb=-1))
    made.metrics.extend(
        {"step": step, "loss": 5 / step, "step_seconds": length / 1e3} for step in range(1, 20)
    )
    return made


def write_trace(folder):
    """A run folder with a trace of two ranks, of all kinds of lines."""
    made = pipeline_trace("1f1b", 2, 2, steps=3)
    for rank in made.ranks:
        head = {
            "recording": made.meta["recording"],
            "world_rank": rank.world_rank,
            "host": rank.host,
            "place": rank.place,
            "stages": rank.stages,
            "steps": rank.steps,
            "complete": True,
            "cores": [0, 1],
            "groups": {axis: [rank.world_rank] for axis in ("dp", "cp", "tp")}
            | {"pp": [0, 1], "world": [0, 1]},
        }
        shifted = [
            record._replace(
                posted_ns=record.posted_ns + 1,
                waited_ns=record.waited_ns + 1,
                done_ns=record.done_ns + 1,
            )
            for record in rank.records
        ]
        operations = [LayerOperation("block0.ffn", "matmul", 5, 9, 1, 0, 0, "F")] * rank.world_rank
        trace_file.write_rank(folder, head, shifted, rank.spans, operations)
    model = {"model": "decoder", "norm": "layer", "layers": 2, "ffn_cut": "pair"}
    trace_file.write_meta(
        folder,
        made.meta
        | {
            "clock": asdict(made.clock),
            "device": "cpu",
            "per_operation": True,
            "stage_layers": [1, 1],
            "model": made.meta["model"] | model,
        },
    )
    (folder / "config.toml").write_text("d-model = 16\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in made.metrics))


# --- what Perfetto asks of slices and arrows


def slices(found):
    rows = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            assert event["dur"] > 0
            rows[event["pid"], event["tid"]].append(
                (event["ts"], event["ts"] + event["dur"], event["name"])
            )
    return rows


def check_slices(found):
    """Slices of a row must nest or follow each other; times are microseconds, whole nanoseconds."""
    for row in slices(found).values():
        row.sort(key=lambda piece: (piece[0], -piece[1]))
        around = []
        for piece in row:
            while around and around[-1][1] <= piece[0] + 1e-4:
                around.pop()
            assert not around or piece[1] <= around[-1][1] + 1e-4, (around[-1], piece)
            around.append(piece)


def innermost(found):
    """{event id, phase: (start, end) of the slice that Perfetto joins an arrow's end to}, in ns."""
    rows, joined = defaultdict(list), {}
    for event in found:
        if event["ph"] == "X":
            start = round(event["ts"] * 1000)
            rows[event["pid"], event["tid"]].append(
                (start, start + round(event["dur"] * 1000), event["name"])
            )
    for event in found:
        if event["ph"] in "sf":
            time = round(event["ts"] * 1000)
            inside = [one for one in rows[event["pid"], event["tid"]] if one[0] <= time < one[1]]
            assert inside, event
            assert any(name.endswith(event["name"]) for *_, name in inside), event
            joined[event["id"], event["ph"]] = max(inside, key=lambda one: (one[0], -one[1]))
    return joined


def check_arrows(found):
    """Each arrow begins and ends inside a slice of its name; returns the pairs of ends.

    Perfetto draws it from the end of the first slice to the start of the second: not backwards.
    """
    ends, joined = defaultdict(dict), innermost(found)
    for event in found:
        if event["ph"] in "sf":
            assert isinstance(event["id"], int), "what Perfetto can't read as a number, it drops"
            assert event["ph"] not in ends[event["id"]], "ids are unique"
            ends[event["id"]][event["ph"]] = event
            assert (event.get("bp") == "e") == (event["ph"] == "f")
    assert all(set(pair) == {"s", "f"} for pair in ends.values())
    assert all(joined[number, "s"][1] <= joined[number, "f"][0] for number in ends)
    return [(pair["s"], pair["f"]) for pair in ends.values()]
