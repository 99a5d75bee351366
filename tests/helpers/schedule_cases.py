"""Helpers of the schedule tests: random counts, and the passes of a rank."""

from hypothesis import strategies as st

from mpipar.pipeline.instructions import is_compute
from mpipar.pipeline.schedules.catalog import SCHEDULES

LOOPED = ("interleaved", "looped-bfs", "interleaved-zb")


@st.composite
def counts(draw, max_p=6, max_m=18):
    """(name, p, m, chunks) that the schedule accepts."""
    name = draw(st.sampled_from(SCHEDULES))
    p = draw(st.integers(1, max_p))
    m = draw(st.integers(1, max_m))
    chunks = draw(st.integers(1, 4)) if name in LOOPED else None
    if name == "dualpipe-v":
        m = max(m, 2 * p)
    return name, p, m, chunks


def compute(schedule, pp_rank):
    return [instr for instr in schedule.programs[pp_rank] if is_compute(instr)]
