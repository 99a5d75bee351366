"""Sites joined by a slow link: which axis should cross it, what it carries, and what that costs.

Either gradients travel between sites, once each way in a step if each site sums its own first, or
activations and their gradients, for each microbatch at a boundary of the pipeline. A link carries
the bytes of all ranks of a site together. Source of the first form: hierarchical all-reduce,
reduce-scatter inside, sum across, all-gather inside.
"""

from __future__ import annotations

from typing import NamedTuple

from mpipar.plan.search import Candidate, Question

LOSS = 0.05  # share of the step that a link may cost


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
    """An axis across the link. sent: bytes in one direction in a step. seconds: of the link.

    exposed: seconds that it adds to the step.
    """

    axis: str
    sent: float
    seconds: float
    exposed: float


def crossings(question: Question, one: Candidate, sites: Sites) -> list[Crossing]:
    """Return what each axis that can cross the link would cost, the cheapest first."""
    found = []
    if one.layout.data_ranks % sites.count == 0:
        found.append(gradients_across(question, one, sites))
    if one.layout.pp % sites.count == 0 and one.layout.pp > 1:
        found.append(stages_across(question, one, sites))
    return sorted(found, key=lambda crossing: crossing.exposed)


def gradients_across(question: Question, one: Candidate, sites: Sites) -> Crossing:
    """Return the cost of gradient sums: each site sends its own once, after the last backward
    begins.
    """
    share = (sites.count - 1) / sites.count
    sent = 2 * share * question.shape.parameters * question.stack.wire_bytes
    seconds = sent / sites.rate + 2 * sites.milliseconds * 1e-3
    window = 2 / 3 * one.step.compute / one.layout.num_microbatches
    hidden = window if question.stack.overlap else 0.0
    return Crossing("dp", sent, seconds, max(0.0, seconds - hidden))


def stages_across(question: Question, one: Candidate, sites: Sites) -> Crossing:
    """Return the cost of stages: each microbatch crosses each boundary once each way, overlapped.

    The link stalls the pipeline where a message takes longer than a rank's passes of it. The first
    and the last message are never hidden.
    """
    layout, shape = one.layout, question.shape
    message = layout.rows * shape.tokens * shape.width * layout.dp * question.stack.number_bytes
    sent = message * layout.num_microbatches
    alone = message / sites.rate + sites.milliseconds * 1e-3
    busy = (one.step.total - one.step.bubble) / layout.num_microbatches
    slower = max(0.0, message / sites.rate - busy / 2) * layout.num_microbatches
    return Crossing("pp", sent, sent / sites.rate, 2 * (sites.count - 1) * alone + slower)


def needed_gbits(question: Question, one: Candidate, sites: Sites, axis: str) -> float:
    """Return the link's rate at which an axis across it makes the step 5 % longer, by bisection."""
    low, high = 1e-3, 1e6
    for _ in range(60):
        middle = (low * high) ** 0.5
        exposed = {found.axis: found.exposed for found in crossings(
            question, one, sites._replace(gbits=middle))}[axis]
        low, high = (low, middle) if exposed <= LOSS * one.step.total else (middle, high)
    return high
