"""The text of a plan: the chosen layout, where its time and memory go, and why others lose."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from itertools import groupby, zip_longest

from mpipar.comm.grid import LAYOUT
from mpipar.config.layout import sizes_text
from mpipar.console.tables import short_count, table
from mpipar.files.text import counted
from mpipar.plan.cluster import STACKS, Cluster, Stack
from mpipar.plan.confirm import Confirmed, Job, command_line
from mpipar.plan.footprint import GIB, RESERVE, Footprint, rank_footprints
from mpipar.plan.layout import Layout, blocks_of_stages
from mpipar.plan.published import Run, nearest_runs
from mpipar.plan.search import (
    Candidate,
    Kind,
    Known,
    Plan,
    Question,
    layouts,
    orders_of,
    placed,
    shortest,
)
from mpipar.plan.shape import MFU_RULES, utilization
from mpipar.plan.sites import Sites, crossings, needed_gbits
from mpipar.plan.step_time import StepTime, rank_times

PARTS = {
    "products": "products",
    "attention": "attention",
    "elementwise": "elementwise operations",
    "starts": "starts of operations",
    "again": "forward passes again",
    "tp": "tp barriers",
    "cp": "cp messages",
    "ep": "exchanges of experts' rows",
    "bubble": "idle in the pipeline",
    "hops": "messages between stages",
    "sums": "gradient sums",
    "update": "update",
}
COMPUTE = ("products", "attention", "elementwise", "starts")  # that no layout removes
SHORT = {"again": "recompute", "bubble": "idle", "hops": "pp", "sums": "dp"}  # in narrow columns
FACTORS = (2, 3, 4, 8, 16, 32, 64)  # of the number of devices, to try
OFF = (0.8, 1.2)  # factors on each input
INPUTS = {  # inputs of a verdict: name -> the question with a factor on it
    "rate of products": lambda one, by: replace(one, product_tflops=one.product_tflops * by),
    "rate of attention": lambda one, by: replace(one, attention_tflops=one.attention_tflops * by),
    "memory bandwidth": lambda one, by: replace(one, hbm_gbytes_s=one.hbm_gbytes_s * by),
    "links in a node": lambda one, by: one.with_links(inner=by),
    "links between nodes": lambda one, by: one.with_links(outer=by),
}
STARTS = "starts of operations a second"  # of the software, not of the devices


def report(question: Question, plan: Plan, job: Job) -> str:
    """Return the whole answer as text."""
    blocks = [headline(question)]
    if not plan.best:
        return "\n\n".join([*blocks, impossible(question, plan), rejections(plan)])
    best = plan.best[0]
    blocks += [
        verdict(question, plan),
        command_line(question, job, best),
        hosts(best),
        nodes(question, plan),
        parts_table(best),
        *stage_tables(question, plan),
        "layouts, best first; each is the best of its grid\n" + ranking(question, plan),
        alone_table(question),
        rejections(plan),
        changes_table(question, plan),
        confidence(question, best),
    ]
    return "\n\n".join(filter(None, blocks))


def devices(question: Question) -> str:
    """Return the number and kinds of devices."""
    return " + ".join(f"{kind.ranks} x {kind.cluster.name}" for kind in question.kinds)


def headline(question: Question) -> str:
    """Return model, machine and batch."""
    shape = question.shape
    figures = dict.fromkeys(kind.cluster.basis for kind in question.kinds)
    return (
        f"{shape.parameters / 1e9:.2f} billion parameters in {question.dtype},"
        f" {counted(question.batch_size, 'row')} of {shape.tokens} tokens a step, on"
        f" {devices(question)}\n"
        f"the machine's figures: {'; '.join(figures)}\n"
        f"the software's: {question.stack.evidence}"
    )


def verdict(question: Question, plan: Plan) -> str:
    """Return what the best layout achieves."""
    best = plan.best[0]
    seconds = best.step.total
    tokens = question.batch_size * question.shape.tokens / seconds
    room = best.memory.total / best.used
    return (
        f"it fits: {best.memory.total / GIB:.1f} of {room / GIB:.1f} GiB on the fullest rank;"
        f" {seconds:.3f} s a step, {short_count(tokens)} tokens/s,"
        f" {short_count(tokens / question.ranks)} on each device\n"
        f"MFU {100 * mfu(question, best):.1f} % of {peak(question):.0f} TFLOP/s, with"
        f" {MFU_RULES[question.mfu_rule]}; it is bound by {PARTS[bound_by(best.step)]}\n"
        f"a step of this layout by the constants of other software: {others(question, plan)}"
        + even_words(question, plan)
    )


def others(question: Question, plan: Plan) -> str:
    """Return the step time of a layout by the constants of each other stack."""
    best = plan.best[0]
    found = {
        name: question._replace(stack=stack.with_dtype(question.dtype))
        .step(best.layout, best.clusters, best.counts, plan.pipeline)
        .total
        for name, stack in STACKS.items()
        if stack.evidence != question.stack.evidence
    }
    return ", ".join(f"{seconds:.3f} s {name}" for name, seconds in found.items())


def even_split(question: Question, plan: Plan) -> float | None:
    """Return the step with equally many blocks on each stage; None if that does not fit."""
    one = plan.best[0]
    counts = blocks_of_stages(question.shape.layers, one.layout.stages)
    if counts == one.counts:
        return one.step.total
    even = next(placed(question, one.layout, one.kinds))
    if even.used > 1:
        return None
    return question.step(one.layout, one.clusters, counts, plan.pipeline).total


def even_words(question: Question, plan: Plan) -> str:
    """Return what an even split of the blocks would lose; "" for a layout that has one."""
    even, seconds = even_split(question, plan), plan.best[0].step.total
    if even is None:
        return "\nan even split of the blocks does not fit"
    longer = 100 * (even / seconds - 1)
    return f"\nan even split of the blocks takes {even:.3f} s, {longer:.0f} % longer" * (
        even != seconds
    )


def hosts(one: Candidate) -> str:
    """Return which ranks are on which kind of device; "" with a single kind."""
    if len(one.kinds) == 1:
        return ""
    found, first = [], 0
    for kind in one.kinds:
        found.append(f"ranks {first} to {first + kind.ranks - 1} on {kind.cluster.name}")
        first += kind.ranks
    return f"the hosts must come in this order: {', '.join(found)}"


def alone_table(question: Question) -> str:
    """Return the job's step on each kind alone, and with equal work for all; "" with one kind."""
    alone = alone_seconds(question)
    rows = [
        (name, f"{seconds:.3f} s a step" if seconds else "does not fit")
        for name, seconds in alone.items()
    ]
    return table([("the same batch", ""), *rows]) if rows else ""


def alone_seconds(question: Question) -> dict[str, float | None]:
    """Return {what: step of the best layout, None if nothing fits}, given several kinds.

    Each kind alone, and all devices as if they were of the slowest kind, with the least memory; on
    any axes, since those that are given may not fit fewer devices.
    """
    kinds = question.kinds
    if len(kinds) == 1:
        return {}
    slowest = min(kinds, key=lambda kind: kind.cluster.product_tflops)
    uniform = Kind(slowest.cluster, question.ranks, min(kind.gib for kind in kinds))
    asked = {f"{kind.cluster.name} alone": kind for kind in kinds}
    asked["equal work for all, at the slowest kind's speed"] = uniform
    fixed = {name: value for name, value in question.fixed.items() if name not in LAYOUT}
    return {
        name: shortest(question._replace(kinds=(kind,), fixed=fixed))
        for name, kind in asked.items()
    }


def peak(question: Question) -> float:
    """Return TFLOP/s per device in the plan's number format, averaged over all devices."""
    return (
        sum(kind.ranks * kind.cluster.peak_tflops[question.dtype] for kind in question.kinds)
        / question.ranks
    )


def mfu(question: Question, one: Candidate) -> float:
    """Return the share of the devices' peak, by the question's rule."""
    flops = question.shape.step_flops(question.batch_size, question.mfu_rule, one.layout.recompute)
    return utilization(flops, one.step.total, question.ranks, peak(question))


def bound_by(step: StepTime) -> str:
    """Return the part of a step that takes longest, among those that a layout can change."""
    parts = step._asdict()
    largest = max((name for name in PARTS if name not in COMPUTE), key=parts.get)
    return largest if parts[largest] > 0.1 * step.total else max(COMPUTE, key=parts.get)


def nodes(question: Question, plan: Plan) -> str:
    """Return which axes cross from node to node, and the step in the other rank order."""
    best = plan.best[0]
    layout, each, stride = best.layout, question.per_node, 1
    if layout.ranks <= each:
        return ""
    inside, across = [], []
    for axis in reversed(layout.rank_order):
        stride *= getattr(layout, axis)
        if getattr(layout, axis) > 1:
            (across if each % stride else inside).append(axis)
    text = f"nodes have {each} devices: messages of {', '.join(across)} go from node to node"
    if inside:
        text += f", those of {', '.join(inside)} stay inside"
    for other in orders_of(question, layout)[1:]:
        step = question.step(other, best.clusters, best.counts, plan.pipeline)
        text += f"; with --rank-order {','.join(other.rank_order)} a step takes {step.total:.3f} s"
    return text


def parts_table(best: Candidate) -> str:
    """Return the step's seconds by part, omitting zeros, and bytes of the fullest rank."""
    memory = [
        (name, f"{size / GIB:.2f}")
        for name, size in (*best.memory._asdict().items(), ("reserve", best.memory.reserve))
    ]
    time = [
        (PARTS[name], f"{seconds:.3f}", f"{100 * seconds / best.step.total:.1f} %")
        for name, seconds in best.step._asdict().items()
        if seconds > 0
    ]
    rows = [
        (*(left or ("", "", "")), *(right or ("", ""))) for left, right in zip_longest(time, memory)
    ]
    return table([("a step's seconds", "", "", "GiB of the fullest rank", ""), *rows])


def stages(question: Question, plan: Plan) -> list[tuple[int, Footprint, StepTime]]:
    """Return (blocks, memory, parts of the step) of each pipeline rank."""
    best = plan.best[0]
    layout, shape, stack, counts = best.layout, question.shape, question.stack, best.counts
    times = rank_times(shape, layout, best.clusters, stack, plan.pipeline, counts)
    memory = rank_footprints(shape, layout, stack, counts, range(layout.pp))
    return [
        (layout.blocks_of(rank, counts), memory[rank], times[rank]) for rank in range(layout.pp)
    ]


def stage_tables(question: Question, plan: Plan) -> list[str]:
    """Return memory and seconds of each pipeline rank. Rows of the latter add up to the step."""
    found, best = stages(question, plan), plan.best[0]
    clusters, several = best.clusters, len(best.kinds) > 1
    some = [
        name for name in StepTime._fields if any(getattr(parts, name) > 0 for *_, parts in found)
    ]
    memory = [
        (
            "pipeline rank",
            *["devices"] * several,
            "blocks",
            "weights GiB",
            "gradients GiB",
            "optimizer GiB",
            "stash GiB",
            "buffers GiB",
            "all GiB",
        )
    ]
    time = [("seconds of rank", *(SHORT.get(name, name) for name in some))]
    for rank, (blocks, held, parts) in enumerate(found):
        memory.append(
            (
                str(rank),
                *[clusters[rank].name] * several,
                str(blocks),
                *(f"{size / GIB:.1f}" for size in (*held, held.total)),
            )
        )
        time.append((str(rank), *(f"{max(getattr(parts, name), 0):.3f}" for name in some)))
    return [table(in_short(memory)), table(in_short(time))]


def in_short(rows: list[tuple]) -> list[tuple]:
    """Return a table's first and last rows: a pipeline's ends differ, its middle is uniform."""
    return rows if len(rows) <= 10 else [*rows[:5], ("...", *[""] * (len(rows[0]) - 1)), *rows[-3:]]


def own_table(found: list[Confirmed], why_not: str) -> str:
    """Return what mpipar's own code needs on its first and last pipeline rank, and if it fits."""
    if why_not:
        return f"mpipar cannot run this layout: {why_not}"
    rows = [("mpipar's own step, on shapes", "states GiB", "the rest GiB", "sent in a step GiB")]
    rows += [
        (
            f"rank {one.rank}",
            f"{one.states / GIB:.2f}",
            f"{one.rest / GIB:.2f}",
            f"{one.sent / GIB:.2f}",
        )
        for one in found
    ]
    fullest = max(found, key=lambda one: one.bytes_at_peak / one.gib)
    fits = "it fits" if confirmed(found) else "it does not fit"
    return (
        f"{table(rows)}\n{fits}: {fullest.bytes_at_peak / GIB:.1f} of {fullest.gib:.1f} GiB,"
        " not counting memory outside of arrays"
    )


def confirmed(found: list[Confirmed]) -> bool:
    """Return whether mpipar's own step ran on shapes, and fits."""
    return bool(found) and all(one.bytes_at_peak <= one.gib * GIB - RESERVE for one in found)


def sites_table(question: Question, plan: Plan, sites: Sites) -> str:
    """Return, for each layout, which axis crosses the link between sites, and what that costs."""
    rows = [("layout", "across", "GiB one way", "link s", "step s", "loss %", "Gbit/s for 5 %")]
    for one in plan.best:
        for found in crossings(question, one, sites):
            step = one.step.total + found.exposed
            rows.append(
                (
                    layout_words(one.layout),
                    found.axis,
                    f"{found.sent / GIB:.1f}",
                    f"{found.seconds:.2f}",
                    f"{step:.3f}",
                    f"{100 * found.exposed / one.step.total:.1f}",
                    f"{needed_gbits(question, one, sites, found.axis):.3g}".replace("inf", "none"),
                )
            )
    if len(rows) == 1:
        return f"no axis of these layouts can cross the links between {sites.count} sites"
    rows[1:] = sorted(rows[1:], key=lambda row: float(row[4]))
    return (
        f"{sites.count} sites with {sites.gbits:g} Gbit/s and {sites.milliseconds:g} ms between"
        f" them, the best first\n{table(rows, left=2)}"
    )


def saving(question: Question, step_seconds: float, save_seconds: float, hours: float) -> str:
    """Return how often to save, if a device fails once in `hours` hours.

    Source: Young 1974, Daly 2006: the interval with the least loss is sqrt(2 * save * time between
    failures of the job).
    """
    between = 3600 * hours / question.ranks
    interval = math.sqrt(2 * save_seconds * between)
    lost = save_seconds / interval + interval / 2 / between
    if lost >= 1:
        return (
            f"a failure of the job every {between:.0f} seconds: saving and lost work take all"
            " of the time"
        )
    return (
        f"a failure of the job every {between / 3600:.1f} hours: save every {interval / 60:.1f}"
        f" minutes, --save-interval {max(1, round(interval / step_seconds))}; saving and lost"
        f" work then take {100 * lost:.1f} % of the time"
    )


def layout_words(layout: Layout) -> str:
    """Return a layout in a line of a table."""
    schedule = layout.schedule if layout.pp > 1 else ""
    chunks = f" v{layout.chunks}" if layout.schedule == "interleaved" else ""
    words = [
        sizes_text(layout._asdict()),
        schedule + chunks,
        f"{layout.num_microbatches} x {layout.rows} rows",
        "sp" if layout.sequence_parallel else "",
        f"recompute {layout.recompute}" if layout.recompute != "none" else "",
        f"zero {layout.zero}" if layout.zero else "",
        "dp outermost" if layout.outer == "dp" else "",
    ]
    return ", ".join(word for word in words if word)


def ranking(question: Question, plan: Plan) -> str:
    """Return the layouts, with what each loses and gains against the first."""
    first = plan.best[0]
    rows = [("layout", "step s", "GiB", "MFU %", "against the first")]
    rows += [
        (
            candidate_words(one),
            f"{one.step.total:.3f}",
            f"{one.memory.total / GIB:.1f}",
            f"{100 * mfu(question, one):.1f}",
            "" if one is first else why_not(first, one),
        )
        for one in plan.best
    ]
    return table(rows)


def candidate_words(one: Candidate) -> str:
    """Return a candidate as a line of a table: layout, devices, an uneven split, and its twins."""
    words = [layout_words(one.layout)]
    if len(one.kinds) > 1:
        words.append("on " + ", then ".join(kind.cluster.name for kind in one.kinds))
    if len(one.kinds) > 1 or min(one.counts) < max(one.counts):
        words.append(f"blocks {in_runs(one.counts)}")
    words += [f"equal: {sizes_text(twin._asdict())}" for twin in one.twins]
    return "; ".join(words)


def in_runs(counts: Iterable[int]) -> str:
    """Return the blocks of stages, equal neighbours merged, as 4 x 7, 2 x 9."""
    runs = [(count, len(list(same))) for count, same in groupby(counts)]
    return ", ".join(f"{many} x {count}" if many > 1 else str(count) for count, many in runs)


def why_not(first: Candidate, other: Candidate) -> str:
    """Return the parts that make another layout slower, and those that win some of it back."""
    more = {
        name: two - one
        for (name, one), two in zip(first.step._asdict().items(), other.step, strict=True)
    }
    worse = max(more, key=more.get)
    better = min(more, key=more.get)
    text = f"{more[worse]:+.2f} s {PARTS[worse]}"
    if more[better] < -0.005:
        text += f", {more[better]:+.2f} s {PARTS[better]}"
    return text


def batch_table(plans: dict[int, Plan]) -> str:
    """Return the best step for each number of rows."""
    rows = [("rows of a step", "step s", "rows/s", "layout")]
    for count, plan in plans.items():
        best = plan.best[0] if plan.best else None
        rows.append(
            (
                str(count),
                *(
                    (
                        f"{best.step.total:.3f}",
                        f"{count / best.step.total:.1f}",
                        candidate_words(best),
                    )
                    if best
                    else ("", "", "none fits")
                ),
            )
        )
    return table(rows)


def rejections(plan: Plan) -> str:
    """Return how many layouts were considered, and why most were rejected."""
    said = (
        f"{plan.fitting:,} layouts fit, {plan.simulated:,} of them were simulated: no other can"
        " be shorter than these\n"
        if plan.fitting
        else ""
    )
    return said + "\n".join(
        ["rejected:", *(f"  {count:>7,}  {reason}" for reason, count in plan.rejected.items())]
    )


def impossible(question: Question, plan: Plan) -> str:
    """Return why nothing fits, and what the layout with the least memory lacks."""
    if plan.least is None:
        return "no layout can be run: see the reasons below"
    one, more = plan.least, plan.memory[1]
    text = (
        f"no layout fits: the one that needs least has {one.memory.total / GIB:.1f} GiB on its"
        f" fullest rank, and {one.memory.total / one.used / GIB:.1f} are there\n"
        f"  {candidate_words(one)}\n"
        f"its states alone are {one.memory.states / GIB:.1f} GiB; use {enough(question)}, or"
        " devices with more memory"
    )
    if more:
        text += f"\nwith 20 % more memory would be first: {candidate_words(more)}"
    return text


def enough(question: Question) -> str:
    """Return what the same job fits on: freed from given parts of the layout, or more devices."""
    if question.fixed and fits(question._replace(fixed={})):
        return "another layout: the given parts of it leave none"
    for factor in FACTORS:
        more = question._replace(fixed={}).changed(
            lambda kind, factor=factor: kind._replace(ranks=kind.ranks * factor)
        )
        if fits(more):
            return f"{more.ranks} devices"
    return f"more than {question.ranks * FACTORS[-1]} devices"


def fits(question: Question) -> bool:
    """Return whether any layout fits in memory."""
    known = Known(question)
    return any(
        one.used <= 1
        for layout in layouts(question, Counter())
        for one in placed(question, layout, question.kinds, known)
    )


def changes(question: Question, plan: Plan) -> list[dict]:
    """Return the step, and which printed layout would come first, with each input 20 % off.

    Which layouts fit depends on memory too: the search has kept what it would choose.
    """

    def row(name: str, step: Callable[[Candidate, float], float]) -> dict:
        steps = [[step(one, by) for one in plan.best] for by in OFF]
        return {
            "input": name,
            "steps_s": [each[0] for each in steps],
            "first": [plan.best[each.index(min(each))].layout for each in steps],
        }

    def on(one: Candidate, clusters: Sequence[Cluster], stack: Stack = question.stack) -> float:
        return (
            question._replace(stack=stack)
            .step(one.layout, clusters, one.counts, plan.pipeline)
            .total
        )

    found = [
        row(
            name,
            lambda one, by, changed=changed: on(one, [changed(each, by) for each in one.clusters]),
        )
        for name, changed in INPUTS.items()
    ]
    found.insert(
        3, row(STARTS, lambda one, by: on(one, one.clusters, question.stack.with_starts(by)))
    )
    found.append(row(PARTS["bubble"], lambda one, by: one.step.total + (by - 1) * one.step.bubble))
    return [
        *found,
        {
            "input": "memory of a device",
            "steps_s": [one.step.total if one else None for one in plan.memory],
            "first": [one.layout if one else None for one in plan.memory],
        },
    ]


def changes_table(question: Question, plan: Plan) -> str:
    """Return `changes` as a table, without inputs that leave the step as it is; text comes last."""
    rows, lasts = [("if this were", "20 % less: s", "20 % more: s")], ["then first"]
    now = plan.best[0].step.total
    for row in changes(question, plan):
        if row["steps_s"] == [now, now]:
            continue
        rows.append(
            (row["input"], *(f"{seconds:.3f}" if seconds else "-" for seconds in row["steps_s"]))
        )
        others = [
            f"{text}: {instead(plan.best[0].layout, layout)}"
            for text, layout in zip(("less", "more"), row["first"], strict=True)
            if layout != plan.best[0].layout
        ]
        lasts.append("; ".join(others) or "the same")
    return "\n".join(map("  ".join, zip(table(rows).splitlines(), lasts, strict=True)))


def instead(first: Layout, other: Layout | None) -> str:
    """Return how another layout differs from the first: its grid, or all of it if that is equal."""
    if other is None:
        return "none fits"
    return layout_words(other) if other.grid == first.grid else sizes_text(other._asdict())


def confidence(question: Question, best: Candidate) -> str:
    """Return how far the closed forms are from published runs that resemble this one."""
    if question.shape.experts:
        return "no published step here is of a model with experts"
    rows = [
        ("published runs that are most like it", "measured s", "MFU %", "closed form s", "error %")
    ]
    rows += [
        (
            f"{run.row['model']}, {run.layout.ranks} x {run.row['device']}, "
            + sizes_text(run.layout._asdict()),
            f"{run.seconds:.3f}",
            f"{100 * run.mfu:.1f}",
            f"{run.predicted:.3f}",
            f"{100 * run.error:+.1f}",
        )
        for run in nearest(question, best)
    ]
    return table(rows)


def nearest(question: Question, best: Candidate) -> list[Run]:
    """Return the published runs of the same software that are most similar to a layout."""
    return nearest_runs(question.shape, best.layout, best.clusters[0], question.stack)


def csv_rows(question: Question, plan: Plan) -> list[list]:
    """Return a header, and a row for each layout, with units in the names."""
    names = [
        *Layout._fields,
        "stage_layers",
        "kinds",
        "step_s",
        *(f"{name}_s" for name in StepTime._fields),
        "memory_gib",
        "mfu_percent",
    ]
    return [
        names,
        *(
            [
                *one.layout,
                in_runs(one.counts),
                " ".join(kind.cluster.name for kind in one.kinds),
                f"{one.step.total:.6g}",
                *(f"{max(part, 0):.6g}" for part in one.step),
                f"{one.memory.total / GIB:.3f}",
                f"{100 * mfu(question, one):.2f}",
            ]
            for one in plan.best
        ),
    ]


def as_dict(question: Question, plan: Plan, job: Job) -> dict:
    """Return everything as plain values; seconds, bytes."""
    found = {
        "model": asdict(question.shape) | {"parameters": question.shape.parameters},
        "kinds": [
            {
                "machine": kind.cluster.name,
                "basis": kind.cluster.basis,
                "ranks": kind.ranks,
                "memory_gib": kind.gib,
            }
            for kind in question.kinds
        ],
        "ranks": question.ranks,
        "dtype": question.dtype,
        "batch_size": question.batch_size,
        "mfu_rule": question.mfu_rule,
        "fits": bool(plan.best),
        "layouts": [
            {
                "layout": one.layout._asdict(),
                "stage_layers": one.counts,
                "kinds": [kind.cluster.name for kind in one.kinds],
                "twins": [twin._asdict() for twin in one.twins],
                "step_s": one.step.total,
                "parts_s": one.step._asdict(),
                "memory_bytes": one.memory._asdict(),
                "total_bytes": one.memory.total,
                "mfu": mfu(question, one),
                "why_not_first": "" if one is plan.best[0] else why_not(plan.best[0], one),
            }
            for one in plan.best
        ],
        "fitting": plan.fitting,
        "simulated": plan.simulated,
        "rejected": plan.rejected,
    }
    if not plan.best:
        return found | {"why_not": impossible(question, plan)}
    best = plan.best[0]
    return found | {
        "command": command_line(question, job, best),
        "bound_by": bound_by(best.step),
        "even_split_s": even_split(question, plan),
        "alone_s": alone_seconds(question),
        "pipeline_ranks": [
            {"blocks": blocks, "memory_bytes": memory._asdict(), "parts_s": parts._asdict()}
            for blocks, memory, parts in stages(question, plan)
        ],
        "changes": [
            row | {"first": [one and one._asdict() for one in row["first"]]}
            for row in changes(question, plan)
        ],
        "published": [
            {
                "row": run.row["id"],
                "measured_s": run.seconds,
                "predicted_s": run.predicted,
                "error": run.error,
            }
            for run in nearest(question, best)
        ],
    }
