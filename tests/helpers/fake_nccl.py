"""Replaces cupy.cuda.nccl by MPI, together with tests/helpers/fake_cupy.py, by address.

A thread plays the GPU. On each stream it begins a call when the one before is done, whatever the
host does meanwhile. So calls in an order in which NCCL would wait for ever wait for ever here, and
messages are matched by their order. What arrives is NaN until the host has seen its event. An array
must not be changed while it is sent, nor handed over while the default stream may still write it.
"""

import ctypes
import itertools
import threading
import time
from collections import deque

import fake_cupy
import numpy as np
from mpi4py import MPI

assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
BOOT = MPI.COMM_WORLD.Dup()  # how members of a new communicator find each other
KEYS = itertools.count(1)
NAP = 5e-5  # seconds
NCCL_INT8, NCCL_INT64, NCCL_UINT64, NCCL_FLOAT32, NCCL_FLOAT64 = 0, 4, 5, 7, 8
NCCL_SUM, NCCL_MAX = 0, 2
DTYPES = {
    NCCL_INT8: np.int8,
    NCCL_INT64: np.int64,
    NCCL_UINT64: np.uint64,
    NCCL_FLOAT32: np.float32,
    NCCL_FLOAT64: np.float64,
}
OPS = {NCCL_SUM: MPI.SUM, NCCL_MAX: MPI.MAX}
available = True


def get_version():
    return 22800


def get_unique_id():
    return np.array([BOOT.rank, next(KEYS)], np.int64).tobytes().ljust(128, b"\0")


class Call:
    """A call on a stream.

    start() posts its messages and returns their requests. lands: (memory, what arrives there).
    sent: memory that the call reads.
    """

    def __init__(self, start, lands=(), sent=()):
        assert not fake_cupy.default.busy, "NCCL gets an array that is still being computed"
        self.start, self.lands = start, lands
        self.sent = [(memory, memory.copy()) for memory in sent]
        self.requests, self.error = None, None
        self.ready = self.done = False  # done: the host has seen it
        for memory, _ in lands:
            memory.view(np.uint8)[:] = 0xFF

    def progress(self):
        """Continue, as the GPU; return whether it is done."""
        try:
            self.requests = self.start() if self.requests is None else self.requests
            self.ready = MPI.Request.Testall(self.requests)
        except MPI.Exception as error:
            self.error, self.ready = error, True
        return self.ready

    def run(self):
        """Wait for it, as the host."""
        while not self.ready:
            time.sleep(NAP)
        assert self.error is None, self.error
        for memory, before in self.sent:
            assert np.array_equal(memory.view(np.uint8), before.view(np.uint8)), (
                "an array is written while it is sent"
            )
        for memory, arrived in self.lands:
            memory[:] = arrived
        self.done = True


class Gpu:
    """Runs the calls of all streams."""

    def __init__(self):
        self.queues, self.changed = {}, threading.Condition()
        self.group = None  # the calls between groupStart and groupEnd
        threading.Thread(target=self.run, daemon=True).start()

    def post(self, address, call):
        stream = fake_cupy.Stream.by_address[address]
        stream.copies.append(call)
        with self.changed:
            self.queues.setdefault(address, deque()).append(call)
            self.changed.notify()

    def run(self):
        while True:
            with self.changed:
                self.queues = {key: queue for key, queue in self.queues.items() if queue}
                if not self.queues:
                    self.changed.wait()
                queues = list(self.queues.values())
            for queue in queues:
                if queue[0].progress():
                    queue.popleft()
            time.sleep(NAP)


gpu = Gpu()


def settle():
    """Return once all calls are through; until then MPI still needs the groups of a broken twin."""
    while any(gpu.queues.values()):
        time.sleep(NAP)


def groupStart():
    assert gpu.group is None
    gpu.group = []


def groupEnd():
    group, gpu.group = gpu.group, None
    for stream in {stream for stream, _ in group}:
        calls = [call for to, call in group if to == stream]
        whole = Call(lambda calls=calls: [one for call in calls for one in call.start()])
        whole.lands = [one for call in calls for one in call.lands]
        whole.sent = [one for call in calls for one in call.sent]
        gpu.post(stream, whole)


def array(address, count, kind):
    dtype = np.dtype(DTYPES[kind])
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)


OPEN = set()  # communicators that are not destroyed


class NcclCommunicator:
    """A communicator: its members meet at the one that made the key."""

    def __init__(self, size, key, rank):
        assert isinstance(key, bytes)
        maker, number = map(int, np.frombuffer(key[:16], np.int64))
        members = np.zeros(size, np.int64)
        if BOOT.rank == maker:
            members[rank] = maker
            for _ in range(size - 1):
                one = np.zeros(2, np.int64)
                BOOT.Recv(one, tag=number)
                members[one[0]] = one[1]
            for member in set(members.tolist()) - {maker}:
                BOOT.Send(members, member, tag=number)
        else:
            BOOT.Send(np.array([rank, BOOT.rank]), maker, tag=number)
            BOOT.Recv(members, maker, tag=number)
        group = BOOT.group.Incl(members.tolist())
        self.mpi = BOOT.Create_group(group, tag=number)
        assert (size, rank) == (self.mpi.size, self.mpi.rank)
        OPEN.add(self)

    def collective(self, stream, source, target, post):
        """post(what is sent, what arrives) -> request, on copies of both."""
        sent, arrived = source.copy(), target.copy()
        gpu.post(stream, Call(lambda: [post(sent, arrived)], [(target, arrived)]))

    def allReduce(self, source, target, count, kind, op, stream):
        self.collective(
            stream,
            array(source, count, kind),
            array(target, count, kind),
            lambda sent, arrived: self.mpi.Iallreduce(sent, arrived, OPS[op]),
        )

    def allGather(self, source, target, count, kind, stream):
        whole = array(target, count * self.mpi.size, kind)
        own = target + self.mpi.rank * count * whole.itemsize
        assert source == own or not target <= source < target + whole.nbytes, "NCCL's rule"
        self.collective(stream, array(source, count, kind), whole, self.mpi.Iallgather)

    def reduceScatter(self, source, target, count, kind, op, stream):
        whole = array(source, count * self.mpi.size, kind)
        own = source + self.mpi.rank * count * whole.itemsize
        assert target == own or not source <= target < source + whole.nbytes, "NCCL's rule"
        self.collective(
            stream,
            whole,
            array(target, count, kind),
            lambda sent, arrived: self.mpi.Ireduce_scatter_block(sent, arrived, OPS[op]),
        )

    def broadcast(self, source, target, count, kind, root, stream):
        assert source == target
        x = array(target, count, kind)
        self.collective(stream, x, x, lambda sent, arrived: self.mpi.Ibcast(arrived, root))

    def reduce(self, source, target, count, kind, op, root, stream):
        x = array(source, count, kind)
        sent, arrived, here = x.copy(), x.copy(), self.mpi.rank == root
        gpu.post(
            stream,
            Call(
                lambda: [self.mpi.Ireduce(sent, arrived if here else None, OPS[op], root)],
                [(array(target, count, kind), arrived)] if here else [],
            ),
        )

    def message(self, stream, call):
        if gpu.group is None:
            gpu.post(stream, call)
        else:
            gpu.group.append((stream, call))

    def send(self, source, count, kind, peer, stream):
        x = array(source, count, kind)
        self.message(stream, Call(lambda: [self.mpi.Issend(x, peer)], sent=[x]))

    def recv(self, target, count, kind, peer, stream):
        x = array(target, count, kind)
        arrived = x.copy()
        self.message(stream, Call(lambda: [self.mpi.Irecv(arrived, peer)], [(x, arrived)]))

    def check_async_error(self):
        """Find no error: a rank that is gone ends the job. CuPy lets other threads run here."""
        time.sleep(0)

    def destroy(self):
        self.mpi.Free()
        OPEN.remove(self)
