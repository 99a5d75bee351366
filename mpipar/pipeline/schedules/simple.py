"""The simple schedules on the linear placement: rank r holds stage r, and backwards run whole.

Letters: p = pp_size, r = pp_rank, m = num_microbatches.
"""

from mpipar.pipeline.instructions import Instr


def naive(_p: int, r: int, m: int) -> list[Instr]:
    """Return the naive order: one microbatch at a time goes down and up; all but one rank wait.

    p = 2, m = 2
    rank 0  F0 .. .. B0 F1 .. .. B1
    rank 1  .. F0 B0 .. .. F1 B1 ..
    """
    return [Instr(kind, r, mb) for mb in range(m) for kind in "FB"]


def gpipe(_p: int, r: int, m: int) -> list[Instr]:
    """Return GPipe: all forwards, then all backwards, with all m stashed (arXiv 1811.06965).

    p = 2, m = 3
    rank 0  F0 F1 F2 .. .. B0 B1 B2
    rank 1  .. F0 F1 F2 B0 B1 B2 ..
    """
    return [Instr(kind, r, mb) for kind in "FB" for mb in range(m)]


def one_f_one_b(p: int, r: int, m: int) -> list[Instr]:
    """Return 1F1B: p-1-r warm-up forwards, then one forward and one backward in turn (2006.09503).

    It is as fast as GPipe, but stashes at most p microbatches instead of m.

        p = 2, m = 3
        rank 0  F0 F1 .. B0 F2 B1 .. B2
        rank 1  .. F0 B0 F1 B1 F2 B2 ..
    """
    return warmed_up(r, m, p - 1 - r)


def eager_one_f_one_b(p: int, r: int, m: int) -> list[Instr]:
    """Return 1F1B with twice the warm-up, so that a message may take a pass to arrive.

    p = 2, m = 3
    rank 0  F0 F1 F2 B0 .. B1 .. B2
    rank 1  .. F0 B0 F1 B1 F2 B2 ..
    """
    return warmed_up(r, m, 2 * (p - 1 - r))


def warmed_up(stage: int, m: int, warmup: int) -> list[Instr]:
    """Return `warmup` forwards, then F and B in turn while forwards are left, then the other B."""
    forwards = [Instr("F", stage, mb) for mb in range(m)]
    program = forwards[:warmup]
    for mb in range(m):
        program += forwards[warmup + mb : warmup + mb + 1]
        program.append(Instr("B", stage, mb))
    return program
