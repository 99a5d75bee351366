"""The text of a plan: layout and command, what fills and bounds it, and why others lose."""

import csv
import math
import textwrap
from importlib.resources import files
from itertools import zip_longest
from typing import NamedTuple

from mpipar.comm.grid import AXES
from mpipar.config.grid import axes_text, sizes_text
from mpipar.config.sections import Config, settings
from mpipar.config.setting import flag
from mpipar.config.text import counted
from mpipar.run.console.tables import WIDTH, short_count, table, table_with_words
from mpipar.study.plan.job import SPREAD, Layout, config_of, utilization
from mpipar.study.plan.memory import GIB
from mpipar.study.plan.model import Step, step_time
from mpipar.study.plan.search import (
    Candidate,
    Plan,
    Question,
    nodes_of_data,
    search,
    ways_across,
    within_error,
)

PARTS = {
    "products": "matmuls",
    "attention": "attention",
    "elementwise": "elementwise operations",
    "waits": "launches of operations",
    "again": "forward passes again",
    "tp": "tp barriers",
    "cp": "cp messages",
    "ep": "exchanges of experts' tokens",
    "bubble": "idle in the pipeline",
    "hops": "messages between stages",
    "sums": "gradient sums and gathers",
    "update": "update",
    "capped": "what no measured step does without",
}
ALWAYS = ("products", "attention", "elementwise", "waits", "capped")  # no layout removes them
SLOWER = {  # two rows of sensitivity: (how fast links in nodes are, and those between them)
    "a network between nodes half as fast": (1.0, 0.5),
    "links in a node half as fast": (0.5, 1.0),
}
LONGEST = 90  # characters per line of a command
FACTORS = (2, 4, 8, 16, 32, 64)  # of the number of devices, to try where nothing fits


class Job(NamedTuple):
    """The job of a plan: a Config that names the model, and the flags that select it in train."""

    config: Config
    flags: str


def report(question: Question, plan: Plan, job: Job) -> str:
    """Return the whole answer as text, the verdict first."""
    shape, machine = question.shape, question.machine
    head = (
        f"{shape.parameters / 1e9:.2f} billion parameters in {question.dtype},"
        f" {counted(question.batch_size, 'sequence')} of {shape.seq_len} tokens a step, on"
        f" {question.ranks} x {machine.name} ({machine.basis})"
    )
    head = textwrap.fill(head, WIDTH)
    if not plan.best:
        return f"{impossible(question)}\n\n{head}"
    best = plan.best[0]
    blocks = (
        verdict(question, plan),
        command_line(question, job, best),
        head,
        parts_table(best),
        f"layouts, each the best of its grid\n{ranking(question, plan)}",
        across_sites(question, job),
        sensitivity(question, plan),
        confidence(question, best),
    )
    return "\n\n".join(filter(None, blocks))


def verdict(question: Question, plan: Plan) -> str:
    """Return the layout, its step, its utilization beside the best measured, and its memory."""
    best, machine = plan.best[0], question.machine
    tokens = question.batch_size * question.shape.seq_len / best.step.total
    share, known = 100 * mfu(question, best), machine.best_mfu
    how = "mpipar's own step, on shapes" if question.stack.own else "in closed form"
    beside = f"best measured on {machine.name}: {known:.1f} %" if known else "none is measured"
    lines = [
        words_of(best.layout),
        (
            f"{best.step.total:.4g} s a step, {short_count(tokens)} tokens/s, MFU up to"
            f" {share:.1f} % ({beside})"
        ),
        (
            f"{best.memory.total / GIB:.1f} of {question.gib:.1f} GiB on the fullest rank ({how});"
            f" bound by {PARTS[bound_by(best.step)]}"
        ),
    ]
    lines += ["the MFU is beyond any published run"] * (0 < known < share)
    if plan.tied:
        lines.append(
            f"{words_of(plan.tied.layout)} is as fast within the model's error"
            f" ({SPREAD:g} %), but sums gradients over"
            f" {nodes_of_data(question, plan.tied.layout)} nodes instead of"
            f" {nodes_of_data(question, best.layout)}"
        )
    return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


def mfu(question: Question, one: Candidate) -> float:
    """Return the share of the devices' peak."""
    flops, peaks = question.shape.step_flops(question.batch_size), question.machine.peak_tflops
    return utilization(flops, one.step.total, question.ranks, peaks[question.dtype])


def bound_by(step: Step) -> str:
    """Return the part of a step that takes longest, among those that a layout can change."""
    parts = step._asdict()
    largest = max((name for name in PARTS if name not in ALWAYS), key=parts.__getitem__)
    return largest if parts[largest] > 0.1 * step.total else max(ALWAYS, key=parts.__getitem__)


def words_of(one: Layout) -> str:
    """Return a layout in words."""
    chunks = f" with {one.chunks} chunks" if one.family.looped else ""
    words = (
        (True, sizes_text(one._asdict())),
        (one.pp > 1, f"{one.schedule}{chunks}"),
        (True, f"{one.num_microbatches} x {counted(one.rows, 'sequence')}"),
        (one.sequence_parallel, "sequence parallel"),
        (one.zero, f"zero {one.zero}"),
        (one.recompute != "none", f"recompute {one.recompute}"),
        (one.outer == "dp", "replicas outermost"),
    )
    return ", ".join(text for said, text in words if said)


def parts_table(best: Candidate) -> str:
    """Return the step's seconds by part, and what fills the fullest rank."""
    rows = [
        (PARTS[name], f"{one:.3g}", f"{100 * one / best.step.total:.1f} %")
        for name, one in best.step._asdict().items()
        if one > 0
    ]
    held = [(name, f"{one / GIB:.2f}") for name, one in best.memory._asdict().items()]
    both = [(*left, *right[:2]) for left, right in zip_longest(rows, held, fillvalue=("", "", ""))]
    return table([("a step's seconds", "", "", "GiB of the fullest rank", ""), *both])


def ranking(question: Question, plan: Plan) -> str:
    """Return the layouts with the model's step, memory and the reason why they are not first."""
    rows = [("model's s a step", "MFU %", "GiB", "layout: why not first")]
    rows += [
        (
            f"{one.step.modelled:.4g}",
            f"{100 * mfu(question, one):.1f}",
            f"{one.memory.total / GIB:.1f}",
            words_of(one.layout) + (f": {why_not(question, plan.best[0], one)}" if number else ""),
        )
        for number, one in enumerate(plan.best)
    ]
    return table_with_words(rows, left=0)


def why_not(question: Question, first: Candidate, other: Candidate) -> str:
    """Return what makes another layout slower, or why it is not first all the same."""
    apart = {
        name: getattr(other.step, name) - getattr(first.step, name)
        for name in PARTS
        if name != "capped"
    }
    if other.step.modelled <= first.step.modelled:
        return f"sums over {nodes_of_data(question, other.layout)} nodes"
    name = max(apart, key=apart.__getitem__)
    return f"+{apart[name]:.2g} s {PARTS[name]}"


def sensitivity(question: Question, plan: Plan) -> str:
    """Return what the step would be on slower links, and which of the layouts would be first."""
    lines = []
    for name, (inner, outer) in SLOWER.items():
        if question.ranks > (question.machine.per_node if inner == 1 else 1):
            machine = question.machine.with_links(inner, outer)
            best, *others = (
                one._replace(step=step_time(question.shape, one.layout, machine, question.stack))
                for one in plan.best
            )
            first = min([best, *others], key=lambda one: one.step.modelled)
            stays = best.step.modelled <= within_error(first)
            other = f"first is {words_of(first.layout)} with {first.step.modelled:.4g} s"
            then = "it stays first" if stays else other
            text = f"with {name} its step takes {best.step.modelled:.4g} s by the model, and {then}"
            lines.append(textwrap.fill(text, WIDTH, subsequent_indent="  "))
    return "\n".join(lines)


def across_sites(question: Question, job: Job) -> str:
    """Return data parallelism across the slowest of three levels of links beside islands."""
    ways = ways_across(question, job.config)
    rows = [("across the slowest links", "s a step", "GiB from a site", "layout")]
    for layout, interval, seconds, moved in ways:
        islands = question.ranks // question.machine.links[-2].joins
        words = f"--islands {islands} --outer-interval {interval}" if interval else "one run"
        rows.append((words, f"{seconds:.4g}", f"{moved / GIB:.3g}", words_of(layout)))
    text = f"{table_with_words(rows)}\nislands are another run, with a held-out loss to compare"
    return text if ways else ""


def impossible(question: Question) -> str:
    """Return that no layout fits, and how many devices would do."""
    text = f"no layout fits that can be run: {question.gib:.1f} GiB are there for each device"
    more = (question._replace(ranks=factor * question.ranks) for factor in FACTORS)
    enough = next((one.ranks for one in more if search(one, 1).best), None)
    return f"{text}; on {enough} devices one does" if enough else text


# --- the command


def command_line(question: Question, job: Job, one: Candidate) -> str:
    """Return the command that trains with a candidate."""
    wanted = config_of(
        job.config, question.shape, one.layout, question.dtype, question.machine.device
    )
    before = {field.name: value for _, field, value in settings(job.config)}
    words = [
        as_typed(field.name, value).replace(" ", "\0")  # a flag and its value stay on one line
        for _, field, value in settings(wanted)
        if field.name not in (*AXES, "ep") and value not in (None, before.get(field.name))
    ]
    layout = axes_text(one.layout._asdict())
    first = f"mpiexec -n {question.ranks} mpipar train {job.flags} --layout {layout}"
    lines = textwrap.wrap(" ".join(words), LONGEST, break_long_words=False, break_on_hyphens=False)
    return " \\\n    ".join([first, *lines]).replace("\0", " ")


def as_typed(name: str, value: object) -> str:
    """Return a setting as a flag."""
    if isinstance(value, bool):
        return flag(name) if value else f"--no-{flag(name)[2:]}"
    return f"{flag(name)} {','.join(map(str, value)) if isinstance(value, tuple) else value}"


# --- how sure: published runs that are most like it


def confidence(question: Question, best: Candidate) -> str:
    """Return the evidence for the stack, and the published runs that are most like the answer."""
    line = textwrap.fill(
        f"how sure: half of the stack's published steps are within {SPREAD:g} % of the model;"
        f" {question.stack.evidence}",
        WIDTH,
    )
    rows = [
        (one["job"], one["step_s"], one["mfu_percent"], one["source"])
        for one in nearest_runs(question, best.layout)
    ]
    head = ("published runs that are most like it", "measured s", "MFU %", "source")
    return f"{line}\n{table_with_words([head, *rows])}"


def nearest_runs(question: Question, layout: Layout, count: int = 3) -> list[dict[str, str]]:
    """Return published runs of similar device, size, ranks and software."""
    rows = (files("mpipar.study.plan") / "runs.csv").read_text("utf-8").splitlines()

    def distance(row: dict[str, str]) -> float:
        pairs = (
            (question.shape.parameters, 1e9 * float(row["parameters_1e9"])),
            (layout.ranks, float(row["ranks"])),
            (layout.tp, float(row["tp"])),
            (layout.pp, float(row["pp"])),
        )
        other = (row["stack"] == "fsdp") != question.stack.every_other
        sizes = sum(abs(math.log2(one / two)) for one, two in pairs)
        return sizes + 8 * other + 4 * (row["machine"] != question.machine.name)

    return sorted(csv.DictReader(rows), key=distance)[:count]


def as_dict(question: Question, plan: Plan, job: Job) -> dict[str, object]:
    """Return everything as plain values; seconds, bytes."""
    found: dict[str, object] = {
        "parameters": question.shape.parameters,
        "machine": question.machine.name,
        "ranks": question.ranks,
        "memory_gib": question.gib,
        "dtype": question.dtype,
        "batch_size": question.batch_size,
        "fits": bool(plan.best),
        "best_measured_mfu": question.machine.best_mfu / 100 or None,
        "layouts": [
            {
                "layout": one.layout._asdict(),
                "stage_layers": one.layout.blocks_of(question.shape.layers),
                "step_s": one.step.total,
                "parts_s": one.step._asdict(),
                "memory_bytes": one.memory._asdict(),
                "total_bytes": one.memory.total,
                "mfu": mfu(question, one),
                "why_not_first": why_not(question, plan.best[0], one) if number else "",
            }
            for number, one in enumerate(plan.best)
        ],
    }
    if not plan.best:
        return found | {"why_not": impossible(question)}
    best = plan.best[0]
    return found | {
        "command": command_line(question, job, best),
        "bound_by": bound_by(best.step),
        "across_sites": [
            {"layout": layout._asdict(), "interval": interval, "step_s": step, "site_bytes": moved}
            for layout, interval, step, moved in ways_across(question, job.config)
        ],
        "published": nearest_runs(question, best.layout),
    }
