"""bench.interconnect with a fault in the all-reduce of world rank 1, for the tests.

mpiexec -n 2 python tests/faulty_bench.py wrong|stall|straggler CASE... [options]
"""

import sys
import time

from bench.interconnect import __main__ as interconnect
from mpipar.comm.transport import HostTransport
from mpipar.job.session import guard

CALLS_BEFORE_STALL = 5  # the check and the warm-up: so many are made on any machine
LATE_SECONDS = 5e-3  # more than another process may hold a core for


def wrong(x, calls):
    """The last element arrives wrong."""
    x[-1] += 1


def stall(x, calls):
    """After some calls this rank does not come back."""
    if calls > CALLS_BEFORE_STALL:
        time.sleep(600)


def straggler(x, calls):
    """This rank is always the last to be done."""
    end = time.perf_counter() + LATE_SECONDS
    while time.perf_counter() < end:
        pass


def main(argv, session):
    """Put the fault in, then benchmark."""
    fault, plain, calls = {"wrong": wrong, "stall": stall, "straggler": straggler}[
        argv[0]], HostTransport.all_reduce, []

    def all_reduce(self, x, op):
        plain(self, x, op)
        if session.world.rank == 1:
            calls.append(None)
            fault(x, len(calls))

    HostTransport.all_reduce = all_reduce
    return interconnect.main(argv[1:], session)


if __name__ == "__main__":
    sys.argv[0] = "bench.interconnect"
    guard(main)
