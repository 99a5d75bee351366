"""All ranks of a layout in one process, a thread each: real workers that exchange small facts."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.train.worker import Worker

LIMIT = 60.0  # seconds that a thread waits for the others


class World:
    """What `comm.objects` needs of an mpi4py communicator, for one of several threads."""

    def __init__(self, rank, size, shared):
        self.rank, self.size, self.shared = rank, size, shared

    def _everybody(self, x):
        """Every thread's x, in the order of the ranks."""
        slots, barrier = self.shared
        slots[self.rank] = x
        barrier.wait(LIMIT)
        found = list(slots)
        barrier.wait(LIMIT)
        return found

    def Bcast(self, x, root=0):
        as_bytes(x)[...] = self._everybody(as_bytes(x).copy())[root]

    def Gather(self, x, into, root=0):
        found = self._everybody(as_bytes(x))
        if self.rank == root:
            as_bytes(into)[...] = np.concatenate(found)

    def Gatherv(self, x, into, root=0):
        self.Gather(x, into and into[0], root)


def as_bytes(buffer):
    """The bytes of an array or of any other buffer, not copied."""
    if isinstance(buffer, np.ndarray):
        return buffer.reshape(-1).view(np.uint8)
    return np.frombuffer(buffer, np.uint8)


def workers_of(config, num_ranks):
    """The workers of all ranks of a resolved config. They hold zeros and can't train."""
    shared = [None] * num_ranks, threading.Barrier(num_ranks)
    found = []
    for number in range(num_ranks):
        worker = Worker(
            config,
            Grid.of(config.grid, number),
            ops_module.make(config.run.device, config.run.dtype),
            Recorder(),
        )
        worker.comms.mpi_world = World(number, num_ranks, shared)
        found.append(worker)
    return found


def on_all(function, values):
    """Call function(value) in one thread for each value, all at the same time; the results."""
    with ThreadPoolExecutor(len(values)) as pool:
        futures = [pool.submit(function, value) for value in values]
        return [future.result() for future in futures]
