"""The sender's core time of a message, measured with a clock that only products advance."""

from types import SimpleNamespace

import numpy as np
import pytest

from bench.machine import link

PRODUCT, HOP = 0.25, 8.0  # seconds, exact in binary


class Network:
    """A comm of place 0 or 1. While a message leaves place 0, a product takes twice as long."""

    def __init__(self, index, leaves):
        self.index, self.leaves = index, leaves
        self.now, self.left, self.calls = 0.0, 0, []
        self.wire = SimpleNamespace(ops=self)
        self.dtype, self.asarray = np.dtype("float32"), np.asarray

    def matmul(self, x, y):
        self.now += PRODUCT * (2 if self.left else 1)
        self.left = max(0, self.left - 1)

    def synchronize(self):
        pass

    def isend(self, x, peer, tag, name):
        assert peer == 1
        self.left = self.leaves
        return self._pending("isend", tag)

    def irecv(self, x, peer, tag, name):
        return self._pending("irecv", tag)

    def _pending(self, call, tag):
        self.calls.append((call, tag))
        return SimpleNamespace(test=lambda: True, wait=lambda: self._done(tag))

    def _done(self, tag):
        self.left = 0
        self.calls.append(("wait", tag))

    def send(self, x, peer, tag, name):
        self.calls.append(("send", tag))

    def recv(self, x, peer, tag, name):
        self.calls.append(("recv", tag))


@pytest.mark.parametrize("leaves", [0, 10, 10**6])
def test_sending_is_what_products_take_longer_meanwhile(leaves, monkeypatch):
    """Ten products take twice as long; at most all do, which take two hops alone."""
    places = [Network(index, leaves) for index in (0, 1)]
    x, y = np.zeros(4), np.zeros(4)
    found = []
    for place in places:
        monkeypatch.setattr(link, "perf_counter", lambda place=place: place.now)
        found.append(link.measure_sending(place, 1, x, y, HOP))
    assert found == [min(leaves * PRODUCT, 2 * HOP), 0.0]
    sender, receiver = (place.calls for place in places)
    assert sender == [("recv", 5), ("isend", 6), ("wait", 6)] * link.WORKS
    assert receiver == [("irecv", 6), ("send", 5), ("wait", 6)] * link.WORKS
