"""Experts that got far more rows than others of their block, and kept the other ranks waiting.

A rank with a popular expert computes longer than those beside it. They wait for its rows at the
next exchange of their group. A popular expert whose rank nobody waits for costs nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from mpipar.trace.trace_file import Trace
from mpipar.trace.waits import Waits

HOT = 1.5  # times the mean of its block, in every traced step


class HotExpert(NamedTuple):
    """An expert, and what its ranks cost. times: the mean of its block, in the calmest step.

    waits: {rank: nanoseconds} that it waited for those ranks, in exchanges of rows.
    """

    layer: str
    expert: int
    times: float
    ranks: tuple[int, ...]
    waits: Counter

    @property
    def text(self) -> str:
        """As in `expert 3 of block 2`."""
        return f"expert {self.expert} of {self.layer.split('.')[0].replace('block', 'block ')}"


def find(trace: Trace, waits: Waits) -> list[HotExpert]:
    """The hottest expert of each group of ranks that hold one."""
    rows: dict = defaultdict(lambda: defaultdict(Counter))  # layer, step, expert
    holders: dict = defaultdict(set)  # layer, expert
    for rank in trace.ranks:
        for load in rank.loads:
            for expert, count in enumerate(load.rows, load.first):
                rows[load.layer][load.step][expert] += count
                holders[load.layer, expert].add(rank.world_rank)
    found: dict[tuple[int, ...], HotExpert] = {}
    for layer, steps in rows.items():
        times = {expert: min(own[expert] * len(own) / max(own.total(), 1) for own in steps.values())
                 for expert in next(iter(steps.values()))}
        hottest = max(times, key=times.__getitem__)
        ranks = tuple(sorted(holders[layer, hottest]))
        if times[hottest] >= HOT and (
                ranks not in found or times[hottest] > found[ranks].times):
            found[ranks] = HotExpert(layer, hottest, times[hottest], ranks, _waits(waits, ranks))
    return list(found.values())


def _waits(waits: Waits, ranks: tuple[int, ...]) -> Counter:
    """{rank: nanoseconds} of waiting for these ranks in their groups of experts."""
    return Counter({
        own[0].rank: sum(call.wait_ns for call in own
                         if call.record.axis == "expert" and call.late in ranks)
        for own in waits.calls if own})
