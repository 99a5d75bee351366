"""The families of schedules by name: each row has the function that makes one, and its properties.

Letters: p = pp_size, r = pp_rank, m = num_microbatches, v = chunks (stages per rank), g = group
size. The orders are made in the other files of this folder; a row here has everything else.
"""

from collections.abc import Callable
from typing import NamedTuple

from mpipar.pipeline.instructions import Instr
from mpipar.pipeline.placements import PLACEMENTS
from mpipar.pipeline.schedules.looped import interleaved, interleaved_zb, looped_bfs
from mpipar.pipeline.schedules.simple import (
    eager_one_f_one_b,
    gpipe,
    naive,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from mpipar.pipeline.schedules.v_shape import dualpipe_v, v_half, v_min, zb_v


class Family(NamedTuple):
    """How a schedule is made and what is known about it.

    order: the passes of one rank, order(p, r, m), or order(p, r, m, v, g) where v is free.
    placement: a row of PLACEMENTS. grouped: whether the order uses g. split: whether each backward
    is split into I and W. rounds: the order needs at least rounds * p microbatches.
    """

    order: Callable[..., list[Instr]]
    placement: str = "linear"
    grouped: bool = False
    split: bool = False
    rounds: int = 0

    @property
    def looped(self) -> bool:
        """Whether the number of chunks is free."""
        return PLACEMENTS[self.placement].free

    @property
    def stages_per_rank(self) -> int:
        """num_stages / p; where that is free, its default."""
        return PLACEMENTS[self.placement].chunks


FAMILIES = {
    "naive": Family(naive),
    "gpipe": Family(gpipe),
    "1f1b": Family(one_f_one_b),
    "eager-1f1b": Family(eager_one_f_one_b),
    "interleaved": Family(interleaved, "looped", grouped=True),
    "looped-bfs": Family(looped_bfs, "looped"),
    "zb-h1": Family(zb_h1, split=True),
    "zb-h2": Family(zb_h2, split=True),
    "interleaved-zb": Family(interleaved_zb, "looped", grouped=True, split=True),
    "zb-v": Family(zb_v, "v", split=True),
    "v-half": Family(v_half, "v", split=True),
    "v-min": Family(v_min, "v", split=True),
    "dualpipe-v": Family(dualpipe_v, "v", rounds=2),
}
SCHEDULES = tuple(FAMILIES)


def num_stages(name: str, pp_size: int, chunks: int | None = None) -> int:
    """Return the number of stages of the model; only the looped placement uses `chunks`."""
    return pp_size * (chunks or FAMILIES[name].stages_per_rank)
