"""The recorder: every barrier and every compute span of a run, as plain values.

It knows neither MPI nor other hosts' clocks. A communication record is a list that is opened when
the operation is posted and closed when it is done, so a record whose `done_ns` is 0 is the
operation that this rank is inside of right now. Records lie in a ring (the newest ones win); the
counters beside the ring never overflow and give the tables that a run prints.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from sys import _getframe
from time import perf_counter_ns

PACKAGE = Path(__file__).resolve().parents[2]

# Positions in a record. Times are nanoseconds of this host's monotonic clock; bytes are per rank.
FIELDS = (
    "posted_ns", "waited_ns", "done_ns", "operation", "name", "axis", "seq", "peer", "tag",
    "payload_bytes", "wire_bytes", "dtype", "step", "stage", "mb", "phase", "site",
)
POSTED, WAITED, DONE, OPERATION, NAME, AXIS, SEQ, PEER, TAG = range(9)
PAYLOAD, WIRE, DTYPE, STEP, STAGE, MB, PHASE, SITE = range(9, 17)
TALLY = 17  # behind the fields: what `close` adds to

# What the records of one barrier share. A record must cost next to nothing, so these are found with
# one look-up when the operation is posted: calls, nanoseconds inside, wire bytes of a call,
# dtype, code and instruction of the last caller, and that caller as (file, line).
T_CALLS, T_NANOSECONDS, T_WIRE, T_DTYPE, T_CODE, T_INSTRUCTION, T_SITE = range(7)

# Fields of a compute span, and of an operation of a layer (recorded only when asked for).
SPAN_FIELDS = ("kind", "start_ns", "end_ns", "step", "stage", "mb")
OPERATION_FIELDS = ("layer", "function", "start_ns", "end_ns", "step", "stage", "mb", "phase")

# Positions in a counter: calls, payload bytes, wire bytes, nanoseconds inside the operation.
CALLS, BYTES, WIRE_BYTES, NANOSECONDS = range(4)


def wire_bytes(operation: str, payload: int, group_size: int) -> int:
    """Bytes that one rank sends for a payload of `payload` bytes, by the ring algorithm.

    The payload is the whole vector for all_reduce, the whole output for all_gather, the whole input
    for reduce_scatter and all_to_all. broadcast and reduce go from rank to rank along a chain: all
    but one send the payload, and each rank is booked the mean. Source: the bus-bandwidth factors of
    nccl-tests.
    """
    if operation == "all_reduce":
        return 2 * (group_size - 1) * payload // group_size
    if operation in ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"):
        return (group_size - 1) * payload // group_size
    if operation in ("recv", "barrier"):
        return 0
    return payload  # send


def family(name: str) -> str:
    """A barrier's name without its numbers: block3.ffn.down -> block*.ffn.down."""
    return re.sub(r"\d+", "*", name)


def place(path: str, line: int) -> str:
    """file:line, short inside this package."""
    try:
        return f"{Path(path).relative_to(PACKAGE)}:{line}"
    except ValueError:
        return f"{path}:{line}"


class Recorder:
    """Collects what one rank did: `records` of communication, `spans` of compute, and counters.

    The engine and the loop set `step, stage, mb, phase` before they call anything that may
    communicate. phase is F, I, W (compute of a schedule), sync (gradients, norm), opt, data, eval,
    save or setup. `operations` holds one entry for each operation of a layer, where the ops are
    wrapped for it (ops/timed_ops.py).
    """

    def __init__(self, capacity: int | None = 4096):
        self.records: deque = deque(maxlen=capacity)
        self.spans: deque = deque(maxlen=capacity)
        self.operations: list = []
        self._tallies: dict[tuple[str, str, str, str, int], list] = {}
        self.busy_ns: dict[str, int] = {}
        self.step = 0
        self.stage = -1
        self.mb = -1
        self.phase = "setup"

    def resize(self, capacity: int | None) -> None:
        """Give both rings room for `capacity` entries (None: for all); the newest are kept."""
        self.records = deque(self.records, maxlen=capacity)
        self.spans = deque(self.spans, maxlen=capacity)

    def reset_counters(self) -> None:
        """Start counting anew (the rings stay)."""
        self._tallies = {}
        self.busy_ns = {}

    @property
    def counters(self) -> dict[tuple[str, str, str, str, str], list[int]]:
        """(axis, barrier name, operation, phase, dtype) -> [calls, payload bytes, wire bytes,
        nanoseconds].
        """
        counters: dict = {}
        for (*key, payload), tally in self._tallies.items():
            calls = tally[T_CALLS]
            if calls:
                counter = counters.setdefault((*key, str(tally[T_DTYPE])), [0, 0, 0, 0])
                counter[CALLS] += calls
                counter[BYTES] += calls * payload
                counter[WIRE_BYTES] += calls * tally[T_WIRE]
                counter[NANOSECONDS] += tally[T_NANOSECONDS]
        return counters

    def open(self, operation, name, comm, payload, dtype, peer=-1, tag=-1):
        """Append a record for an operation that is being posted now, and return it for `close`.

        The call site is the caller of the communicator's method: two frames up from here.
        """
        frame = _getframe(2)
        comm.seq = seq = comm.seq + 1
        phase = self.phase
        key = (comm.axis, name, operation, phase, payload)
        tally = self._tallies.get(key)
        if tally is None:
            wire = wire_bytes(operation, payload, comm.size)
            tally = self._tallies[key] = [0, 0, wire, dtype, None, -1, None]
        # Finding a line number takes longer than all the rest, and the caller is mostly the same as
        # last time.
        if tally[T_CODE] is not frame.f_code or tally[T_INSTRUCTION] != frame.f_lasti:
            site = (frame.f_code.co_filename, frame.f_lineno)
            tally[T_CODE:] = frame.f_code, frame.f_lasti, site
        now = perf_counter_ns()
        record = [
            now, now, 0, operation, name, comm.axis, seq, peer, tag, payload, tally[T_WIRE], dtype,
            self.step, self.stage, self.mb, phase, tally[T_SITE], tally,
        ]
        self.records.append(record)
        return record

    def close(self, record) -> None:
        """Mark the record's operation as done now and count it."""
        record[DONE] = now = perf_counter_ns()
        tally = record[TALLY]
        tally[T_CALLS] += 1
        tally[T_NANOSECONDS] += now - record[WAITED]

    def span(self, kind: str, start_ns: int, stage: int = -1, mb: int = -1) -> None:
        """Append a compute span that began at `start_ns` and ends now."""
        end = perf_counter_ns()
        self.spans.append((kind, start_ns, end, self.step, stage, mb))
        self.busy_ns[kind] = self.busy_ns.get(kind, 0) + end - start_ns

    def totals(self, by: tuple[int, ...] = (0,)) -> dict:
        """Sum the counters over everything but the key positions in `by`.

        Key positions: 0 axis, 1 barrier name, 2 operation, 3 phase, 4 dtype. Values: [calls,
        payload bytes, wire bytes, nanoseconds].
        """
        sums: dict = {}
        for key, counter in self.counters.items():
            short = tuple(key[i] for i in by)
            entry = sums.setdefault(short, [0, 0, 0, 0])
            for i, value in enumerate(counter):
                entry[i] += value
        return sums

    def flight_ns(self, axis: str) -> tuple[int, int]:
        """Nanoseconds from posting to the end of the messages over `axis` that are in the ring, and
        how many of these the rank went on working in.
        """
        sent = [record for record in self.records
                if record[AXIS] == axis and record[OPERATION] in ("send", "recv") and record[DONE]]
        return (sum(record[DONE] - record[POSTED] for record in sent),
                sum(record[WAITED] - record[POSTED] for record in sent))

    def comm_ns(self) -> int:
        """Nanoseconds that this rank has been inside communication since the counters began."""
        return sum(counter[NANOSECONDS] for counter in self.counters.values())
