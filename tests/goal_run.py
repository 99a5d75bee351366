"""Reads GOAL text strictly, and executes it on an ideal machine, for the tests."""

import heapq
import re
from collections import defaultdict
from dataclasses import dataclass, field

OPERATION = re.compile(
    r"(\w+): (?:calc (?P<calc>\d+)|(?P<verb>send|recv) (?P<size>\d+)b (?P<way>to|from)"
    r" (?P<peer>\d+) tag (?P<tag>\d+))"
)
CLAUSE = re.compile(r"(\w+) (requires|irequires) (\w+)")
MOST_TAG = 2**32 - 2  # the last one is LogGOPSim's word for any tag


@dataclass
class Operation:
    """calc: nanoseconds, or None. verb, size, peer, tag: of a message. after: [(label, word)]."""

    calc: int | None
    verb: str = ""
    size: int = 0
    peer: int = -1
    tag: int = 0
    after: list = field(default_factory=list)
    begin: float = -1
    end: float = -1


def parse(text: str) -> list[dict[str, Operation]]:
    """{label: Operation} of each rank; raises ValueError with the line that is wrong."""
    first, *lines = text.splitlines()
    count = int(re.fullmatch(r"num_ranks (\d+)", first)[1])
    ranks: list[dict[str, Operation]] = []
    inside = False
    for line in lines:
        if line == f"rank {len(ranks)} {{" and not inside:
            ranks.append({})
            inside = True
        elif line == "}" and inside:
            inside = False
        elif inside and (found := OPERATION.fullmatch(line)) and found[1] not in ranks[-1]:
            if found["calc"] is not None:
                ranks[-1][found[1]] = Operation(int(found["calc"]))
                continue
            assert (found["verb"], found["way"]) in {("send", "to"), ("recv", "from")}, line
            one = Operation(
                None, found["verb"], int(found["size"]), int(found["peer"]), int(found["tag"])
            )
            assert one.size > 0, line
            assert one.peer < count, line
            assert one.peer != len(ranks) - 1, line
            assert one.tag <= MOST_TAG, line
            ranks[-1][found[1]] = one
        elif inside and (found := CLAUSE.fullmatch(line)) and {found[1], found[3]} <= {*ranks[-1]}:
            ranks[-1][found[1]].after.append((found[3], found[2]))
        else:
            raise ValueError(line)
    assert not inside, "a rank without an end"
    assert len(ranks) == count, (len(ranks), count)
    return ranks


def execute(ranks: list[dict[str, Operation]], latency: int = 0) -> float:
    """Give every operation its begin and end; return the last end.

    A rank computes one thing at a time. A message takes `latency`, and costs its ranks nothing.
    Raises AssertionError where some operation never begins.
    """
    waiting, followers = [], []
    for operations in ranks:
        waiting.append({label: len(one.after) for label, one in operations.items()})
        behind = defaultdict(list)
        for label, one in operations.items():
            for other, word in one.after:
                behind[other, word].append(label)
        followers.append(behind)
    ready = [
        (0, rank, label)
        for rank, counts in enumerate(waiting)
        for label, count in counts.items()
        if not count
    ]
    heapq.heapify(ready)
    free, sent, posted = [0.0] * len(ranks), defaultdict(list), defaultdict(list)
    left, last = sum(map(len, ranks)), 0.0

    def follow(time, rank, label, word):
        for other in followers[rank][label, word]:
            waiting[rank][other] -= 1
            if not waiting[rank][other]:
                heapq.heappush(ready, (time, rank, other))

    def finish(time, rank, label):
        nonlocal left, last
        ranks[rank][label].end, left, last = time, left - 1, max(last, time)
        follow(time, rank, label, "requires")

    while ready:
        time, rank, label = heapq.heappop(ready)
        one = ranks[rank][label]
        if one.calc is not None:
            one.begin = max(time, free[rank])
            free[rank] = one.begin + one.calc
            follow(one.begin, rank, label, "irequires")
            finish(free[rank], rank, label)
            continue
        one.begin = time
        follow(time, rank, label, "irequires")
        if one.verb == "send":
            key = rank, one.peer, one.tag
            sent[key].append((time + latency, one.size))
            finish(time, rank, label)
        else:
            key = one.peer, rank, one.tag
            posted[key].append(label)
        while sent[key] and posted[key]:
            arrival, size = sent[key].pop(0)
            target, other = key[1], posted[key].pop(0)
            assert ranks[target][other].size == size, (key, size)
            finish(max(arrival, ranks[target][other].begin), target, other)
    assert not left, f"{left} operations never end"
    return last
