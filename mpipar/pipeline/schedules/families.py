"""The families of schedules by name: each row has the function that makes one, and its properties.

Letters: p = pp_size, r = pp_rank, m = num_microbatches, v = chunks (stages per rank), g = group
size. The orders are made in the other files of this folder; a row here has everything else.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from mpipar.pipeline.forms import Form, many, many_same, same, steady
from mpipar.pipeline.instructions import Instr
from mpipar.pipeline.placements import PLACEMENTS
from mpipar.pipeline.schedules.dualpipe import dualpipe, dualpipe_v
from mpipar.pipeline.schedules.looped import interleaved, interleaved_zb, looped_bfs
from mpipar.pipeline.schedules.simple import (
    eager_one_f_one_b,
    gpipe,
    naive,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from mpipar.pipeline.schedules.v_shape import v_half, v_min, zb_v


class Family(NamedTuple):
    """How a schedule is made and what is known about it.

    order: the passes of one rank, order(p, r, m), or order(p, r, m, v, g) where v is free.
    placement: a row of PLACEMENTS. grouped: whether the order uses g. split: whether each backward
    is split into I and W. early: whether backwards begin so early that a rank stashes at least one
    microbatch less than the rank before it. rounds: the order needs at least rounds * p
    microbatches.

    bubble, peak, hops: see ClosedForm. planned: whether `mpipar plan` searches it. published: {name
    of the schedule of a published run that keeps as much of as many microbatches: its bubble}.
    """

    order: Callable[..., list[Instr]]
    placement: str = "linear"
    grouped: bool = False
    split: bool = False
    early: bool = False
    rounds: int = 0
    bubble: Form | None = None
    peak: Form | None = None
    hops: Form | None = None
    planned: bool = False
    published: Mapping[str, Form] = {}

    @property
    def looped(self) -> bool:
        """Whether the number of chunks is free."""
        return PLACEMENTS[self.placement].free

    @property
    def stages_per_rank(self) -> int:
        """num_stages / p; where that is free, its default."""
        return PLACEMENTS[self.placement].chunks


FULL = Form("(p-1)(f+b)", lambda n: (n.p - 1) * (n.f + n.b))
POSTPONED = Form(
    "(p-1)max(f, i, f+i-w)", lambda n: (n.p - 1) * max(n.f, n.i, n.f + n.i - n.w), many
)
NO_WAIT = Form("(p-1)f", lambda n: (n.p - 1) * n.f, many_same)
NO_BUBBLE = Form("0", lambda n: 0)  # the next step begins before this one has ended everywhere
ALL = Form("mv", lambda n: n.m * n.v)
EVERY_RANK = Form("min(p, m)", lambda n: min(n.p, n.m))
TWICE = Form("min(2p-1, m)", lambda n: min(2 * n.p - 1, n.m))
THERE_AND_BACK = Form("2(p-1)", lambda n: 2 * (n.p - 1), steady)
FAMILIES = {
    "naive": Family(
        naive,
        peak=Form("1", lambda n: 1),
        bubble=Form("m(p-1)(f+b)", lambda n: n.m * (n.p - 1) * (n.f + n.b)),
        hops=Form("2m(p-1)", lambda n: 2 * n.m * (n.p - 1), steady),
    ),
    "gpipe": Family(gpipe, bubble=FULL, peak=Form("m", lambda n: n.m), hops=THERE_AND_BACK),
    "1f1b": Family(
        one_f_one_b,
        early=True,
        bubble=FULL,
        peak=EVERY_RANK,
        planned=True,
        published={"none": FULL},
        hops=Form(
            "2(p-1)m/p + 2(p-2)", lambda n: 2 * (n.p - 1) * n.m // n.p + 2 * (n.p - 2), steady
        ),
    ),
    "eager-1f1b": Family(eager_one_f_one_b, bubble=FULL, peak=TWICE, hops=THERE_AND_BACK),
    "interleaved": Family(
        interleaved,
        "looped",
        grouped=True,
        early=True,
        planned=True,
        bubble=FULL._replace(holds=many),
        peak=Form(
            "min(2(p-1)+(v-1)g+1, mv)",
            lambda n: min(2 * (n.p - 1) + (n.v - 1) * n.g + 1, n.m * n.v),
        ),
        hops=Form("2(pv-1)", lambda n: 2 * (n.p * n.v - 1), steady),
    ),
    "looped-bfs": Family(
        looped_bfs, "looped", bubble=FULL._replace(holds=many), peak=ALL, hops=THERE_AND_BACK
    ),
    "zb-h1": Family(
        zb_h1,
        split=True,
        bubble=POSTPONED,
        peak=EVERY_RANK,
        planned=True,
        published={"zb-1p": POSTPONED},
        hops=Form("4(p-1)", lambda n: 4 * (n.p - 1), steady),
    ),
    "zb-h2": Family(
        zb_h2,
        split=True,
        bubble=NO_WAIT,
        peak=TWICE,
        planned=True,
        published={"zb-2p": NO_BUBBLE},
        hops=Form("p-1", lambda n: n.p - 1, steady),
    ),
    "interleaved-zb": Family(
        interleaved_zb,
        "looped",
        grouped=True,
        split=True,
        bubble=POSTPONED,
        peak=Form("min(p+(v-1)g, mv)", lambda n: min(n.p + (n.v - 1) * n.g, n.m * n.v)),
        hops=Form("5p-4", lambda n: 5 * n.p - 4, lambda n: steady(n) and n.v == 2),
    ),
    "zb-v": Family(
        zb_v,
        "v",
        split=True,
        bubble=NO_WAIT,
        planned=True,
        peak=Form("min(2p, 2m)", lambda n: min(2 * n.p, 2 * n.m)),
        hops=Form("5p-7", lambda n: 5 * n.p - 7, steady),
    ),
    "v-half": Family(
        v_half, "v", split=True, peak=Form("<= 2((p+2) div 2)", lambda n: 2 * ((n.p + 2) // 2))
    ),
    "v-min": Family(
        v_min, "v", split=True, peak=Form("<= 2((p+4) div 3)", lambda n: 2 * ((n.p + 4) // 3))
    ),
    "dualpipe": Family(
        dualpipe,
        "mirror",
        rounds=2,
        peak=Form("p+1", lambda n: n.p + 1),
        bubble=Form("(p/2-1)(f+2b-3w)", lambda n: (n.p // 2 - 1) * (n.f + 2 * n.i - n.w), same),
    ),
    "dualpipe-v": Family(
        dualpipe_v,
        "v",
        rounds=2,
        peak=Form("2p+1", lambda n: 2 * n.p + 1),
        bubble=Form("(p-1)(f+2b-3w)", lambda n: (n.p - 1) * (n.f + 2 * n.i - n.w), same),
    ),
}
SCHEDULES = tuple(FAMILIES)


def num_stages(name: str, pp_size: int, chunks: int | None = None) -> int:
    """Return the number of stages of the model; only the looped placement uses `chunks`."""
    return pp_size * (chunks or FAMILIES[name].stages_per_rank)
