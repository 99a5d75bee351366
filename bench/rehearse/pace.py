"""The pace of a rehearsal: how long computing takes before each event of a script."""

from __future__ import annotations

from collections.abc import Mapping

from bench.rehearse.script import SPAN, Script


def at_rate(script: Script, scale: float, gflops: float | None) -> list[float] | None:
    """Return the seconds of computing before each event, at a rate of matmuls; None if none.

    scale: how many times as long as at this rate.
    """
    if not scale or gflops is None:
        return None
    return [scale * event.flops / (gflops * 1e9) for event in script.events]


def spread(script: Script, seconds: Mapping[tuple[str, int], float]) -> list[float]:
    """Return the seconds of computing before each event of a script.

    seconds: of (kind, stage) of a pass. Within a pass they are distributed like its FLOPs, or put
    at its end if it has none.
    """
    found = [0.0] * len(script.events)
    for last, event in enumerate(script.events):
        if event.action == SPAN:
            one = script.passes[event.number]
            total = seconds.get((one.kind, one.stage), 0.0)
            within = range(one.first, last + 1)
            flops = sum(script.events[place].flops for place in within)
            if not flops:
                found[last] += total
            for place in within if flops else ():
                found[place] += total * script.events[place].flops / flops
    return found
