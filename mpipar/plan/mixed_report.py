"""What a plan over several kinds of devices says: who does how much, and what even stages lose."""

from __future__ import annotations

from itertools import groupby

from mpipar.config.layout import sizes_text
from mpipar.console.tables import short_count, table
from mpipar.files.text import counted
from mpipar.plan.block_time import block_times
from mpipar.plan.confirm import Job, command_line
from mpipar.plan.footprint import GIB
from mpipar.plan.mixed import Kind, MixedPlan, Uneven
from mpipar.plan.report import layout_words, rejected_lines
from mpipar.plan.search import Question


def mixed_report(question: Question, kinds: tuple[Kind, ...], plan: MixedPlan, job: Job) -> str:
    """The whole answer as text."""
    shape = question.shape
    names = " + ".join(f"{kind.ranks} x {kind.cluster.name}" for kind in kinds)
    head = (f"{shape.parameters / 1e9:.2f} billion parameters in {question.dtype},"
            f" {counted(question.batch_size, 'row')} of {shape.tokens} tokens a step, on {names}")
    if not plan.best:
        return "\n\n".join([head, "no layout over these kinds fits, or can be run",
                            others(plan), rejected_lines(plan.rejected)])
    best = plan.best[0]
    return "\n\n".join([
        head, verdict(question, best), command_line(question, job, best.layout, best.counts),
        f"the hosts must come in this order: {ranks_of(best)}", kinds_table(question, best),
        f"layouts, best first; each is the best of its grid\n{ranking(plan)}", others(plan),
        rejected_lines(plan.rejected)])


def verdict(question: Question, best: Uneven) -> str:
    """What the best layout gives, and what an even split of the blocks would."""
    seconds = best.step.total
    tokens = question.batch_size * question.shape.tokens / seconds
    even = ("an even split of the blocks does not fit" if best.even is None else
            f"an even split of the blocks takes {best.even:.3f} s,"
            f" {100 * (best.even / seconds - 1):.0f} % longer")
    return f"{seconds:.3f} s a step, {short_count(tokens)} tokens/s; {even}"


def ranks_of(one: Uneven) -> str:
    """Which ranks are on which kind, as words."""
    found, first = [], 0
    for kind in one.kinds:
        found.append(f"ranks {first} to {first + kind.ranks - 1} on {kind.cluster.name}")
        first += kind.ranks
    return ", ".join(found)


def kinds_table(question: Question, one: Uneven) -> str:
    """What each kind has to do and to hold, and what its figures rest on."""
    rows = [("devices", "pipeline ranks", "blocks of each", "ms of a block", "GiB", "may use",
             "the figures rest on")]
    for kind in one.kinds:
        own = [rank for rank, other in enumerate(one.by_rank) if other is kind]
        block = block_times(question.shape, one.layout, kind.cluster, question.stack)
        rows.append((
            f"{kind.ranks} x {kind.cluster.name}", f"{own[0]} to {own[-1]}",
            in_runs(one.counts[rank] for rank in own), f"{1e3 * block.total:.2f}",
            f"{max(one.memory[rank].total for rank in own) / GIB:.1f}", f"{kind.gib:.1f}",
            kind.cluster.basis))
    return table(rows)


def in_runs(counts) -> str:
    """Blocks of stages, equal neighbours together, as 4 x 7, 2 x 9."""
    runs = [(count, len(list(same))) for count, same in groupby(counts)]
    return ", ".join(f"{many} x {count}" if many > 1 else str(count) for count, many in runs)


def ranking(plan: MixedPlan) -> str:
    """The layouts, each beside an even split of its blocks."""
    rows = [("layout", "kinds", "blocks of the stages", "step s", "even split s", "longer %")]
    for one in plan.best:
        even = ("does not fit", "") if one.even is None else (
            f"{one.even:.3f}", f"{100 * (one.even / one.step.total - 1):.0f}")
        rows.append((layout_words(one.layout), ", ".join(kind.cluster.name for kind in one.kinds),
                     in_runs(one.counts), f"{one.step.total:.3f}", *even))
    return table(rows, left=3)


def others(plan: MixedPlan) -> str:
    """The same job on one kind alone, and with equal work for all devices."""
    def words(seconds: float | None) -> str:
        return "does not fit" if seconds is None else f"{seconds:.3f} s a step"
    rows = [(f"{name} alone", words(seconds)) for name, seconds in plan.alone.items()]
    return table([("the same batch", ""), *rows,
                  ("equal work for all, at the slowest kind's speed", words(plan.alike))])


def mixed_dict(question: Question, plan: MixedPlan) -> dict:
    """Everything as plain values; seconds, bytes."""
    return {
        "ranks": question.ranks, "dtype": question.dtype, "batch_size": question.batch_size,
        "layouts": [{
            "layout": one.layout._asdict(), "axes": sizes_text(one.layout._asdict()),
            "kinds": [{"machine": kind.cluster.name, "ranks": kind.ranks,
                       "basis": kind.cluster.basis} for kind in one.kinds],
            "stage_layers": one.counts, "step_s": one.step.total, "parts_s": one.step._asdict(),
            "even_split_s": one.even,
            "total_bytes": [found.total for found in one.memory]} for one in plan.best],
        "alone_s": plan.alone, "equal_work_s": plan.alike, "rejected": plan.rejected}
