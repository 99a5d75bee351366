"""The choice of number format: each one that a machine has a rate for is searched or ruled out."""

from __future__ import annotations

from mpipar.plan.block_time import product_rate
from mpipar.plan.footprint import GIB
from mpipar.plan.search import Plan, Question, search

FORMATS = ("float32", "float16", "bfloat16")  # mpipar trains in them, and data sheets have rates


def search_formats(
    question: Question, count: int = 5, tell=lambda text: None
) -> tuple[Question, Plan]:
    """Return the question in the format with the shortest step, and its plan.

    question: in the format that is searched first. The plan counts the layouts in other formats as
    rejected. Where nothing fits in any format, the first one answers.
    """
    plan, rejected = search(question, count, tell), {}
    for dtype in other_formats(question) if layouts_of(plan) else ():
        other = in_format(question, dtype)
        least = least_seconds(other)
        if plan.best and plan.best[0].step.total <= least:
            rejected[f"{dtype}: its products alone take {least:.3f} s"] = layouts_of(plan)
            continue
        lost, found = other, search(other, count, tell)
        if found.best and (not plan.best or found.best[0].step.total < plan.best[0].step.total):
            lost, question, found, plan = question, other, plan, found
        rejected[f"{lost.dtype}: {in_short(found)}"] = layouts_of(found)
    return question, plan._replace(rejected=plan.rejected | rejected)


def other_formats(question: Question) -> list[str]:
    """Return formats whose rates or bytes differ on these machines from the question's."""

    def facts(dtype: str) -> tuple:
        return rates(dtype), question.stack.with_dtype(dtype)

    def rates(dtype: str) -> tuple[float | None, ...]:
        return tuple(kind.cluster.peak_tflops.get(dtype) for kind in question.kinds)

    known = {facts(dtype): dtype for dtype in FORMATS if None not in rates(dtype)}
    return [dtype for facts_of_it, dtype in known.items() if facts_of_it != facts(question.dtype)]


def in_format(question: Question, dtype: str) -> Question:
    """Return a 16-bit question in another format."""
    return question._replace(stack=question.stack.with_dtype(dtype), dtype=dtype).changed(
        lambda kind: kind._replace(cluster=kind.cluster.with_dtype(dtype))
    )


def least_seconds(question: Question) -> float:
    """Return the seconds of the products of weights alone, on devices that are never idle."""
    shape = question.shape
    weights = shape.layers * shape.passed_parameters + shape.vocab * shape.width
    rate = sum(kind.ranks * product_rate(kind.cluster, question.stack) for kind in question.kinds)
    return 6 * question.batch_size * shape.tokens * weights / rate


def layouts_of(plan: Plan) -> int:
    """Return how many layouts can be run, whether they fit or not."""
    return plan.fitting + plan.rejected.get("does not fit in memory", 0)


def in_short(plan: Plan) -> str:
    """Return what a format that was not chosen achieves."""
    if plan.best:
        return f"a step takes {plan.best[0].step.total:.3f} s or more"
    return f"needs {plan.least.memory.total / GIB:.1f} GiB or more, and does not fit"
