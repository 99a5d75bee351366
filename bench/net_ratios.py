"""`mpipar net` beside a bare mpi4py loop that shares nothing with it, in turns in one job.

    mpiexec -n 2 python -m bench.net_ratios [--rounds 5] [--json FILE]

Both use one buffer per message again and again. own_us: the loop below; mpi4py_us and comm_us: the
rows of `mpipar net` through bare mpi4py and through mpipar.comm. Each is the time that a twentieth
of all samples stays below, because other programs disturb most of them.
"""

from functools import partial
from time import perf_counter

import numpy as np

from bench.program import Outcome, Program
from mpipar.interconnect import job
from mpipar.interconnect.arguments import Arguments
from mpipar.interconnect.cases import BARE, COMM
from mpipar.interconnect.groups import make_team

CASES, SIZES = ("latency", "bandwidth", "all-reduce", "all-to-all"), (8, 4 << 10, 1 << 20, 4 << 20)
SAMPLES, WARM_UP, TRIPS, WINDOW, SHARE = 20, 5, 20, 16, 0.05


def latency(world, x, y):
    """Return a call of TRIPS round trips. Comm: these."""

    def run():
        for _ in range(TRIPS):
            if world.rank == 0:
                world.Send(x, 1)
                world.Recv(y, 1)
            else:
                world.Recv(y, 0)
                world.Send(x, 0)

    return run, 2 * TRIPS


def bandwidth(world, x, y):
    """Return a call that sends a window and gets a short answer. Comm: these."""
    from mpi4py import MPI

    rows = (x if world.rank == 0 else y).reshape(1, -1).repeat(WINDOW, axis=0)
    ack, call = np.zeros(1, np.uint8), (world.Isend if world.rank == 0 else world.Irecv)

    def run():
        MPI.Request.Waitall([call(row, 1 - world.rank) for row in rows])
        (world.Recv if world.rank == 0 else world.Send)(ack, 1 - world.rank)

    return run, WINDOW


def all_reduce(world, x, y):
    """Return a call that sums in place. Comm: an all-reduce."""
    from mpi4py import MPI

    return partial(world.Allreduce, MPI.IN_PLACE, x), 1


def all_to_all(world, x, y):
    """Return a call that exchanges halves. Comm: an all-to-all."""
    return partial(world.Alltoall, x, y), 1


OWN = dict(zip(CASES, (latency, bandwidth, all_reduce, all_to_all), strict=True))


def own_us(world, case: str, nbytes: int) -> list[float]:
    """Return the times of an operation on the slowest rank. Comm: its messages."""
    from mpi4py import MPI

    x, y = (np.ones(max(2, nbytes // 4), np.float32) for _ in range(2))
    call, each = OWN[case](world, x, y)
    times = np.empty(WARM_UP + SAMPLES)
    for number in range(len(times)):
        world.Barrier()
        start = perf_counter()
        call()
        times[number] = perf_counter() - start
    if case in ("latency", "bandwidth"):
        world.Bcast(times)  # the first rank's clock counts
    else:
        world.Allreduce(MPI.IN_PLACE, times, op=MPI.MAX)
    return (times[WARM_UP:] * 1e6 / each).tolist()


def measure(args, session) -> Outcome | int:
    """Measure both in turns, and report their ratios."""
    words = Arguments(CASES, buffers="reused", iterations=SAMPLES, window=WINDOW, end_bytes=4 << 20)
    bench, found = job.Bench(session, words), []
    for section in bench.sections:
        ways = {}
        for nbytes in SIZES:
            for _ in range(args.rounds):
                own = own_us(session.world, section.case.name, nbytes)
                team = make_team(section, "mpi-host", bench.ops, bench.world, bench.recorder, [])
                rows = bench.one(section, team, nbytes)
                team.close()
                for row in rows:
                    ways.setdefault((nbytes, row["via"]), []).extend(row["times_us"])
                ways.setdefault((nbytes, "own"), []).extend(own)
            own, bare, comm = (
                float(np.quantile(ways.get((nbytes, via), [1.0]), SHARE))
                for via in ("own", BARE, COMM)
            )
            found.append(
                {
                    "case": section.case.name,
                    "size_bytes": nbytes,
                    "rounds": args.rounds,
                    "own_us": own,
                    "mpi4py_us": bare,
                    "comm_us": comm,
                    "mpi4py_over_own": bare / own,
                    "comm_over_own": comm / own,
                }
            )
    if session.world.rank:
        return 0
    return Outcome(found, {"library": bench.head(None, [])["library"], "ranks": 2})


main = Program(
    "net_ratios",
    __doc__,
    measure,
    together=True,
    counts={"--rounds": (5, "turns of each size")},
).started(__name__)
