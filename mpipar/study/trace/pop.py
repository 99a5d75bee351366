"""Efficiencies of a parallel run as the POP project defines them, and the pipeline's bubble.

    load balance             = mean useful / max useful
    communication efficiency = max useful / T           = serialization * transfer
    parallel efficiency      = load balance * communication efficiency
    transfer efficiency      = T(ideal network) / T
    serialization efficiency = max useful / T(ideal network)

T is the measured time. Useful is all time outside blocking communication. T(ideal network) comes
from a replay of the trace, in which the time between a rank's operations keeps its length, and
every operation ends when its last participant has arrived. Source:
https://co-design.pop-coe.eu/metrics/index.html
"""

from collections import defaultdict
from collections.abc import Callable
from statistics import mean, median

from mpipar.comm.record import PASSES, Span
from mpipar.run.trace.trace_file import Trace
from mpipar.study.schedules import bubble
from mpipar.study.schedules.simulate import Costs, Timeline, simulate
from mpipar.study.trace.segments import IDLE, Segment, median_step
from mpipar.study.trace.waits import Call, Waits, find


def efficiencies(
    trace: Trace, waits: Waits, segments: list[list[Segment]]
) -> list[tuple[str, float, str]]:
    """Return (name, value, meaning) of each, from the whole to its factors."""
    useful = [sum(one.length for one in own if one.kind not in IDLE) for own in segments]
    runtime, ideal = trace.end - trace.start, max(replay(trace, waits)) - trace.start
    balance, busiest = mean(useful) / max(useful), max(useful) / runtime
    return [
        ("parallel efficiency", balance * busiest, "share of all ranks' time that is not blocked"),
        ("load balance", balance, "mean work / most work of a rank"),
        ("communication efficiency", busiest, "most work of a rank / time"),
        ("serialization efficiency", max(useful) / ideal, "would be left with an ideal network"),
        ("transfer efficiency", ideal / runtime, "time with an ideal network / time"),
    ]


def replay(
    trace: Trace, waits: Waits, transfer: Callable[[Call], float] = lambda _: 0
) -> list[float]:
    """Return when each rank would end on an ideal network; starts are those of the trace.

    Each rank runs through its own posts and waits, and stops at a wait until all participants have
    posted. The job has run, so some rank can always continue. transfer: how long a call blocks
    after that. With its `transfer_ns` the replay reproduces the trace.
    """
    programs = [
        _program(rank.start, calls) for rank, calls in zip(trace.ranks, waits.calls, strict=True)
    ]
    posted: dict[int, int] = {}  # id of a call: when it was posted in the replay
    waiting: dict[int, list[int]] = defaultdict(list)  # id of a call: ranks waiting for its post
    position, clock = [0] * len(programs), [rank.start for rank in trace.ranks]
    runnable = list(range(len(programs)))
    while runnable:
        rank = runnable.pop()
        while position[rank] < len(programs[rank]):
            gap, call, is_wait = programs[rank][position[rank]]
            if is_wait:
                missing = [one for one in call.needs if id(one) not in posted]
                if missing:
                    waiting[id(missing[0])].append(rank)
                    break
                clock[rank] = max([clock[rank] + gap, *(posted[id(one)] for one in call.needs)])
                clock[rank] += transfer(call)
            else:
                clock[rank] += gap
                posted[id(call)] = clock[rank]
                runnable += waiting.pop(id(call), [])
            position[rank] += 1
    assert not waiting, "the replay is stuck"
    tails = [
        rank.end - max([rank.start, *(call.record.done_ns for call in calls)])
        for rank, calls in zip(trace.ranks, waits.calls, strict=True)
    ]
    return [max(now, 0) + tail for now, tail in zip(clock, tails, strict=True)]


def _program(start: int, calls: list[Call]) -> list[tuple[int, Call, bool]]:
    """Return (local nanoseconds before it, call, whether it is the wait) of a rank, in order."""
    events = [(call.record.posted_ns, 0, call, False) for call in calls]
    events += [(call.record.waited_ns, 1, call, True) for call in calls if call.blocked_ns > 0]
    events.sort(key=lambda event: event[:2])
    program, last = [], start
    for time, _, call, is_wait in events:
        program.append((max(0, time - last), call, is_wait))
        last = max(last, call.record.done_ns if is_wait else time)
    return program


def whole_steps(trace: Trace) -> set[int]:
    """Return the steps whose passes every rank has finished: the last one may be incomplete."""
    return set.intersection(
        *({span.step for span in rank.spans if span.kind == "pipeline"} for rank in trace.ranks)
    )


def pass_facts(trace: Trace) -> list[dict]:
    """Return the `bubble.span_facts` of every rank of a trace."""
    whole = whole_steps(trace)
    return [bubble.span_facts(rank.spans, whole) for rank in trace.ranks]


def median_passes(trace: Trace) -> tuple[int, list[list[Span]]]:
    """Return (step, passes by pipeline rank) of the step of median length, of one pipeline."""
    pipeline = [
        rank
        for rank in trace.ranks
        if all(rank.place[axis] == 0 for axis in rank.place if axis != "pp")
    ]
    pipeline.sort(key=lambda rank: rank.place["pp"])
    chosen, _ = median_step(trace)
    return chosen, [
        [one for one in rank.spans if one.step == chosen and one.kind in PASSES]
        for rank in pipeline
    ]


def hop_ns(trace: Trace) -> float:
    """Return the median time of a pipeline message from its send to its arrival.

    Only those that a rank waited for count; 0 without any.
    """
    times = [
        received.record.done_ns - sent.record.posted_ns
        for event in find(trace).events
        if (event.axis, event.operation) == ("pp", "message")
        for sent, received in [event.calls]
        if received.record.waited_ns <= sent.record.posted_ns
    ]
    return median(times or [0.0])


def pipeline_bubble(trace: Trace) -> list[tuple]:
    """Return `bubble.bubble_rows` of the trace: measured and simulated, by pipeline rank."""
    pp_ranks = [rank.place["pp"] for rank in trace.ranks]
    return bubble.bubble_rows(pass_facts(trace), pp_ranks, trace.schedule())


def simulated(trace: Trace, even: bool = False) -> Timeline:
    """Return the trace's schedule with its own mean pass times and instant messages, in seconds.

    even: with the mean over the stages for every stage.
    """
    schedule = trace.schedule()
    costs = bubble.measured_costs(pass_facts(trace), schedule.num_stages)
    if even:
        costs = Costs(*(mean(getattr(costs, name)) for name in "fiw"))
    return simulate(schedule, costs)
