"""A link and messages of one size: the facts that the simulator needs (`pipeline.events`).

A message takes `hop` seconds if the link is free, and occupies it for `busy` seconds. If it travels
*alone*, it also moves while its sender computes: buffers below MPI take it, or the receiver fetches
it. Otherwise it is a rendezvous, for which both ranks must be inside MPI. It costs its sender's
core some `sending` seconds, because the core also runs the network's software.
"""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np

REPEATS = 5  # after a warm-up
WINDOW = 8  # messages back to back
WORKS = 9  # the lower quartile is taken: now and then another core does the sending
TRIES = 2  # a single arrival may be late by chance
AWAY_HOPS, LATE_HOPS = 3, 2  # how long a sender stays away from MPI, and when an arrival is late
AWAY_SECONDS = 0.01  # at least
SIDE = 64  # of the matrices whose products are computed while a message leaves
WORK_HOPS, WORK_SECONDS = 2, 0.001  # how long these products take, and at least
SLICES = 8  # of the products; MPI is called between them, as between the units of a pass


class Link(NamedTuple):
    """One message of nbytes: its seconds, those on the link, whether it travels alone, and the
    seconds of its sender's core.
    """

    nbytes: int
    hop: float
    busy: float
    alone: bool
    sending: float


def measure_link(comm, peer: int, x, y) -> Link | None:
    """Return the link between place 0 of a group and `peer`, for messages like x; on place 0.

    x, y: two arrays of the message's size, which are overwritten. Comm: messages between the two;
    every other rank gets None at once.
    """
    if comm.index not in (0, peer):
        return None
    hop = measure_hop(comm, peer, x)
    windows = [one_window(comm, peer, x, y) for _ in range(TRIES)]
    busy = max(0.0, median(windows) - 2 * hop) / (WINDOW - 1)
    return Link(
        x.nbytes,
        hop,
        min(hop, busy),
        goes_alone(comm, peer, x, y, hop),
        measure_sending(comm, peer, x, y, hop),
    )


def measure_hop(comm, peer: int, x, repeats: int = REPEATS) -> float:
    """Return half the median round-trip time of a message. Comm: a ping-pong."""
    times = [perf_counter()]
    for _ in range(1 + repeats):
        if comm.index == 0:
            comm.send(x, peer, 0, "measure.hop")
            comm.recv(x, peer, 0, "measure.hop")
        else:
            comm.recv(x, 0, 0, "measure.hop")
            comm.send(x, 0, 0, "measure.hop")
        times.append(perf_counter())
    return median((end - start) / 2 for start, end in pairwise(times[1:]))


def one_window(comm, peer: int, x, y) -> float:
    """Return the seconds of WINDOW messages to the peer and one back. Comm: these messages."""
    start = perf_counter()
    if comm.index == 0:
        for pending in [comm.isend(x, peer, 1, "measure.window") for _ in range(WINDOW)]:
            pending.wait()
        comm.recv(y, peer, 2, "measure.window")
    else:
        for pending in [comm.irecv(y, 0, 1, "measure.window") for _ in range(WINDOW)]:
            pending.wait()
        comm.send(x, 0, 2, "measure.window")
    return perf_counter() - start


def goes_alone(comm, peer: int, x, y, hop: float) -> bool:
    """Return whether a message of the peer arrives while the peer stays away from MPI; on place 0.

    hop: as each of the two has measured it. Comm: a few messages.
    """
    arrivals = []
    for _ in range(TRIES):
        start, ready = perf_counter(), x.reshape(-1)[:1]
        if comm.index == 0:
            pending = comm.irecv(y, peer, 3, "measure.alone")
            comm.send(ready, peer, 4, "measure.alone")
            pending.wait()
        else:
            comm.recv(ready, 0, 4, "measure.alone")
            pending = comm.isend(y, 0, 3, "measure.alone")
            time.sleep(max(AWAY_SECONDS, AWAY_HOPS * hop))
            pending.wait()
        arrivals.append(perf_counter() - start)
    return min(arrivals) < max(AWAY_SECONDS, LATE_HOPS * hop)


def measure_sending(comm, peer: int, x, y, hop: float) -> float:
    """Return how much longer products take on place 0 while a message to the peer leaves.

    hop: as place 0 has measured it. Comm: a few messages.
    """
    ops, ready, alone, beside = comm.wire.ops, x.reshape(-1)[:1], [], []
    matrix = ops.asarray(np.full((SIDE, SIDE), 1 / SIDE, ops.dtype))

    def work(count: int, pending=None) -> float:
        """Return the seconds of SLICES times `count` products."""
        start = perf_counter()
        for _ in range(SLICES):
            for _ in range(count):
                ops.matmul(matrix, matrix)
            if pending is not None:
                pending.test()
        ops.synchronize()
        return perf_counter() - start

    if comm.index == 0:
        work(1)
        count = max(1, round(max(WORK_SECONDS, WORK_HOPS * hop) / work(1)))
    for _ in range(WORKS):
        if comm.index == 0:
            comm.recv(ready, peer, 5, "measure.sending")
            alone.append(work(count))
            start = perf_counter()
            pending = comm.isend(y, peer, 6, "measure.sending")
            beside.append(perf_counter() - start + work(count, pending))
            pending.wait()
        else:
            pending = comm.irecv(y, 0, 6, "measure.sending")
            comm.send(ready, 0, 5, "measure.sending")
            pending.wait()
    return max(0.0, sorted(beside)[WORKS // 4] - min(alone)) if beside else 0.0
