"""Closed formulas for schedules with equal stages, printed beside the simulation.

A formula holds only for the counts and costs for which the tests find it equal to the simulation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mpipar.pipeline.instructions import Schedule
from mpipar.pipeline.schedules.catalog import FAMILIES
from mpipar.study.schedules.simulate import Costs, Number


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
    ranks together.
    """

    bubble: Term
    peak_stash: Term
    messages: Term


class Forms(NamedTuple):
    """The formulas of a schedule that are known; see ClosedForm."""

    bubble: Form | None = None
    peak: Form | None = None


FULL = Form("(p-1)(f+b)", lambda n: (n.p - 1) * (n.f + n.b))
POSTPONED = Form(
    "(p-1)max(f, i, f+i-w)", lambda n: (n.p - 1) * max(n.f, n.i, n.f + n.i - n.w), many
)
NO_WAIT = Form("(p-1)f", lambda n: (n.p - 1) * n.f, many_same)
EVERY_RANK = Form("min(p, m)", lambda n: min(n.p, n.m))
TWICE = Form("min(2p-1, m)", lambda n: min(2 * n.p - 1, n.m))
FORMS = {
    "naive": Forms(
        Form("m(p-1)(f+b)", lambda n: n.m * (n.p - 1) * (n.f + n.b)), Form("1", lambda n: 1)
    ),
    "gpipe": Forms(FULL, Form("m", lambda n: n.m)),
    "1f1b": Forms(FULL, EVERY_RANK),
    "eager-1f1b": Forms(FULL, TWICE),
    "interleaved": Forms(
        FULL._replace(holds=many),
        Form(
            "min(2(p-1)+(v-1)g+1, mv)",
            lambda n: min(2 * (n.p - 1) + (n.v - 1) * n.g + 1, n.m * n.v),
        ),
    ),
    "looped-bfs": Forms(FULL._replace(holds=many), Form("mv", lambda n: n.m * n.v)),
    "zb-h1": Forms(POSTPONED, EVERY_RANK),
    "zb-h2": Forms(NO_WAIT, TWICE),
    "interleaved-zb": Forms(
        POSTPONED,
        Form("min(p+(v-1)g, mv)", lambda n: min(n.p + (n.v - 1) * n.g, n.m * n.v)),
    ),
    "zb-v": Forms(NO_WAIT, Form("min(2p, 2m)", lambda n: min(2 * n.p, 2 * n.m))),
    "v-half": Forms(peak=Form("<= 2((p+2) div 2)", lambda n: 2 * ((n.p + 2) // 2))),
    "v-min": Forms(peak=Form("<= 2((p+4) div 3)", lambda n: 2 * ((n.p + 4) // 3))),
    "dualpipe-v": Forms(
        Form("(p-1)(f+2b-3w)", lambda n: (n.p - 1) * (n.f + 2 * n.i - n.w), same),
        Form("2p+1", lambda n: 2 * n.p + 1),
    ),
}
MESSAGES = {  # by placement
    "linear": Form("2m(p-1)", lambda n: 2 * n.m * (n.p - 1)),
    "v": Form("4m(p-1)", lambda n: 4 * n.m * (n.p - 1)),
    "looped": Form("2m(pv-1)", lambda n: 2 * n.m * (n.p * n.v - 1) if n.p > 1 else 0),
}


def closed_form(schedule: Schedule, costs: Costs) -> ClosedForm | None:
    """Return the formulas of a schedule of the catalog; None for unequal stages and other orders.

    A schedule that is not in FORMS has those of its placement.
    """
    equal = [cost for cost in (costs.f, costs.i, costs.w) if not isinstance(cost, tuple)]
    if schedule.name not in FAMILIES or len(equal) < 3:
        return None
    n = Letters(
        schedule.pp_size, schedule.num_microbatches, schedule.num_stages // schedule.pp_size, *equal
    )
    known = FORMS.get(schedule.name, Forms())
    bubble = known.bubble if costs.overlap == 1 else None
    forms = bubble, known.peak, MESSAGES[schedule.placement]
    return ClosedForm(*(evaluated(form, n) for form in forms))
