"""Zero-bubble schedules on the linear placement: W is postponed into idle time (arXiv 2401.10241).

Letters: p = pp_size, r = pp_rank, m = num_microbatches.
"""

from mpipar.pipeline.instructions import Instr


def zb_h1(p: int, r: int, m: int) -> list[Instr]:
    """Return ZB-H1: 1F1B with split backwards; rank r runs its W r microbatches late.

    No rank stashes more than rank 0 of 1F1B does. At f = i = w a third of 1F1B's bubble remains.

        p = 2, m = 3
        rank 0  F0 F1 .. I0 W0 F2 I1 W1 .. I2 W2
        rank 1  .. F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    warmup = min(p - 1 - r, m)
    program = [Instr("F", r, mb) for mb in range(warmup)]
    for mb in range(m):
        if warmup + mb < m:
            program.append(Instr("F", r, warmup + mb))
        program.append(Instr("I", r, mb))
        if mb >= r:
            program.append(Instr("W", r, mb - r))
    return program + [Instr("W", r, mb) for mb in range(max(m - r, 0), m)]


def zb_h2(p: int, r: int, m: int) -> list[Instr]:
    """Return ZB-H2: ranks never wait between first and last pass, at nearly twice ZB-H1's stash.

    With m < 2p-1 the order is still valid, but ranks wait.

        p = 2, m = 4
        rank 0  F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1  .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    warmup = min(2 * (p - r) - 1, m)
    program = [Instr("F", r, mb) for mb in range(warmup)]
    for mb in range(m):
        program.append(Instr("I", r, mb))
        if mb >= 2 * r:
            program.append(Instr("W", r, mb - 2 * r))
        if warmup + mb < m:
            program.append(Instr("F", r, warmup + mb))
    return program + [Instr("W", r, mb) for mb in range(max(m - 2 * r, 0), m)]
