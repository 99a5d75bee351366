"""The cost of recording: a call through mpipar.comm beside the same bare mpi4py call, in one run.

    mpiexec -n 4 python -m bench.recorder

Part 1 runs on world rank 0 alone. It calls every operation on a communicator of one process, where
a message costs next to nothing and no other rank adds delay. The group only claims to have two
members, so that everything is recorded. The cost of a call is its time above the bare call. Bare
and recorded calls take turns in short batches. The best batch of each counts, because other
processes can only add time.

Part 2 runs on all ranks. It multiplies the records and spans in a training step of the default
model by these costs, and divides by the step's duration.
"""

from __future__ import annotations

import statistics
import time
from time import perf_counter_ns

import numpy as np
from mpi4py import MPI

from bench import results
from mpipar import ops as ops_module
from mpipar.comm.connect import Options
from mpipar.comm.grid import Grid
from mpipar.comm.group import Comm
from mpipar.comm.record import Recorder
from mpipar.comm.transport import DirectTransport
from mpipar.config import flags
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config
from mpipar.data.rows import Rows
from mpipar.errors import EXIT_CHECK_FAILED
from mpipar.job.session import guard
from mpipar.train.worker import Worker

CALL_LIMIT_NS, SHARE_LIMIT = 1500, 0.02
BATCH = 200  # calls between two looks at the clock: short enough to fall between two interruptions
TAG = 3
COLUMNS = ("operation", "bare_ns", "recorded_ns", "cost_ns", "cost_p10_ns")


class Pairs:
    """The same operations twice: `bare_NAME` on mpi4py, `recorded_NAME` through a Comm."""

    def __init__(self):
        ops = ops_module.make("cpu", "float32")
        self.mpi = MPI.COMM_SELF.Dup()
        self.recorder = Recorder()
        self.recorder.phase = "F"
        wire = DirectTransport(ops, self.mpi, Options())
        self.comm = Comm("tp", (0, 1), 0, wire, self.recorder)
        self.x, self.y = np.ones(16, np.float32), np.zeros(16, np.float32)

    def bare_all_reduce(self):
        self.mpi.Allreduce(MPI.IN_PLACE, self.x, op=MPI.SUM)

    def recorded_all_reduce(self):
        self.comm.all_reduce(self.x, "block0.ffn.down")

    def bare_broadcast(self):
        self.mpi.Bcast(self.x, root=0)

    def recorded_broadcast(self):
        self.comm.broadcast(self.x, 0, "generate.next")

    def bare_send_and_receive(self):
        receive = self.mpi.Irecv(self.y, 0, TAG)
        send = self.mpi.Isend(self.x, 0, TAG)
        receive.Wait()
        send.Test()

    def recorded_send_and_receive(self):
        receive = self.comm.irecv(self.y, 0, TAG, "activations")
        send = self.comm.isend(self.x, 0, TAG, "activations")
        receive.wait()
        send.test()

    def bare_iall_reduce(self):
        self.mpi.Iallreduce(MPI.IN_PLACE, self.x).Wait()

    def recorded_iall_reduce(self):
        self.comm.iall_reduce(self.x, "grads.bucket").wait()

    def bare_span(self):
        pass

    def recorded_span(self):
        self.recorder.span("F", 0, 1, 2)


# Name, number of records (or spans) per call.
CASES = (
    ("all_reduce", 1), ("broadcast", 1), ("iall_reduce", 1), ("send_and_receive", 2), ("span", 1))


def check(pairs) -> None:
    """Check that both sides move the same data, and that each call leaves as many records as
    stated.
    """
    for name, count in CASES:
        for kind in ("bare", "recorded"):
            pairs.y[:] = 0
            before = len(pairs.recorder.records) + len(pairs.recorder.spans)
            getattr(pairs, f"{kind}_{name}")()
            left = len(pairs.recorder.records) + len(pairs.recorder.spans) - before
            assert left == (count if kind == "recorded" else 0), (name, kind, left)
            assert (pairs.x == 1).all(), name
            assert name != "send_and_receive" or (pairs.y == 1).all(), kind


def batch_ns(function) -> float:
    """Nanoseconds per call in one batch."""
    start = perf_counter_ns()
    for _ in range(BATCH):
        function()
    return (perf_counter_ns() - start) / BATCH


def measure_calls(repeats: int) -> dict:
    """{name: (bare ns, recorded ns, cost ns, cost of the tenth best in a hundred)}, per record."""
    pairs = Pairs()
    check(pairs)
    samples: dict = {}
    for _ in range(repeats):
        for name, _ in CASES:
            for kind in ("bare", "recorded"):
                sample = batch_ns(getattr(pairs, f"{kind}_{name}"))
                samples.setdefault((kind, name), []).append(sample)
    found = {}
    for name, count in CASES:
        bare, recorded = samples["bare", name], samples["recorded", name]
        tenth = [statistics.quantiles(values, n=10)[0] for values in (bare, recorded)]
        found[name] = (min(bare) / count, min(recorded) / count,
                       (min(recorded) - min(bare)) / count, (tenth[1] - tenth[0]) / count)
    return found


def measure_step(steps: int) -> tuple[int, int, float]:
    """(records, spans, nanoseconds) of the default model's step on these ranks; median of steps."""
    world = MPI.COMM_WORLD
    config, _ = resolve(Config(), world.size)
    ops, recorder = ops_module.make("cpu", config.run.dtype), Recorder(None)
    worker = Worker(config, Grid.of(config.grid, world.rank), ops, recorder, world)
    worker.initialize()
    text = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint8)
    rows = Rows(ops, text, config, worker.grid)
    durations = []
    for step in range(1, steps + 1):
        recorder.clear()
        start = perf_counter_ns()
        worker.train_step(step, lambda mb, step=step: rows.train(step, mb))
        durations.append(perf_counter_ns() - start)
    return len(recorder.records), len(recorder.spans), statistics.median(durations[1:])


def wait_politely(world) -> None:
    """A barrier whose waiting ranks leave the cores alone."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(0.01)


def main(argv, session) -> int:
    """Measure, print; 1 if a limit is not kept."""
    parser = flags.Parser(prog="python -m bench.recorder", description=__doc__)
    parser.add_argument("--repeats", type=int, default=400, help="batches of each case (400)")
    parser.add_argument("--steps", type=int, default=6,
                        help="training steps (6), the first not counted")
    parser.add_argument("--json", help="write the result to this file")
    args = parser.parse_args(argv)
    world = session.start()
    results.check_writable(args.json, session)
    costs = measure_calls(args.repeats) if world.rank == 0 else None
    wait_politely(world)
    records, spans, step_ns = measure_step(args.steps)
    everything = world.gather((records, spans, step_ns))
    if world.rank > 0:
        return 0
    rows = [dict(zip(COLUMNS, (name, *numbers), strict=True)) for name, numbers in costs.items()]
    print(f"per record; limit {CALL_LIMIT_NS} ns\n{results.markdown_table(rows)}")
    worst = max(cost for name, (_, _, cost, _) in costs.items() if name != "span")
    shares = [(r * worst + s * costs["span"][2]) / ns for r, s, ns in everything]
    busiest = max(range(world.size), key=shares.__getitem__)
    records, spans, step_ns = everything[busiest]
    print(f"\ndefault model on {world.size} rank(s): {records} records and {spans} spans in a step"
          f" of {step_ns * 1e-6:.1f} ms on rank {busiest}: {shares[busiest]:.3%} of it;"
          f" limit {SHARE_LIMIT:.0%}")
    if args.json:
        results.write(args.json, "bench.recorder", rows, ranks=world.size, records_per_step=records,
                      spans_per_step=spans, step_ms=round(step_ns * 1e-6, 1),
                      percent_of_step=round(100 * shares[busiest], 3))
    kept = worst <= CALL_LIMIT_NS and shares[busiest] <= SHARE_LIMIT
    if not kept:
        print("a limit is not kept")
    return 0 if kept else EXIT_CHECK_FAILED


if __name__ == "__main__":
    guard(main)
