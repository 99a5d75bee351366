"""Schedules that hang with two usual ways to send: the reason why the engine never blocks in one.

Synchronous sends (a send returns once its receive is posted). "plain": blocking receive, pass,
blocking send, in schedule order. "fused": all sends and receives between two passes are posted
together and waited for together (MPI_Sendrecv, batch_isend_irecv).
"""

import pytest

from mpipar.pipeline.check import check
from mpipar.pipeline.instructions import is_compute, receives, sends
from mpipar.pipeline.schedules.catalog import make_schedule


def waits(schedule, pp_rank, fused):
    """The sets of messages that a rank posts and waits for together, in program order."""
    groups = [[]]
    for instr in schedule.programs[pp_rank]:
        if is_compute(instr):
            groups[-1] += [message(wire) for wire in receives(schedule, instr)]
            groups.append([message(wire) for wire in sends(schedule, instr)])
    if not fused:
        groups = [[one] for group in groups for one in group]
    return [set(group) for group in groups if group]


def message(wire):
    """(direction, receiving stage, mb, is a send): both ends name a message alike."""
    step = {"SEND_F": 1, "SEND_B": -1}.get(wire.kind, 0)
    return wire.kind[-1], wire.stage + step, wire.mb, wire.kind.startswith("SEND")


def hangs(schedule, fused):
    """Whether some rank never gets through its waits when every send is synchronous."""
    ranks = [waits(schedule, pp_rank, fused) for pp_rank in range(schedule.pp_size)]
    at = [0] * len(ranks)
    matched = set()
    progress = True
    while progress:
        progress = False
        posted = set()
        for k, groups in zip(at, ranks, strict=True):
            posted.update(*groups[k : k + 1])
        matched |= {one[:3] for one in posted if (*one[:3], not one[3]) in posted}
        for pp_rank, groups in enumerate(ranks):
            if at[pp_rank] < len(groups) and {one[:3] for one in groups[at[pp_rank]]} <= matched:
                at[pp_rank] += 1
                progress = True
    return any(k < len(groups) for k, groups in zip(at, ranks, strict=True))


CASES = [(p, m) for p in (2, 3, 4, 5) for m in range(1, 2 * p + 2)]


@pytest.mark.parametrize("fused", [False, True])
def test_what_hangs_without_deferred_sends(fused):
    always, never = (lambda p, m: True), (lambda p, m: False)
    for name, expected in {
        "naive": never,
        "gpipe": never,
        "1f1b": never if fused else lambda p, m: m >= 2,
        "zb-h1": never if fused else lambda p, m: m >= 2,
        "zb-h2": (lambda p, m: m >= 2 * p) if fused else lambda p, m: m >= 2,
        "looped-bfs": (lambda p, m: m >= 2 * p) if fused else lambda p, m: m >= p,
        "interleaved": (lambda p, m: m >= 2 * p) if fused else always,
        "zb-v": lambda p, m: m >= 2,
    }.items():
        for p, m in CASES:
            if name == "interleaved" and m % p:
                continue
            schedule = make_schedule(name, p, m)
            assert hangs(schedule, fused) == expected(p, m), (name, p, m)
            check(schedule)  # and with the engine's rule none of them does
