"""The schedules on the linear placement: rank r holds stage r.

Letters: p = pp_size, r = pp_rank, m = num_microbatches.
"""

from collections.abc import Sequence

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
    return passes("F", r, m) + passes("B", r, m)


def one_f_one_b(p: int, r: int, m: int) -> list[Instr]:
    """Return 1F1B: p-1-r warm-up forwards, then one forward and one backward in turn (2006.09503).

    It is as fast as GPipe, but stashes at most p microbatches instead of m.

        p = 2, m = 3
        rank 0  F0 F1 .. B0 F2 B1 .. B2
        rank 1  .. F0 B0 F1 B1 F2 B2 ..
    """
    return warmed_up(passes("F", r, m), passes("B", r, m), p - 1 - r)


def eager_one_f_one_b(p: int, r: int, m: int) -> list[Instr]:
    """Return 1F1B with twice the warm-up, so that a message may take a pass to arrive.

    p = 2, m = 3
    rank 0  F0 F1 F2 B0 .. B1 .. B2
    rank 1  .. F0 B0 F1 B1 F2 B2 ..
    """
    return warmed_up(passes("F", r, m), passes("B", r, m), 2 * (p - 1 - r))


def zb_h1(p: int, r: int, m: int) -> list[Instr]:
    """Return ZB-H1: 1F1B with split backwards; rank r runs its W r microbatches late (2401.10241).

    No rank stashes more than rank 0 of 1F1B does. At f = i = w a third of 1F1B's bubble remains.

        p = 2, m = 3
        rank 0  F0 F1 .. I0 W0 F2 I1 W1 I2 W2
        rank 1  .. F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    return warmed_up(passes("F", r, m), passes("I", r, m), p - 1 - r, passes("W", r, m), late=r)


def zb_h2(p: int, r: int, m: int) -> list[Instr]:
    """Return ZB-H2: ranks never wait between first and last pass, at nearly twice ZB-H1's stash.

    With m < 2p-1 the order is still valid, but ranks wait (arXiv 2401.10241).

        p = 2, m = 4
        rank 0  F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1  .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return warmed_up(
        passes("F", r, m), passes("I", r, m), 2 * (p - 1 - r), passes("W", r, m), late=2 * r
    )


def passes(kind: str, stage: int, m: int) -> list[Instr]:
    """Return a pass of this kind for each microbatch, in their order."""
    return [Instr(kind, stage, mb) for mb in range(m)]


def warmed_up(
    forwards: Sequence[Instr],
    backwards: Sequence[Instr],
    warmup: int,
    weights: Sequence[Instr] = (),
    late: int = 0,
) -> list[Instr]:
    """Return `warmup` forwards, then a forward and a backward in turn, as long as there are some.

    weights: the W that belong to the backwards, if these are split. Each follows its backward by
    `late` turns, and what is then left comes at the end.
    """
    program = [*forwards[:warmup]]
    for turn, backward in enumerate(backwards):
        program += [*forwards[warmup + turn : warmup + turn + 1], backward]
        if turn >= late:
            program += weights[turn - late : turn - late + 1]
    return [*program, *weights[max(len(backwards) - late, 0) :]]
