"""`mpipar trace RUN`: who waited for whom, where in the source, how long; without MPI."""

from __future__ import annotations

from mpipar.errors import EXIT_OK
from mpipar.report import pop, segments, trace_file, waits
from mpipar.report.bubble import bubble_table
from mpipar.report.causes import Causes
from mpipar.report.console import family, nbytes, table
from mpipar.report.timeline import timeline

MOST = 12  # rows of a table of causes, barriers or call sites


def run(run_folder: str) -> int:
    """Print the tables of a traced run; raises DataError where there is no trace. Comm: none."""
    trace = trace_file.read(run_folder)
    found = waits.find(trace)
    pieces = segments.of_trace(trace, found)
    steps = trace.num_steps
    layout = " x ".join(f"{axis} {size}" for axis, size in trace.meta["layout"].items() if size > 1)
    print(f"{len(trace.ranks)} ranks ({layout or 'one rank'}), {steps} steps of"
          f" {trace.meta['schedule']['name']} in {(trace.end - trace.start) * 1e-6:.1f} ms;"
          f" clocks: {trace.clock.describe()}\n")
    print(timeline(trace, pieces))
    efficiency = pop.efficiency(trace, found, pieces)
    rows = [("efficiency", "value", "what it says")]
    rows += [(name, f"{value:.1%}", what) for name, value, what in efficiency.rows()]
    print("\n" + table(rows))
    print("\nwhat others waited for, ms per step (waiting summed over ranks):")
    print(cause_table(Causes(trace, found, pieces).costs(), steps))
    for title, key in (
            ("axis", lambda call: call.record.axis),
            ("barrier", lambda call: f"{call.record.axis} {family(call.record.name)}"),
            ("call site", lambda call: call.record.site),
            ("rank", lambda call: f"rank {call.rank}")):
        print(f"\nby {title}, per step:")
        print(wait_table(title, waits.totals(found, key), steps))
    if len(trace.schedule().programs) > 1:
        print("\nbusy share and bubble of each pipeline rank:")
        print(bubble_table(pop.pipeline_bubble(trace)))
    if found.unmatched:
        print(f"\n{len(found.unmatched)} operations have no partner in the trace: all transfer")
    return EXIT_OK


def cause_table(costs: dict, steps: int) -> str:
    """What ranks did while others waited for them, the largest first."""
    if not costs:
        return "nobody waited"
    total = sum(cost.wait_ns for cost in costs.values())
    rows = [("cause", "ms", "share", "mostly waiting", "at")]
    for cause, cost in list(costs.items())[:MOST]:
        waiting = cost.by_rank.most_common(1)[0][0]
        axis, name = cost.by_barrier.most_common(1)[0][0]
        rows.append((cause.text(), f"{cost.wait_ns * 1e-6 / steps:.2f}",
                     f"{cost.wait_ns / total:.0%}", f"rank {waiting}", f"{axis} {name}"))
    return table(rows)


def wait_table(title: str, sums: dict, steps: int) -> str:
    """Calls, bytes, waiting and transfer, and who came last how often."""
    rows = [(title, "calls", "payload", "wait ms", "transfer ms", "longest wait ms", "last")]
    for key, entry in list(sums.items())[:MOST]:
        late = ", ".join(f"rank {last} {count}x" for last, count in entry.last.most_common(2))
        rows.append((key, f"{entry.calls / steps:.4g}", nbytes(entry.payload / steps),
                     f"{entry.wait_ns * 1e-6 / steps:.2f}",
                     f"{entry.transfer_ns * 1e-6 / steps:.2f}",
                     f"{entry.longest_wait_ns * 1e-6:.2f}", late))
    return table(rows)
