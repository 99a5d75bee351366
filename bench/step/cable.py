"""One training step on two hosts, without and with overlap of messages and computing.

    python -m bench.step --cable 200,1000,3000

starts this program once for each rate in Mbit/s. Its two ranks are each in a network namespace of
their own, and a cable of that rate joins these (bench/interconnect/two_hosts.py). That needs Linux,
root and MPICH.

Rows are layouts and what they use. units: the sum of each unit's gradients starts after its last
weight gradient; without it, all sums start after the last backward. progress: messages are tested
between units; without it, only between the instructions of the schedule. The sides take turns, so
that a slow spell of the machine hits all. Before anything is timed their losses must agree.

step_ms is the median over the repetitions, of the slowest rank, from a barrier to its last update.
gain_percent is what a repetition saves against the same repetition of "nothing": the median, with
low_percent and high_percent, the quartiles. best_gain_percent compares the fastest repetitions.
in_communication: share of the step inside barriers or waiting for messages. computed_percent: share
of the time of flight of the messages in which the rank computed.
"""

from __future__ import annotations

import sys

import numpy as np
from threadpoolctl import threadpool_limits

from bench import results
from bench.interconnect.launches import over_cable
from bench.program import Outcome, Program
from bench.step.sides import (
    OurSide,
    add_sizes,
    configure,
    losses,
    measure_steps,
    rows_of,
)
from mpipar.comm.facts import gather_numbers
from mpipar.comm.record import POINT_TO_POINT
from mpipar.errors import (
    EXIT_CHECK_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    UsageError,
)
from mpipar.ops import make

NOTHING = "nothing"
LAYOUTS = {  # name: axes, sides, and the messages that may be hidden
    "dp 2": ({"dp": 2}, (NOTHING, "units", "progress", "units, progress"), ("all_reduce",)),
    "pp 2": ({"pp": 2, "num_microbatches": 4}, (NOTHING, "progress"), POINT_TO_POINT),
}
GAINS = ("low_percent", "gain_percent", "high_percent")
SIZES = ("layers", "d_model", "heads", "seq_len", "batch_size", "vocab_size", "repeats")


class Side(OurSide):
    """Our step with only some of the means to hide messages; used: their names."""

    def __init__(self, config, rows, ops, world, used):
        super().__init__(config, rows, ops, world)
        engine = self.worker.engine
        if "progress" not in used:
            engine.enter = lambda unit: None
        if "units" not in used:
            engine.leave = lambda unit: None


def measure_layout(args, layout, world) -> tuple[np.ndarray, list] | None:
    """Return (this rank's seconds, (flight, computed) of each side), or None if losses differ.

    Comm: that of `measure_steps`.
    """
    axes, names, operations = LAYOUTS[layout]
    config, ops = configure(args, axes, world.size), make("cpu", args.dtype)
    rows = rows_of(args)
    sides = {name: Side(config, rows, ops, world, name) for name in names}
    found = losses(sides, names, world)
    if any(one != found[NOTHING] for one in found.values()):
        return None
    seconds = measure_steps(sides, names, args.repeats, world)
    flights = [side.recorder.flight_ns(layout.split()[0], operations) for side in sides.values()]
    for side in sides.values():
        side.worker.close()
    return seconds, flights


def layout_rows(layout, seconds, flights) -> list[dict]:
    """Return the rows of a layout; seconds, flights: `measure_layout`'s, of all ranks."""
    steps = seconds[..., :2].sum(axis=-1).max(axis=0)
    rows = []
    for number, name in enumerate(LAYOUTS[layout][1]):
        gains = np.percentile(100 * (1 - steps[number] / steps[0]), (25, 50, 75))
        flight, computed = flights[:, number].sum(axis=0)
        rows.append(
            {
                "layout": layout,
                "overlap": name,
                "step_ms": float(np.median(steps[number])) * 1e3,
                **dict(zip(GAINS, map(float, gains), strict=True)),
                "best_gain_percent": 100 * float(1 - steps[number].min() / steps[0].min()),
                "in_communication": float(
                    seconds[:, number, :, 2].sum() / seconds[:, number, :, :2].sum()
                ),
                "computed_percent": 100 * float(computed / flight),
            }
        )
    return rows


def on_each_cable(session, args) -> int:
    """Measure at each rate of --cable, print the table, write the file; return the exit code.

    Raises UsageError and EnvironmentProblem: see `over_cable`.
    """
    results.check_writable(args.json)
    sizes, rows = {name: getattr(args, name) for name in SIZES}, []
    with session.stop_on_request():
        for rate in args.cable:
            code, found = over_cable(
                session,
                rate,
                [
                    "bench.step.cable",
                    *(f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()),
                ],
            )
            if session.stop_requested or code:
                return EXIT_INTERRUPTED if session.stop_requested else abs(code)
            if not rows:
                print(
                    f"{args.layers} layers, D {args.d_model}, {args.heads} heads, batch"
                    f" {args.batch_size} x {args.seq_len} tokens, V {args.vocab_size}, float32,"
                    f" 2 hosts of 1 rank, {args.repeats} steps"
                )
            rows += found["rows"]
            print(results.markdown_table(found["rows"]), flush=True)
    results.write(args.json, "bench.step --cable", rows, **sizes)
    return EXIT_OK


def measure(args, session) -> Outcome | int:
    """Measure on both ranks; code 1 if losses differ."""
    world, rows = session.world, []
    args.device, args.dtype = "cpu", "float32"
    if world.size != 2:
        raise UsageError(f"{world.size} rank(s): start it by python -m bench.step --cable 200")
    with threadpool_limits(1):
        for layout in LAYOUTS:
            measured = measure_layout(args, layout, world)
            if measured is None:
                print(f"not timed: the losses of {layout} differ", file=sys.stderr)
                return EXIT_CHECK_FAILED
            seconds, flights = (gather_numbers(world, np.array(one, float)) for one in measured)
            if world.rank == 0:
                rows += layout_rows(layout, seconds, flights)
    return Outcome(rows) if world.rank == 0 else EXIT_OK


main = Program("step.cable", __doc__, measure, together=True, add=add_sizes).started(__name__)
