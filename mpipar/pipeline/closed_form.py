"""Closed forms of a schedule with equal stages, to print beside the simulation.

Letters: p ranks, m microbatches, v stages per rank. g is the largest group of an interleaved
schedule, f i w are the costs of a stage, b = i + w. Sources: the papers named at the schedules.
Each form is printed only for counts and costs for which the tests find it equal to the simulation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

from mpipar.pipeline.costs import Costs
from mpipar.pipeline.instructions import Schedule
from mpipar.pipeline.schedules.looped import group_sizes


class Counts(NamedTuple):
    """p, m, v and g of a schedule."""

    p: int
    m: int
    v: int
    g: int


class Form(NamedTuple):
    """A formula as text and as a function; holds(counts, f, i, w) says whether it is valid."""

    text: str
    value: Callable
    holds: Callable = lambda n, f, i, w: True


@dataclass(frozen=True)
class ClosedForm:
    """Texts and values; a value is None where no form is known for these counts and costs.

    bubble: makespan minus the busy time of a rank, when links cost nothing. peak_stash: most
    chunk-activations on a rank; for v-half and v-min an upper bound. messages: number sent by all
    ranks together. hops: how many latencies of a link a step takes longer, while the latency is
    short.
    """

    bubble: tuple[str, Real | None]
    peak_stash: tuple[str, int]
    messages: tuple[str, int]
    hops: tuple[str, int | None]


def same(_n: Counts, f: Real, i: Real, w: Real) -> bool:
    """Equal costs of all passes."""
    return f == i == w


def many(n: Counts, _f: Real, _i: Real, _w: Real) -> bool:
    """At least a microbatch for each rank."""
    return n.m >= n.p


def many_same(n: Counts, f: Real, i: Real, w: Real) -> bool:
    """Equal costs, and enough microbatches to fill the pipeline down and up."""
    return f == i == w and n.m >= 2 * n.p - 1


FULL = Form("(p-1)(f+b)", lambda n, f, i, w: (n.p - 1) * (f + i + w))
LOOPED = FULL._replace(holds=many)
POSTPONED = Form("(p-1)max(f, i, f+i-w)", lambda n, f, i, w: (n.p - 1) * max(f, i, f + i - w), many)
NO_WAIT = Form("(p-1)f", lambda n, f, i, w: (n.p - 1) * f, many_same)
BUBBLES = {
    "naive": Form("m(p-1)(f+b)", lambda n, f, i, w: n.m * (n.p - 1) * (f + i + w)),
    "gpipe": FULL,
    "1f1b": FULL,
    "eager-1f1b": FULL,
    "interleaved": LOOPED,
    "looped-bfs": LOOPED,
    "zb-h1": POSTPONED,
    "interleaved-zb": POSTPONED,
    "zb-h2": NO_WAIT,
    "zb-v": NO_WAIT,
    "dualpipe": Form("(p/2-1)(f+2b-3w)", lambda n, f, i, w: (n.p // 2 - 1) * (f + 2 * i - w), same),
    "dualpipe-v": Form("(p-1)(f+2b-3w)", lambda n, f, i, w: (n.p - 1) * (f + 2 * i - w), same),
}
PEAKS = {
    "naive": Form("1", lambda n: 1),
    "gpipe": Form("m", lambda n: n.m),
    "1f1b": Form("min(p, m)", lambda n: min(n.p, n.m)),
    "eager-1f1b": Form("min(2p-1, m)", lambda n: min(2 * n.p - 1, n.m)),
    "interleaved": Form(
        "min(2(p-1)+(v-1)g+1, mv)",
        lambda n: min(2 * (n.p - 1) + (n.v - 1) * n.g + 1, n.m * n.v),
    ),
    "looped-bfs": Form("mv", lambda n: n.m * n.v),
    "zb-h1": Form("min(p, m)", lambda n: min(n.p, n.m)),
    "zb-h2": Form("min(2p-1, m)", lambda n: min(2 * n.p - 1, n.m)),
    "interleaved-zb": Form(
        "min(p+(v-1)g, mv)", lambda n: min(n.p + (n.v - 1) * n.g, n.m * n.v)
    ),
    "zb-v": Form("min(2p, 2m)", lambda n: min(2 * n.p, 2 * n.m)),
    "v-half": Form("<= 2((p+2) div 2)", lambda n: 2 * ((n.p + 2) // 2)),
    "v-min": Form("<= 2((p+4) div 3)", lambda n: 2 * ((n.p + 4) // 3)),
    "dualpipe": Form("p+1", lambda n: n.p + 1),
    "dualpipe-v": Form("2p+1", lambda n: 2 * n.p + 1),
}
ONE_WAY = Form("2m(p-1)", lambda n: 2 * n.m * (n.p - 1))
MESSAGES = {
    "linear": ONE_WAY,
    "mirror": ONE_WAY,
    "v": Form("4m(p-1)", lambda n: 4 * n.m * (n.p - 1)),
    "looped": Form("2m(pv-1)", lambda n: 2 * n.m * (n.p * n.v - 1) if n.p > 1 else 0),
}
THERE_AND_BACK = Form("2(p-1)", lambda n: 2 * (n.p - 1))
HOPS = {
    "naive": Form("2m(p-1)", lambda n: 2 * n.m * (n.p - 1)),
    "gpipe": THERE_AND_BACK,
    "eager-1f1b": THERE_AND_BACK,
    "looped-bfs": THERE_AND_BACK,
    "1f1b": Form("2(p-1)m/p + 2(p-2)", lambda n: 2 * (n.p - 1) * n.m // n.p + 2 * (n.p - 2)),
    "interleaved": Form("2(pv-1)", lambda n: 2 * (n.p * n.v - 1)),
    "zb-h1": Form("4(p-1)", lambda n: 4 * (n.p - 1)),
    "interleaved-zb": Form("5p-4", lambda n: 5 * n.p - 4),
    "zb-v": Form("5p-7", lambda n: 5 * n.p - 7),
    "zb-h2": Form("p-1", lambda n: n.p - 1),
}


def closed_form(schedule: Schedule, costs: Costs) -> ClosedForm | None:
    """The forms of a schedule of `make_schedule` without a group size; None for unequal stages."""
    unequal = any(isinstance(cost, tuple) for cost in (costs.f, costs.i, costs.w))
    if schedule.name not in PEAKS or unequal:
        return None
    p, m = schedule.pp_size, schedule.num_microbatches
    n = Counts(p, m, schedule.num_stages // p, group_sizes(p, m)[0])
    bubble, hops = BUBBLES.get(schedule.name), HOPS.get(schedule.name)
    peak, messages = PEAKS[schedule.name], MESSAGES[schedule.placement]
    known = bubble and costs.overlap == 1 and bubble.holds(n, costs.f, costs.i, costs.w)
    hops_known = hops and p > 1 and m >= 2 * p and m % p == 0
    hops_known = hops_known and (schedule.name != "interleaved-zb" or n.v == 2)
    return ClosedForm(
        (bubble.text, bubble.value(n, costs.f, costs.i, costs.w)) if known else ("-", None),
        (peak.text, peak.value(n)),
        (messages.text, messages.value(n)),
        (hops.text, hops.value(n)) if hops_known and many_same(n, costs.f, costs.i, costs.w)
        else ("-", None),
    )
