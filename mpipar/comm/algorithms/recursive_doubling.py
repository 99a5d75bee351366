"""Recursive doubling: pairs exchange whole arrays, at distances 1, 2, 4 and so on.

After log2(size) exchanges every rank has the sum. This is the lowest latency, at the price of about
log2(size) / 2 times the bytes of a ring. Where the size is not a power of two, each surplus rank
first hands its numbers to a partner and later gets the sum from it. Both ranks of a pair add the
same two arrays, so all end with the same bits. Source: Thakur, Rabenseifner and Gropp, doi
10.1177/1094342005051521.
"""

from __future__ import annotations

import numpy as np

from mpipar.comm.algorithms.steps import Steps, StepwiseTransport, add
from mpipar.ops.signature import Array


class RecursiveDoublingTransport(StepwiseTransport):
    """Sums by recursive doubling."""

    def summed(self, x: Array) -> Steps:
        tag, most = self.next_tag(), 1 << self.size.bit_length() - 1
        surplus = self.size - most
        if self.index >= most:
            partner = self.index - most
            yield self.send(tag, x, partner)
            yield self.receive(tag, x, partner)
            return
        room, distance = np.empty_like(x), 1
        if self.index < surplus:
            yield self.receive(tag, room, self.index + most)
            add(x, room, x)
        while distance < most:
            peer = self.index ^ distance
            yield self.exchange(tag, x, peer, room, peer)
            add(x, room, x)
            distance *= 2
        if self.index < surplus:
            yield self.send(tag, x, self.index + most)
