"""The cost of recording: a call through mpipar.comm compared with the bare mpi4py call, in one run.

    mpiexec -n 4 python -m bench.recorder

Part 1 runs on world rank 0 alone. It calls every operation on a communicator of one process, where
a message costs next to nothing and no other rank adds delay. The group only claims to have two
members, so that everything is recorded. The cost of a call is its time above the bare call. Bare
and recorded calls take turns in short batches, and the best batch of each is taken, because other
processes can only add time.

Part 2 runs on all ranks. It multiplies the records and spans in a training step of the default
model by these costs, and divides by the step's duration.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter_ns
from timeit import timeit
from typing import NamedTuple

import numpy as np

from bench.program import Outcome, Program
from bench.training import Trained
from mpipar import ops as ops_module
from mpipar.comm.group import Comm
from mpipar.comm.groups import Options
from mpipar.comm.hosts import quiet_barrier
from mpipar.comm.mpi import MpiTransport
from mpipar.comm.recorder import Recorder
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config
from mpipar.config.text import counted

BATCH = 200  # calls between two readings of the clock: short enough to fit between interruptions
TAG = 3


class Pair(NamedTuple):
    """An operation in mpi4py and through a Comm; records: how many it leaves, or spans."""

    records: int
    bare: Callable
    recorded: Callable


def pairs_of(mpi, comm, x, y) -> dict[str, Pair]:
    """Return every operation by its name. x: what is sent; y: what is received into."""
    from mpi4py import MPI

    def bare_messages():
        receive = mpi.Irecv(y, 0, TAG)
        send = mpi.Isend(x, 0, TAG)
        receive.Wait()
        send.Test()

    def recorded_messages():
        receive = comm.irecv(y, 0, TAG, "activations")
        send = comm.isend(x, 0, TAG, "activations")
        receive.wait()
        send.test()

    return {
        "all_reduce": Pair(
            1,
            lambda: mpi.Allreduce(MPI.IN_PLACE, x, op=MPI.SUM),
            lambda: comm.all_reduce(x, "block0.ffn.down"),
        ),
        "broadcast": Pair(
            1, lambda: mpi.Bcast(x, root=0), lambda: comm.broadcast(x, 0, "generate.next")
        ),
        "iall_reduce": Pair(
            1,
            lambda: mpi.Iallreduce(MPI.IN_PLACE, x).Wait(),
            lambda: comm.iall_reduce(x, "grads.bucket").wait(),
        ),
        "send_and_receive": Pair(2, bare_messages, recorded_messages),
        "span": Pair(1, lambda: None, lambda: comm.recorder.span("F", 0, 1, 2)),
    }


def check(name: str, pair: Pair, recorder: Recorder, x, y) -> None:
    """Assert that both sides move the same data, and that each leaves as many records as stated."""
    for call, count in ((pair.bare, 0), (pair.recorded, pair.records)):
        y[:] = 0
        before = len(recorder.records) + len(recorder.spans)
        call()
        assert len(recorder.records) + len(recorder.spans) - before == count, name
        assert (x == 1).all(), name
        assert name != "send_and_receive" or (y == 1).all()


def measure_calls(repeats: int) -> dict[str, dict]:
    """Return {name: row of an operation}."""
    from mpi4py import MPI

    recorder, mpi = Recorder(phase="F"), MPI.COMM_SELF.Dup()
    wire = MpiTransport(ops_module.make("cpu", "float32"), mpi, Options())
    x, y = np.ones(16, np.float32), np.zeros(16, np.float32)
    pairs = pairs_of(mpi, Comm("tp", (0, 1), 0, wire, recorder), x, y)
    samples: dict = {name: ([], []) for name in pairs}
    for name, pair in pairs.items():
        check(name, pair, recorder, x, y)
    for _ in range(repeats):
        for name, (_, *calls) in pairs.items():
            for call, times in zip(calls, samples[name], strict=True):
                times.append(timeit(call, number=BATCH))
    return {name: row(name, pairs[name].records, *times) for name, times in samples.items()}


def row(name: str, records: int, bare: list[float], recorded: list[float]) -> dict:
    """Return the figures of an operation per record; bare, recorded: seconds of batches."""
    each = 1e9 / BATCH / records
    best = [each * min(times) for times in (bare, recorded)]
    return {
        "operation": name,
        "bare_ns": best[0],
        "recorded_ns": best[1],
        "cost_ns": best[1] - best[0],
    }


def measure_step(world, steps: int) -> tuple[int, int, float]:
    """Return (records, spans, nanoseconds) of the default model's step here; medians over steps."""
    config, _ = resolve(Config(), world.size)
    recorder = Recorder(None)
    text = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint8)
    trained, durations = Trained(config, world, recorder, text), []
    for step in range(1, steps + 1):
        recorder.clear()
        start = perf_counter_ns()
        trained.step(step)
        durations.append(perf_counter_ns() - start)
    return len(recorder.records), len(recorder.spans), statistics.median(durations[1:])


def measure(args, session) -> Outcome | int:
    """Measure both parts."""
    world = session.world
    rows = measure_calls(args.repeats) if world.rank == 0 else {}
    quiet_barrier(world)
    records, spans, step_ns = measure_step(world, args.steps)
    everything = world.gather((records, spans, step_ns))
    if world.rank > 0:
        return 0
    worst = max(one["cost_ns"] for name, one in rows.items() if name != "span")
    shares = [(r * worst + s * rows["span"]["cost_ns"]) / ns for r, s, ns in everything]
    busiest = max(range(world.size), key=shares.__getitem__)
    records, spans, step_ns = everything[busiest]
    facts = {
        "ranks": world.size,
        "records_per_step": records,
        "spans_per_step": spans,
        "step_ms": round(step_ns * 1e-6, 1),
        "percent_of_step": round(100 * shares[busiest], 3),
    }
    return Outcome(
        list(rows.values()),
        facts,
        end=(
            f"\ndefault model on {counted(world.size, 'rank')}: {records} records and {spans}"
            f" spans in a step of {step_ns * 1e-6:.1f} ms on rank {busiest}:"
            f" {shares[busiest]:.3%} of it"
        ),
    )


main = Program(
    "recorder",
    __doc__,
    measure,
    together=True,
    counts={
        "--repeats": (400, "batches of each case"),
        "--steps": (6, "training steps, the first not counted"),
    },
).started(__name__)
