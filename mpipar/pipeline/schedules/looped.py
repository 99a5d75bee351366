"""Schedules on the looped placement: each rank holds v stages, stage s on rank s mod p.

Letters: p = pp_size, r = pp_rank, m = num_microbatches, v = chunks (stages per rank).
Chunk c of rank r is stage c*p + r.
"""

from mpipar.pipeline.instructions import Instr
from mpipar.pipeline.schedules.simple import passes, warmed_up


def group_sizes(p: int, m: int) -> list[int]:
    """Return how many microbatches pass through one chunk before the next chunk's turn.

    There are max(1, m div p) groups, so that any m can be run. They are as even as possible, the
    larger ones first, and have p microbatches each when p divides m.
    """
    rounds = max(1, m // p)
    return [m // rounds + (k < m % rounds) for k in range(rounds)]


def both_ways(
    backward: str, p: int, r: int, m: int, v: int
) -> tuple[list[Instr], list[Instr], int]:
    """Return the forwards of a rank, its backwards of this kind, and the size of the first group.

    A group goes through chunk 0, then chunk 1 and so on, before the next group starts. Backwards
    visit v-1-chunk instead.
    """
    groups, order, first = group_sizes(p, m), [], 0
    for size in groups:
        order += [(chunk, mb) for chunk in range(v) for mb in range(first, first + size)]
        first += size
    return (
        [Instr("F", chunk * p + r, mb) for chunk, mb in order],
        [Instr(backward, (v - 1 - chunk) * p + r, mb) for chunk, mb in order],
        groups[0],
    )


def interleaved(p: int, r: int, m: int, v: int) -> list[Instr]:
    """Return interleaved 1F1B: 1F1B over (chunk, mb) pairs, a v times smaller bubble (2104.04473).

    In this example stages 0 and 2 are on rank 0, stages 1 and 3 on rank 1.

        p = 2, v = 2, m = 2
        rank 0  0F0 0F1 2F0 2F1 ... 2B0 ... 2B1 0B0 0B1
        rank 1  ... 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    forwards, backwards, group = both_ways("B", p, r, m, v)
    return warmed_up(forwards, backwards, 2 * (p - 1 - r) + (v - 1) * group)


def interleaved_zb(p: int, r: int, m: int, v: int) -> list[Instr]:
    """Return interleaved ZB1P: one warm-up forward per hop, W delayed by r passes (2401.10241).

    A rank's delayed W fill the time in which interleaved 1F1B drains.

        p = 2, v = 2, m = 2
        rank 0  0F0 0F1 2F0 2F1 ... 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
        rank 1  ... 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    forwards, inputs, group = both_ways("I", p, r, m, v)
    weights = [one._replace(kind="W") for one in inputs]
    return warmed_up(forwards, inputs, p - 1 - r + (v - 1) * group, weights, late=r)


def looped_bfs(p: int, r: int, m: int, v: int) -> list[Instr]:
    """Return a breadth-first order: all microbatches through chunk 0, then chunk 1 (2211.05953).

    Backwards run newest first. A stage's weights are in use during one run of m forwards and one of
    m backwards, so sharded weights would need the fewest gathers.

        p = 2, v = 2, m = 2
        rank 0  0F0 0F1 2F0 2F1 ... ... 2B1 2B0 0B1 0B0
        rank 1  ... 1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
    """
    forwards = [one for chunk in range(v) for one in passes("F", chunk * p + r, m)]
    return forwards + [one._replace(kind="B") for one in reversed(forwards)]
