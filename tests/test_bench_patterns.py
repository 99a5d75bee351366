"""The benchmark's payloads: no two may look the same, so that a swap shows."""

import numpy as np

from bench.interconnect.cases import APART, pattern
from bench.interconnect.messages import MOST_MESSAGES


def test_no_two_senders_parts_or_messages_are_alike():
    ranks, window = 300, 200
    parts = range(ranks * ranks)  # of an all-to-all
    messages = [source * MOST_MESSAGES + place
                for source in range(ranks) for place in range(window)]
    for indices in (parts, messages):
        first = {float(pattern(index, 1, np.float32)[0]) for index in indices}
        assert len(first) == len(indices)
    values = pattern(7, 5000, np.float32)
    assert np.array_equal(values, (np.arange(5000) + 7 * APART) % ((1 << 24) - 1) + 1)
    assert len(set(values.tolist())) == 5000
    assert np.array_equal(values, pattern(7, 5000, np.float64))


def test_parts_that_are_summed_differ_and_their_sums_are_exact():
    ranks = 61
    sums = []
    for part in range(ranks):
        terms = [pattern(rank * ranks + part, 3, np.float32, ranks) for rank in range(ranks)]
        exact = sum(one.astype(np.int64) for one in terms)
        assert np.array_equal(sum(terms), exact)
        assert np.array_equal(sum(reversed(terms)), exact)
        sums.append(tuple(exact.tolist()))
    assert len(set(sums)) == ranks
    top = (1 << 24) // 4096 - 1
    assert 4096 * max(pattern(index, 1, np.int64, 4096)[0] for index in range(top)) < 1 << 24
