"""Sites joined by a slow link: which axis should cross it, what it carries, and what that costs.

Either gradients travel between sites, once each way in a step if each site sums its own first, or
activations and their gradients, for each microbatch wherever a stage and the next one are in
different sites. A link carries the bytes of all ranks of a site together. Source of the first form:
hierarchical all-reduce, reduce-scatter inside, sum across, all-gather inside. Sharded weights (zero
3) travel twice for each microbatch, and their gradients once.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import NamedTuple

from mpipar.plan.layout import Layout
from mpipar.plan.search import Candidate, Question

LOSS = 0.05  # share of the step that a link may cost
FASTEST = 1e6  # Gbit/s


class Sites(NamedTuple):
    """The number of sites, and the link of each: its rate, and its latency one way."""

    count: int
    gbits: float
    milliseconds: float

    @property
    def rate(self) -> float:
        """Bytes per second in one direction."""
        return self.gbits * 1e9 / 8


class Crossing(NamedTuple):
    """An axis across the link. sent: bytes that a site sends in a step. seconds: of the link.

    exposed: seconds that it adds to the step.
    """

    axis: str
    sent: float
    seconds: float
    exposed: float


def crossings(question: Question, one: Candidate, sites: Sites) -> list[Crossing]:
    """Return what each axis that can cross the link would cost, the cheapest first.

    Only gradients cross it with dp: groups of cp, tp and ep stay in a site.
    """
    found, layout = [], one.layout
    if layout.dp % sites.count == 0 and layout.data_ranks // sites.count % layout.ep == 0:
        found.append(gradients_across(question, one, sites))
    if layout.pp % sites.count == 0:
        found.append(stages_across(question, one, sites))
    return sorted(found, key=lambda crossing: crossing.exposed)


def gradients_across(question: Question, one: Candidate, sites: Sites) -> Crossing:
    """Return the cost of gradient sums: each site sends its own once, after the last backward
    begins; sharded weights travel all the time.
    """
    share, stack = (sites.count - 1) / sites.count, question.stack
    m, wire = one.layout.num_microbatches, stack.wire_bytes
    sharded = one.layout.zero > 2
    moved = m * (2 * stack.number_bytes + wire) if sharded else 2 * wire
    sent = share * question.shape.parameters * moved
    seconds = sent / sites.rate + 2 * sites.milliseconds * 1e-3
    window = one.step.compute * (1 if sharded else 2 / 3 / m)
    hidden = window if stack.overlap else 0.0
    return Crossing("dp", sent, seconds, max(0.0, seconds - hidden))


def stages_across(question: Question, one: Candidate, sites: Sites) -> Crossing:
    """Return the cost of stages: each microbatch crosses each boundary once each way, overlapped.

    The link stalls the pipeline where its messages take longer than a rank's passes of them. The
    first message across each boundary and the last one are never hidden.
    """
    layout, shape = one.layout, question.shape
    crossed, most = boundaries(layout, sites.count)
    message = layout.rows * shape.tokens * shape.width * layout.dp * question.stack.number_bytes
    sent = most * message * layout.num_microbatches
    alone = message / sites.rate + sites.milliseconds * 1e-3
    busy = (one.step.total - one.step.bubble) / layout.num_microbatches
    slower = max(0.0, most * message / sites.rate - busy / 2) * layout.num_microbatches
    return Crossing("pp", sent, sent / sites.rate, 2 * crossed * alone + slower)


def boundaries(layout: Layout, count: int) -> tuple[int, int]:
    """Return (neighbouring stages in different sites, most messages of a microbatch from a site).

    A stage sends an activation to the next one, which sends back its gradient.
    """
    site = [layout.rank_of(stage) * count // layout.pp for stage in range(layout.stages)]
    crossing = [(one, two) for one, two in itertools.pairwise(site) if one != two]
    return len(crossing), max(Counter(itertools.chain(*crossing)).values(), default=0)


def needed_gbits(question: Question, one: Candidate, sites: Sites, axis: str) -> float:
    """Return the link's rate at which an axis across it makes the step 5 % longer, by bisection.

    Infinite where its latency alone costs more.
    """

    def lost(gbits: float) -> float:
        found = crossings(question, one, sites._replace(gbits=gbits))
        return next(each.exposed for each in found if each.axis == axis) / one.step.total

    low, high = 1e-3, FASTEST
    if lost(high) > LOSS:
        return math.inf
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if lost(middle) <= LOSS else (middle, high)
    return high
