"""The recorder: every barrier and every compute span of a run, as plain values.

It knows neither MPI nor other hosts' clocks. A communication record is a list that is opened when the
operation is posted and closed when it is done, so a record whose `done_ns` is 0 is the operation that this
rank is inside of right now. Records lie in a ring (the newest ones win); the counters beside the ring never
overflow and give the tables that a run prints.
"""

from __future__ import annotations

import sys
from collections import deque
from time import perf_counter_ns

# Positions in a record. Times are nanoseconds of this host's monotonic clock; bytes are per rank.
FIELDS = (
    "posted_ns", "waited_ns", "done_ns", "operation", "name", "axis", "seq", "peer", "tag",
    "payload_bytes", "wire_bytes", "dtype", "step", "stage", "mb", "phase", "site",
)
POSTED, WAITED, DONE, OPERATION, NAME, AXIS, SEQ, PEER, TAG = range(9)
PAYLOAD, WIRE, DTYPE, STEP, STAGE, MB, PHASE, SITE = range(9, 17)

# Positions in a counter: calls, payload bytes, wire bytes, nanoseconds inside the operation.
CALLS, BYTES, WIRE_BYTES, NANOSECONDS = range(4)


def wire_bytes(operation: str, payload: int, group_size: int) -> int:
    """Bytes that one rank sends for a payload of `payload` bytes, by the ring algorithm.

    The payload is the whole vector for all_reduce, the whole output for all_gather, the whole input for
    reduce_scatter and all_to_all. Source: the bus-bandwidth factors of nccl-tests' performance notes.
    """
    if operation == "all_reduce":
        return 2 * (group_size - 1) * payload // group_size
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return (group_size - 1) * payload // group_size
    if operation in ("recv", "barrier"):
        return 0
    return payload  # send, broadcast


class Recorder:
    """Collects what one rank did: `records` of communication, `spans` of compute, and counters.

    The engine and the loop set `step, stage, mb, phase` before they call anything that may communicate.
    phase is F, I, W (compute of a schedule), sync (gradients, norm), opt, data, eval, save or setup.
    """

    def __init__(self, capacity: int = 4096):
        self.records: deque = deque(maxlen=capacity)
        self.spans: deque = deque(maxlen=capacity)
        self.counters: dict[tuple[str, str, str, str], list[int]] = {}
        self.busy_ns: dict[str, int] = {}
        self.step = 0
        self.stage = -1
        self.mb = -1
        self.phase = "setup"

    def resize(self, capacity: int) -> None:
        """Give both rings room for `capacity` entries; the newest present ones are kept."""
        self.records = deque(self.records, maxlen=capacity)
        self.spans = deque(self.spans, maxlen=capacity)

    def reset_counters(self) -> None:
        """Start counting anew (the rings stay)."""
        self.counters = {}
        self.busy_ns = {}

    def open(self, operation, name, comm, payload, dtype, peer=-1, tag=-1):
        """Append a record for an operation that is being posted now, and return it for `close`.

        The call site is the caller of the communicator's method: two frames up from here.
        """
        frame = sys._getframe(2)
        comm.seq += 1
        now = perf_counter_ns()
        record = [
            now, now, 0, operation, name, comm.axis, comm.seq, peer, tag, payload,
            wire_bytes(operation, payload, comm.size), dtype, self.step, self.stage, self.mb,
            self.phase, (frame.f_code.co_filename, frame.f_lineno),
        ]
        self.records.append(record)
        return record

    def close(self, record) -> None:
        """Mark the record's operation as done now and count it."""
        now = perf_counter_ns()
        record[DONE] = now
        key = (record[AXIS], record[NAME], record[OPERATION], record[PHASE])
        counter = self.counters.get(key)
        if counter is None:
            counter = self.counters[key] = [0, 0, 0, 0]
        counter[CALLS] += 1
        counter[BYTES] += record[PAYLOAD]
        counter[WIRE_BYTES] += record[WIRE]
        counter[NANOSECONDS] += now - record[WAITED]

    def span(self, kind: str, start_ns: int, stage: int = -1, mb: int = -1) -> None:
        """Append a compute span that began at `start_ns` and ends now."""
        end = perf_counter_ns()
        self.spans.append((kind, start_ns, end, self.step, stage, mb))
        self.busy_ns[kind] = self.busy_ns.get(kind, 0) + end - start_ns

    def totals(self, by: tuple[int, ...] = (0,)) -> dict:
        """Sum the counters over everything but the key positions in `by`.

        Key positions: 0 axis, 1 barrier name, 2 operation, 3 phase. Values: [calls, payload bytes,
        wire bytes, nanoseconds].
        """
        sums: dict = {}
        for key, counter in self.counters.items():
            short = tuple(key[i] for i in by)
            entry = sums.setdefault(short, [0, 0, 0, 0])
            for i, value in enumerate(counter):
                entry[i] += value
        return sums

    def comm_ns(self) -> int:
        """Nanoseconds that this rank has been inside communication since the counters began."""
        return sum(counter[NANOSECONDS] for counter in self.counters.values())
