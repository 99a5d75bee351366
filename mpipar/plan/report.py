"""What a plan says: the chosen layout, what its time and memory go to, and why not another one."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from mpipar.config.layout import sizes_text
from mpipar.console.tables import short_count, table
from mpipar.files.text import counted
from mpipar.plan.cluster import STACKS
from mpipar.plan.confirm import Confirmed, Job, command_line
from mpipar.plan.footprint import GIB, RESERVE, Footprint, footprint, rank_footprints
from mpipar.plan.layout import Layout, blocks_of_stages
from mpipar.plan.pipeline_time import Pipelines
from mpipar.plan.published import nearest_runs
from mpipar.plan.search import Candidate, Plan, Question, layouts, other_order
from mpipar.plan.shape import MFU_RULES, utilization
from mpipar.plan.sites import Sites, crossings, needed_gbits
from mpipar.plan.step_time import StepTime, rank_times, step_time

PARTS = {"compute": "products, attention, elementwise", "again": "forward passes again",
         "tp": "tp barriers", "cp": "cp messages", "bubble": "idle in the pipeline",
         "hops": "messages between stages", "sums": "gradient sums", "update": "update"}
SHORT = {"again": "recompute", "bubble": "idle", "hops": "pp", "sums": "dp"}  # in narrow columns
FACTORS = (2, 3, 4, 8, 16, 32, 64)  # how many times as many devices are tried
OFF = (0.8, 1.2)  # factors on each input
INPUTS = {  # what a verdict rests on: name -> a Cluster with a factor on it
    "rate of products": lambda cluster, by: replace(
        cluster, product_tflops=cluster.product_tflops * by),
    "memory bandwidth": lambda cluster, by: replace(
        cluster, hbm_gbytes_s=cluster.hbm_gbytes_s * by),
    "links in a node": lambda cluster, by: replace(cluster, links=(
        faster(cluster.links[0], by), *cluster.links[1:])),
    "links between nodes": lambda cluster, by: replace(cluster, links=(
        *cluster.links[:-1], faster(cluster.links[-1], by))),
}


def faster(link, by: float):
    """A link with another rate."""
    return replace(link, gbytes_s=link.gbytes_s * by)


def report(question: Question, plan: Plan, job: Job) -> str:
    """The whole answer as text."""
    blocks = [headline(question)]
    if not plan.best:
        return "\n\n".join([*blocks, impossible(question, plan), rejections(plan)])
    best = plan.best[0]
    blocks += [verdict(question, best), command_line(question, job, best.layout),
               nodes(question, best), parts_table(question, best), *stage_tables(question, best),
               "layouts, best first; each is the best of its grid\n" + ranking(question, plan),
               rejections(plan), changes_table(question, plan), confidence(question, best)]
    return "\n\n".join(filter(None, blocks))


def headline(question: Question) -> str:
    """Model, machine and batch."""
    shape, cluster = question.shape, question.cluster
    return (f"{shape.parameters / 1e9:.2f} billion parameters in {question.dtype},"
            f" {counted(question.batch_size, 'row')} of {shape.tokens} tokens a step, on"
            f" {question.ranks} x {cluster.name}\n"
            f"the machine's figures: {cluster.basis}\n"
            f"the software's: {question.stack.evidence}")


def verdict(question: Question, best: Candidate) -> str:
    """What the best layout gives."""
    seconds = best.step.total
    tokens = question.batch_size * question.shape.tokens / seconds
    return (f"it fits: {best.memory.total / GIB:.1f} of {question.gib:.1f} GiB on the fullest rank;"
            f" {seconds:.3f} s a step, {short_count(tokens)} tokens/s,"
            f" {short_count(tokens / question.ranks)} on each device\n"
            f"MFU {100 * mfu(question, best):.1f} % of {peak(question):.0f} TFLOP/s, with"
            f" {MFU_RULES[question.mfu_rule]}; it is bound by {PARTS[bound_by(best.step)]}\n"
            f"a step of this layout by the constants of other software: {others(question, best)}")


def others(question: Question, best: Candidate) -> str:
    """What a layout takes by the constants of each stack that differs."""
    found = {name: step_time(question.shape, best.layout, question.cluster,
                             stack.with_dtype(question.dtype)).total
             for name, stack in STACKS.items() if stack.evidence != question.stack.evidence}
    return ", ".join(f"{seconds:.3f} s {name}" for name, seconds in found.items())


def peak(question: Question) -> float:
    """TFLOP/s of a device in the number format of the plan."""
    return question.cluster.peak_tflops[question.dtype]


def mfu(question: Question, one: Candidate) -> float:
    """The share of the devices' peak, by the question's rule."""
    flops = question.shape.step_flops(
        question.batch_size, question.mfu_rule, one.layout.recompute)
    return utilization(flops, one.step.total, question.ranks, peak(question))


def bound_by(step: StepTime) -> str:
    """The part of a step that takes longest, of those that a layout can change; else compute."""
    parts = step._asdict()
    others = {name: parts[name] for name in PARTS if name != "compute"}
    largest = max(others, key=others.get)
    return largest if others[largest] > 0.1 * step.total else "compute"


def nodes(question: Question, best: Candidate) -> str:
    """Which axes cross from node to node, and what the other rank order would take."""
    layout, each, stride = best.layout, question.cluster.per_node(), 1
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
    other = other_order(layout._replace(outer="pp"), question.cluster)
    if other:
        other = other._replace(outer=layout.rank_order[1])
        step = step_time(question.shape, other, question.cluster, question.stack,
                         Pipelines().simulated)
        text += f"; with --rank-order {','.join(other.rank_order)} a step takes {step.total:.3f} s"
    return text


def parts_table(question: Question, best: Candidate) -> str:
    """Seconds of the step, and bytes of the fullest rank."""
    memory = [*best.memory._asdict().items(), ("reserve", best.memory.reserve)]
    parts = {name: max(seconds, 0.0) for name, seconds in best.step._asdict().items()}
    time = [(PARTS[name], f"{seconds:.3f}", f"{100 * seconds / best.step.total:.1f} %")
            for name, seconds in parts.items()]
    rows = [("a step's seconds", "", "", "GiB of the fullest rank", "")]
    for place in range(max(len(time), len(memory))):
        left = time[place] if place < len(time) else ("", "", "")
        right = ((memory[place][0], f"{memory[place][1] / GIB:.2f}") if place < len(memory)
                 else ("", ""))
        rows.append((*left, *right))
    return table(rows)


def stages(question: Question, best: Candidate) -> list[tuple[int, Footprint, StepTime]]:
    """(blocks, memory, parts of the step) of each pipeline rank."""
    layout, shape, stack = best.layout, question.shape, question.stack
    counts = blocks_of_stages(shape.layers, layout.stages)
    times = rank_times(shape, layout, question.cluster, stack, Pipelines().simulated)
    memory = rank_footprints(shape, layout, stack, counts, range(layout.pp))
    return [(layout.blocks_of(rank, counts), memory[rank], times[rank])
            for rank in range(layout.pp)]


def stage_tables(question: Question, best: Candidate) -> list[str]:
    """Memory and seconds of each pipeline rank. The rows of the second add up to the step."""
    memory = [("pipeline rank", "blocks", "weights GiB", "gradients GiB", "optimizer GiB",
               "stash GiB", "buffers GiB", "all GiB")]
    time = [("seconds of rank", *(SHORT.get(name, name) for name in StepTime._fields))]
    for rank, (blocks, found, parts) in enumerate(stages(question, best)):
        memory.append((str(rank), str(blocks), *(
            f"{size / GIB:.1f}" for size in (*found, found.total))))
        time.append((str(rank), *(f"{max(seconds, 0):.3f}" for seconds in parts)))
    return [table(in_short(memory)), table(in_short(time))]


def in_short(rows: list[tuple]) -> list[tuple]:
    """A table's first and last rows: the ends of a pipeline differ, and the middle is even."""
    return rows if len(rows) <= 10 else [*rows[:5], ("...", *[""] * (len(rows[0]) - 1)), *rows[-3:]]


def own_table(question: Question, found: list[Confirmed], why_not: str) -> str:
    """What mpipar's own code would have on its first and last pipeline rank, and its verdict."""
    if why_not:
        return f"mpipar cannot run this layout: {why_not}"
    rows = [("mpipar's own step, on shapes", "states GiB", "the rest GiB", "sent in a step GiB")]
    rows += [(f"rank {one.rank}", f"{one.states / GIB:.2f}", f"{one.rest / GIB:.2f}",
              f"{one.sent / GIB:.2f}") for one in found]
    most = max(one.states + one.rest for one in found) / GIB
    fits = "it fits" if confirmed(question, found) else "it does not fit"
    return f"{table(rows)}\n{fits}: {most:.1f} of {question.gib:.1f} GiB, without what no array has"


def confirmed(question: Question, found: list[Confirmed]) -> bool:
    """Whether mpipar's own step ran on shapes, and fits."""
    room = question.gib * GIB - RESERVE
    return bool(found) and all(one.states + one.rest <= room for one in found)


def sites_table(question: Question, plan: Plan, sites: Sites) -> str:
    """For each layout, which axis crosses the link between sites, and what that costs."""
    rows = [("layout", "across", "GiB one way", "link s", "step s", "loss %",
             "Gbit/s for 5 %")]
    for one in plan.best:
        for found in crossings(question, one, sites):
            step = one.step.total + found.exposed
            rows.append((layout_words(one.layout), found.axis, f"{found.sent / GIB:.1f}",
                         f"{found.seconds:.2f}", f"{step:.3f}",
                         f"{100 * found.exposed / step:.1f}",
                         f"{needed_gbits(question, one, sites, found.axis):.3g}"))
    if len(rows) == 1:
        return f"no axis of these layouts has a multiple of {sites.count} ranks"
    rows[1:] = sorted(rows[1:], key=lambda row: float(row[4]))
    return (f"{sites.count} sites with {sites.gbits:g} Gbit/s and {sites.milliseconds:g} ms between"
            f" them, the best first\n{table(rows, left=2)}")


def saving(question: Question, step_seconds: float, save_seconds: float, hours: float) -> str:
    """How often to save, if a device fails once in so many hours.

    Source: Young 1974, Daly 2006: the interval with the least loss is sqrt(2 * save * time between
    failures of the job).
    """
    between = 3600 * hours / question.ranks
    interval = math.sqrt(2 * save_seconds * between)
    lost = save_seconds / interval + interval / 2 / between
    return (f"a failure of the job every {between / 3600:.1f} hours: save every {interval / 60:.1f}"
            f" minutes, --save-interval {max(1, round(interval / step_seconds))}; saving and lost"
            f" work then take {100 * lost:.1f} % of the time")


def layout_words(layout: Layout) -> str:
    """A layout in a line of a table."""
    schedule = layout.schedule if layout.pp > 1 else ""
    chunks = f" v{layout.chunks}" if layout.schedule == "interleaved" else ""
    words = [sizes_text(layout._asdict()), schedule + chunks,
             f"{layout.num_microbatches} x {layout.rows} rows",
             "sp" if layout.sequence_parallel else "",
             f"recompute {layout.recompute}" if layout.recompute != "none" else "",
             f"zero {layout.zero}" if layout.zero else "",
             "dp outermost" if layout.outer == "dp" else ""]
    return ", ".join(word for word in words if word)


def ranking(question: Question, plan: Plan) -> str:
    """The layouts, with what each loses and gains against the first."""
    first = plan.best[0]
    rows = [("layout", "step s", "GiB", "MFU %", "against the first")]
    rows += [(layout_words(one.layout), f"{one.step.total:.3f}", f"{one.memory.total / GIB:.1f}",
              f"{100 * mfu(question, one):.1f}",
              "" if one is first else why_not(first, one)) for one in plan.best]
    return table(rows)


def why_not(first: Candidate, other: Candidate) -> str:
    """The parts that make another layout slower, and those that give back some of it."""
    more = {name: two - one for (name, one), two in zip(
        first.step._asdict().items(), other.step, strict=True)}
    worse = max(more, key=more.get)
    better = min(more, key=more.get)
    text = f"{more[worse]:+.2f} s {PARTS[worse]}"
    if more[better] < -0.005:
        text += f", {more[better]:+.2f} s {PARTS[better]}"
    return text


def batch_table(plans: dict[int, Plan]) -> str:
    """The best step for each number of rows."""
    rows = [("rows of a step", "step s", "rows/s", "layout")]
    for count, plan in plans.items():
        best = plan.best[0] if plan.best else None
        rows.append((str(count), *((f"{best.step.total:.3f}", f"{count / best.step.total:.1f}",
                                    layout_words(best.layout)) if best else ("", "", "none fits"))))
    return table(rows)


def rejections(plan: Plan) -> str:
    """How many layouts were looked at, and why most were not."""
    said = (f"{plan.fitting:,} layouts fit, {plan.simulated:,} of them were simulated: no other can"
            " be shorter than these\n" if plan.fitting else "")
    return said + rejected_lines(plan.rejected)


def rejected_lines(rejected: dict[str, int]) -> str:
    """How many layouts each reason has rejected."""
    return "\n".join(["rejected:", *(
        f"  {count:>7,}  {reason}" for reason, count in rejected.items())])


def impossible(question: Question, plan: Plan) -> str:
    """Why nothing fits, and what the layout with the least memory lacks."""
    if plan.least is None:
        return "no layout can be run: see the reasons below"
    one, more = plan.least, plan.memory[1]
    text = (f"no layout fits: the one that needs least has {one.memory.total / GIB:.1f} GiB on its"
            f" fullest rank, and {question.gib:.1f} are there\n  {layout_words(one.layout)}\n"
            f"its states alone are {states_of(one) / GIB:.1f} GiB; use {enough(question)}, or"
            " devices with more memory")
    if more:
        text += f"\nwith 20 % more memory would be first: {layout_words(more.layout)}"
    return text


def enough(question: Question) -> str:
    """On what the same job fits, as words: without given parts of the layout, or more devices."""
    if question.fixed and fits(question._replace(fixed={})):
        return "another layout, as given parts of it leave none"
    for factor in FACTORS:
        more = question._replace(ranks=question.ranks * factor, fixed={})
        if fits(more):
            return f"{more.ranks} devices"
    return f"more than {question.ranks * FACTORS[-1]} devices"


def fits(question: Question) -> bool:
    """Whether any layout fits in memory."""
    return any(footprint(question.shape, layout, question.stack).total <= question.gib * GIB
               for layout in layouts(question, Counter()))


def states_of(one: Candidate) -> float:
    """Bytes of weights, gradients and optimizer of the fullest rank."""
    return one.memory.weights + one.memory.gradients + one.memory.optimizer


def changes(question: Question, plan: Plan) -> list[dict]:
    """What the step would be, and which printed layout would be first, with inputs 20 % off.

    Of the memory the layouts depend, too: the search has kept what it would choose.
    """
    pipelines = Pipelines()
    found = []
    for name, changed in INPUTS.items():
        steps = []
        for by in OFF:
            cluster = changed(question.cluster, by)
            steps.append([step_time(question.shape, one.layout, cluster, question.stack,
                                    pipelines.simulated) for one in plan.best])
        firsts = [plan.best[min(range(len(each)), key=lambda place: each[place].total)]
                  for each in steps]
        found.append({"input": name, "steps_s": [each[0].total for each in steps],
                      "first": [one.layout for one in firsts]})
    return [*found, {"input": "memory of a device",
                     "steps_s": [one.step.total if one else None for one in plan.memory],
                     "first": [one.layout if one else None for one in plan.memory]}]


def changes_table(question: Question, plan: Plan) -> str:
    """`changes` as a table; its last column is text."""
    rows, lasts = [("if this were", "20 % less: s", "20 % more: s")], ["then first"]
    for row in changes(question, plan):
        rows.append((row["input"], *(f"{seconds:.3f}" if seconds else "-"
                                     for seconds in row["steps_s"])))
        others = [f"{text}: {instead(plan.best[0].layout, layout)}"
                  for text, layout in zip(("less", "more"), row["first"], strict=True)
                  if layout != plan.best[0].layout]
        lasts.append("; ".join(others) or "the same")
    return "\n".join(map("  ".join, zip(table(rows).splitlines(), lasts, strict=True)))


def instead(first: Layout, other: Layout | None) -> str:
    """Another layout than the first in few words: its grid, or on the same grid all of it."""
    if other is None:
        return "none fits"
    return layout_words(other) if other.grid == first.grid else sizes_text(other._asdict())


def confidence(question: Question, best: Candidate) -> str:
    """How far the closed forms are from published runs that are like this one."""
    rows = [("published runs that are most like it", "measured s", "closed form s", "error %")]
    rows += [(f"{run.row['model']}, {run.layout.ranks} x {run.row['device']}, "
              + sizes_text(run.layout._asdict()), f"{run.seconds:.3f}", f"{run.predicted:.3f}",
              f"{100 * run.error:+.1f}")
             for run in nearest_runs(question.shape, best.layout, question.cluster)]
    return table(rows)


def csv_rows(question: Question, plan: Plan) -> list[list]:
    """A header, and a row for each layout, with units in the names."""
    names = [*Layout._fields, "step_s", *(f"{name}_s" for name in StepTime._fields), "memory_gib",
             "mfu_percent"]
    return [names, *([*one.layout, f"{one.step.total:.6g}",
                      *(f"{max(part, 0):.6g}" for part in one.step),
                      f"{one.memory.total / GIB:.3f}",
                      f"{100 * mfu(question, one):.2f}"] for one in plan.best)]


def as_dict(question: Question, plan: Plan, job: Job) -> dict:
    """Everything as plain values; seconds, bytes."""
    found = {
        "model": question.shape._asdict() | {"parameters": question.shape.parameters},
        "machine": question.cluster.name, "basis": question.cluster.basis,
        "ranks": question.ranks, "dtype": question.dtype, "batch_size": question.batch_size,
        "memory_gib": question.gib, "mfu_rule": question.mfu_rule, "fits": bool(plan.best),
        "layouts": [{"layout": one.layout._asdict(), "step_s": one.step.total,
                     "parts_s": one.step._asdict(), "memory_bytes": one.memory._asdict(),
                     "total_bytes": one.memory.total, "mfu": mfu(question, one),
                     "why_not_first": "" if one is plan.best[0] else why_not(plan.best[0], one)}
                    for one in plan.best],
        "fitting": plan.fitting, "simulated": plan.simulated, "rejected": plan.rejected}
    if not plan.best:
        return found | {"why_not": impossible(question, plan)}
    best = plan.best[0]
    return found | {
        "command": command_line(question, job, best.layout), "bound_by": bound_by(best.step),
        "pipeline_ranks": [{"blocks": blocks, "memory_bytes": memory._asdict(),
                            "parts_s": parts._asdict()}
                           for blocks, memory, parts in stages(question, best)],
        "changes": [row | {"first": [one and one._asdict() for one in row["first"]]}
                    for row in changes(question, plan)],
        "published": [{"row": run.row["id"], "measured_s": run.seconds,
                       "predicted_s": run.predicted, "error": run.error}
                      for run in nearest_runs(question.shape, best.layout, question.cluster)]}
