"""Schedules on the V placement: rank r holds stage r (chunk 0) and stage 2p-1-r (chunk 1).

The first and the last stage share rank 0, and stages p-1 and p share rank p-1, so a microbatch goes
down the ranks and comes back up. Letters: p = pp_size, r = pp_rank, m = num_microbatches.
"""

from collections import deque

from mpipar.pipeline.instructions import Instr
from mpipar.pipeline.schedules.simple import passes

BLOCK = 6  # unit passes of one microbatch on one rank: F, I and W of both chunks


def zb_v(p: int, r: int, m: int) -> list[Instr]:
    """Return ZB-V: ranks never wait between first and last pass, at 1F1B's stash (2401.10241, 6).

    The order is made for n = max(m, 2p-1) microbatches and leaves out those that do not exist.

        1  2(p-r)-1 x F0            down to the fold and back to this rank
        2  r x (F1, F0)
        3  (p-r) x (F1, I1, W1)
        4  until all n forwards of both chunks are done: [F0], I0, W0, F1, I1, W1
        5  r x (I0, I1)
        6  (p-r) x (I0, oldest W0)
        7  all W1, all W0 that are left
    """
    n = max(m, 2 * p - 1)
    stages = (r, 2 * p - 1 - r)
    done = dict.fromkeys(((kind, chunk) for kind in "FIW" for chunk in (0, 1)), 0)
    program = []

    def run(*these: tuple[str, int]) -> None:
        for kind, chunk in these:
            mb = done[kind, chunk]
            done[kind, chunk] += 1
            if mb < m:
                program.append(Instr(kind, stages[chunk], mb))

    f0, f1, i0, i1, w0, w1 = [(kind, chunk) for kind in "FIW" for chunk in (0, 1)]
    run(*[f0] * (2 * (p - r) - 1))
    run(*[f1, f0] * r)
    run(*[f1, i1, w1] * (p - r))
    while done[f1] < n:
        if done[f0] < n:
            run(f0)
        run(i0, w0, f1, i1, w1)
    run(*[i0, i1] * r)
    run(*[i0, w0] * (p - r))
    run(*[w1] * (n - done[w1]), *[w0] * (n - done[w0]))
    return program


def v_half(p: int, r: int, m: int) -> list[Instr]:
    """Return V-Half, with half the stash of 1F1B (arXiv 2405.15362).

    Chunk 0 lives 6p - 3r passes, chunk 1 only 3r. A microbatch's block has the offsets F0 2r, F1
    3p-2-r, I1 3p-1+2r, I0 6p-3-r. For odd p, I0 is one later, because its slot is taken on odd r.
    For even p, F1 and I1 are three later and I0 is seven later. These shifts were found by a search
    for the least stash, then the shortest step.
    """
    if p % 2:
        return repeated_block(p, r, m, (2 * r, 3 * p - 2 - r, 3 * p - 1 + 2 * r, 6 * p - 2 - r))
    return repeated_block(p, r, m, (2 * r, 3 * p + 1 - r, 3 * p + 2 + 2 * r, 6 * p + 4 - r))


def v_min(p: int, r: int, m: int) -> list[Instr]:
    """Return V-Min, with a third of the stash of 1F1B, the least for a V (arXiv 2405.15362).

    Chunk 0 lives about 4p passes, chunk 1 2r. A microbatch's block has the offsets F0 r, F1 2p-1-r,
    I1 2p+r, I0 4p-1-r. Where 3 divides p, F0 and I1 would fall on the same slot, so I1 and I0 are
    two later.

        p = 2, m = 2
        rank 0  0F0 ... ... 3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 ... 0I1 0W1
        rank 1  ... 1F0 2F0 ... ... 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 2W1 1W1
    """
    late = 2 if p % 3 == 0 else 0
    return repeated_block(p, r, m, (r, 2 * p - 1 - r, 2 * p + r + late, 4 * p - 1 - r + late))


def repeated_block(p: int, r: int, m: int, offsets: tuple[int, int, int, int]) -> list[Instr]:
    """Return the order that runs F0, F1, I1, I0 of microbatch k at offset + 6k, and W in between.

    W runs first in, first out, in the free slots. Only the order is kept, so each pass runs as
    early as it can.
    """
    block = zip(offsets, "FFII", (r, 2 * p - 1 - r, 2 * p - 1 - r, r), strict=True)
    slots = {
        offset + BLOCK * mb: Instr(kind, stage, mb)
        for offset, kind, stage in block
        for mb in range(m)
    }
    assert len(slots) == 4 * m, f"two passes in one slot: rank {r} of {p}, offsets {offsets}"
    program: list[Instr] = []
    late_weights: deque[Instr] = deque()
    for slot in range(max(slots) + 1):
        instr = slots.get(slot)
        if instr is not None:
            program.append(instr)
            if instr.kind == "I":
                late_weights.append(Instr("W", instr.stage, instr.mb))
        elif late_weights:
            program.append(late_weights.popleft())
    return program + list(late_weights)


def dualpipe_v(p: int, r: int, m: int) -> list[Instr]:
    """Return DualPipeV: F of one chunk runs beside B of the other (m >= 2p; arXiv 2412.19437).

    The authors' step list, for the r-th rank from the end where microbatches enter:

        1  2(p-r-1) x F0          fill chunk 0 up to the fold
        2  (r+1) x (F0, F1)       microbatches come back
        3  (p-r-1) x (I1, W, F1)
        4  (m-2p+r+1) x (F0&B1, F1&B0)
        5  (p-r-1) x (B1, F1&B0)
        6  (r+1) x (B1, B0)       I instead of B from half way on: W waits for the drain
        7  (p-r-1) x (W, I0)
        8  (r+1) x W
    """
    far, stages = p - r - 1, (r, 2 * p - 1 - r)
    forwards = [iter(passes("F", stage, m)) for stage in stages]
    backwards = [iter(passes("B", stage, m)) for stage in stages]
    program: list[Instr] = []
    late_weights: deque[Instr] = deque()

    def forward(*chunks: int) -> None:
        program.extend(next(forwards[chunk]) for chunk in chunks)

    def backward(chunk: int, split: bool = False) -> None:
        whole = next(backwards[chunk])
        program.append(whole._replace(kind="I") if split else whole)
        late_weights.extend([whole._replace(kind="W")] * split)

    def weights(most: int) -> None:
        program.extend(late_weights.popleft() for _ in range(min(most, len(late_weights))))

    def overlapped(forward: int, backward: int) -> None:
        f, b = next(forwards[forward]), next(backwards[backward])
        program.append(Instr("OVERLAP_F_B", f.stage, f.mb, b.stage, b.mb))

    forward(*[0] * (2 * far), *[0, 1] * (r + 1))
    for _ in range(far):
        backward(1, split=True)
        weights(1)
        forward(1)
    for turn in range(m - 2 * p + r + 1):
        if turn == 0 and far == 0:
            # All ranks wait for this first B1 at the fold, so it must not wait for an overlap.
            forward(0)
            backward(1)
        else:
            overlapped(0, 1)
        overlapped(1, 0)
    for _ in range(far):
        backward(1)
        overlapped(1, 0)
    half = (r + 1) // 2
    for turn in range(r + 1):
        backward(1, split=turn > half or (turn == half and r % 2 == 1))
        backward(0, split=turn >= half)
    for _ in range(far):
        weights(1)
        backward(0, split=True)
    weights(r + 1)
    return program
