"""Streams of the stand-in for CuPy on which copies run as late as CUDA allows.

A copy runs when its event is waited for, or one at each test of an event. Until then its
destination holds NaN, and so do programs that read it too early. Host memory that is freed while a
copy still needs it is detected: the copy then fails.
"""

import ctypes
from collections import deque
from typing import ClassVar

import numpy as np


class Copy:
    """A queued copy between two arrays of equal shape; host: the one of them in host memory.

    leaves: it goes to the host. ready: what it waits for beside the copies before it is done.
    """

    ready = True

    def __init__(self, to, source, host):
        assert to.shape == source.shape, (to.shape, source.shape)
        for x in (to, source):
            assert x.flags.c_contiguous, (x.shape, x.strides)
        # By address: the program has to keep the host memory alive, and this must not help.
        self.places = to.ctypes.data, source.ctypes.data, to.nbytes
        self.host, self.leaves = host.ctypes.data, host is to
        self.device = source if self.leaves else to
        self.done = self.homeless = False
        to.reshape(-1).view(np.uint8)[:] = 0xFF

    def run(self):
        assert not self.homeless, "page-locked memory is given back while a copy needs it"
        ctypes.memmove(*self.places)
        self.done = True


class Stream:
    """A queue of copies."""

    queued: ClassVar[set] = set()  # the copies of all streams that have not run
    by_address: ClassVar[dict] = {}  # all streams

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        assert non_blocking, "this stream waits for the default one: nothing would overlap"
        self.copies = deque()
        self.ptr = len(self.by_address) + 1
        self.by_address[self.ptr] = self

    def copy(self, to, source, host):
        copy = Copy(to, source, host)
        self.queued.add(copy)
        self.copies.append(copy)

    def run_one(self):
        copy = self.copies.popleft()
        self.queued.discard(copy)
        copy.run()

    def record(self, event=None):
        return event or Event(self)


class Event:
    """The end of all copies that are on the stream now."""

    def __init__(self, stream):
        self.stream, self.copies = stream, tuple(stream.copies)

    @property
    def done(self):
        """Whether they have run; a look takes as long as a copy."""
        if all(copy.done for copy in self.copies):
            return True
        if self.stream.copies[0].ready:
            self.stream.run_one()
        return False

    def synchronize(self):
        while not all(copy.done for copy in self.copies):
            self.stream.run_one()


class Pinned(bytearray):
    """Page-locked memory that knows when the program gives it back."""

    def __init__(self, nbytes):
        super().__init__(nbytes)
        self.address = np.frombuffer(self, np.uint8).ctypes.data

    def __del__(self):
        for copy in Stream.queued:
            if self.address <= copy.host < self.address + len(self):
                copy.homeless = True
