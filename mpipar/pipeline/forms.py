"""Closed formulas for schedules with equal stages, printed beside the simulation.

A formula is in the row of its schedule or placement. It is printed only for the counts and costs
for which the tests find it equal to the simulation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

Number = int | float | Fraction  # a time or a size; exact as long as no float is involved


class Letters(NamedTuple):
    """The quantities in formulas.

    p ranks, m microbatches, v stages per rank. f, i, w: the costs of a stage, and b = i + w. g: the
    number of microbatches in the largest group of an interleaved schedule (see `group_sizes`).
    """

    p: int
    m: int
    v: int = 1
    f: Number = 1
    i: Number = 1
    w: Number = 1

    @property
    def b(self) -> Number:
        return self.i + self.w

    @property
    def g(self) -> int:
        return -(-self.m // max(1, self.m // self.p))


def always(_n: Letters) -> bool:
    """Accept any counts and costs."""
    return True


def same(n: Letters) -> bool:
    """Accept equal costs of all passes."""
    return n.f == n.i == n.w


def many(n: Letters) -> bool:
    """Accept at least one microbatch per rank."""
    return n.m >= n.p


def many_same(n: Letters) -> bool:
    """Accept equal costs, and enough microbatches to fill the pipeline down and up."""
    return same(n) and n.m >= 2 * n.p - 1


def steady(n: Letters) -> bool:
    """Accept equal costs, and whole rounds of enough microbatches to fill the pipeline."""
    return same(n) and n.p > 1 and n.m >= 2 * n.p and n.m % n.p == 0


class Form(NamedTuple):
    """A formula as text and as a function, and the condition under which it is valid."""

    text: str
    value: Callable[[Letters], Number]
    holds: Callable[[Letters], bool] = always


Term = tuple[str, Number | None]  # a formula's text and value; ("-", None) where none is known


def evaluated(form: Form | None, n: Letters) -> Term:
    """Return the text and the value of a formula, if it is valid here."""
    return (form.text, form.value(n)) if form is not None and form.holds(n) else ("-", None)


@dataclass(frozen=True)
class ClosedForm:
    """The numbers of a step as formulas.

    bubble: makespan minus the busy time of a rank, when links cost nothing. peak_stash: most
    chunk-activations on a rank; for v-half and v-min an upper bound. messages: number sent by all
    ranks together. hops: how many link latencies are added to a step, as long as the latency is
    short.
    """

    bubble: Term
    peak_stash: Term
    messages: Term
    hops: Term
