"""The cases: one table of what is sent, and how, through `mpipar.comm` and through bare mpi4py.

A row of CASES has the shapes of what a rank gives and gets, the call both ways, what must arrive,
and the bus factor: what the busiest link carries per byte of the size. Sizes follow nccl-tests: the
whole vector for all-reduce and broadcast, the whole output for all-gather, the whole input for
reduce-scatter and all-to-all; that of one message for messages.

MPI does not know bfloat16 and cannot add float16, so 16-bit numbers exist only through mpipar.comm.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import finfo

from mpipar.comm.grid import consecutive_slices

COMM, BARE, IN_C = "mpipar.comm", "mpi4py", "C"
NAME, TAG, ACK_TAG, ACK_BYTES = "net", 5, 6, 4
SHORT_BYTES, SHORT_ROUNDS, LONG_ROUNDS = 16 << 10, 50, 10  # round trips between two clock readings
MOST_BITS = 24  # of the numbers in a payload: float32 holds every integer up to there
APART = 1_000_003  # distance of neighbours' patterns; a prime, so that few patterns coincide
AT_ONCE = 1 << 22  # elements that are written or compared between two signs of progress
Shape = tuple[int, ...]
Route = tuple[list[tuple[int, int]], list[tuple[int, int]]]  # (peer, tag) of sends, of receives
# What share of a rank's tokens each expert gets, from which all-to-all-v makes its parts.
# Name: (numbers of the experts from 0, which of them the next rank holds) -> their weights
ROUTINGS: dict[str, Callable[[Any, Any], Any]] = {
    "uniform": lambda number, on_next: np.ones_like(number),
    "hot": lambda number, on_next: 1 + (number == 0),  # the first one is twice as popular
    "one-hot": lambda number, on_next: number == 0,
    "zipf": lambda number, on_next: 1 / (number + 1),
    "adversarial": lambda number, on_next: on_next,
}


@dataclass(frozen=True)
class At:
    """What a case runs on: the group as a Comm and as a bare communicator, and the size.

    size: bytes asked for. window: messages in flight. room: bytes of buffers to cycle through.
    """

    comm: Any
    mpi: Any
    ops: Any
    size: int
    window: int = 64
    room: int = 0
    routing: str = "hot"

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return int(self.ops.dtype.itemsize)

    @property
    def ranks(self) -> int:
        """The size of the group."""
        return int(self.comm.size)

    @property
    def group_rank(self) -> int:
        """This rank's number in the group."""
        return int(self.comm.group_rank)

    def elements(self, parts: int = 1) -> int:
        """Return the number of elements for the size, a multiple of `parts`; 0 for 0 bytes."""
        return max(self.size > 0, round(self.size / self.item / parts)) * parts


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + count) of a result: the sum over `senders` of what each gave.

    offset: of these elements in what a sender gave.
    """

    start: int
    count: int
    senders: tuple[int, ...]
    offset: int


class Case(NamedTuple):
    """A row of the table.

    given, taken: the shapes of what a rank gives and gets; taken None: in place. comm, mpi4py:
    (at, x, y) -> the call that is timed; with `posted` it returns what is pending. pieces: what
    must arrive. bus: by the ranks of the group. operations: in one sample. one_way: the first
    rank's clock counts. both: two sizes travel in the time of one. function: of loops.c.
    """

    name: str
    given: Callable[[At], Shape]
    taken: Callable[[At], Shape] | None
    comm: Callable[[At, Any, Any], Callable[[], Any]]
    mpi4py: Callable[[At, Any, Any], Callable[[], Any]]
    pieces: Callable[[At], list[Piece]]
    bus: Callable[[int], float] = lambda ranks: (ranks - 1) / ranks
    sums: bool = False
    posted: bool = False
    pair: bool = False
    both: bool = False
    is_messages: bool = False
    operations: Callable[[At], int] = lambda at: 1
    function: str = ""

    def size_bytes(self, at: At) -> int:
        """Return the size that is really sent, after rounding to whole elements."""
        if self.name == "all-to-allv":
            return int(parts_of(at).sum(axis=0).max()) * at.item
        if self.is_messages:
            return at.elements() * at.item
        shapes = [self.given(at)] + ([self.taken(at)] if self.taken else [])
        return max(int(np.prod(shape)) for shape in shapes) * at.item


def pattern(sender: int, first: int, last: int, dtype: Any, terms: int = 1) -> Any:
    """Return elements first to last of what a rank gives: they identify sender and position.

    Sums of `terms` of them are exact.
    """
    bits = min(MOST_BITS, finfo(dtype).nmant + 1)
    cycle = max(1, (1 << bits) // terms - 1)
    return (np.arange(first, last) + APART * sender) % cycle + 1


# Shapes: a whole vector, a part of it for each rank, one part.
def whole(at: At) -> Shape:
    """Return the shape of a vector."""
    return (at.elements(),)


def parts(at: At) -> Shape:
    """Return the shape of a part for each rank."""
    return at.ranks, at.elements(at.ranks) // at.ranks


def part(at: At) -> Shape:
    """Return the shape of one part."""
    return parts(at)[1:]


def summed(at: At, count: int, offset: int = 0) -> list[Piece]:
    """Return what arrives where all are added up."""
    return [Piece(0, count, tuple(range(at.ranks)), offset)]


def from_each(at: At, counts: list[int], offsets: list[int]) -> list[Piece]:
    """Return what arrives where each rank's part stands behind the other."""
    starts = consecutive_slices(counts)
    return [Piece(run.start, counts[one], (one,), offsets[one]) for one, run in enumerate(starts)]


def shares(routing: str, experts: int, group_rank: int, ranks: int) -> Any:
    """Return what fraction of a rank's selections goes to each expert: (experts,)."""
    number = np.arange(experts)
    weights = ROUTINGS[routing](number, number * ranks // experts == (group_rank + 1) % ranks)
    return weights / weights.sum()


def parts_of(at: At) -> Any:
    """Return how many elements each rank sends to each, by the routing: (ranks, ranks).

    The size is about what the rank that receives most receives; parts are whole elements.
    """
    ranks = at.ranks
    found = np.array([shares(at.routing, ranks, one, ranks) for one in range(ranks)])
    each = at.size / at.item / found.sum(axis=0).max()
    return np.ceil(np.round(found * each, 6)).astype(int)


def uneven(at: At) -> tuple[list[int], list[int]]:
    """Return the elements that this rank sends to each, and that it receives from each."""
    return parts_of(at)[at.group_rank].tolist(), parts_of(at)[:, at.group_rank].tolist()


# Messages.


class Wire:
    """The same calls of both ways under one name. isend, irecv, send, recv: (x, peer, tag)."""

    def __init__(self, at: At, bare: bool):
        calls: Any = at.mpi if bare else at.comm
        names = ("Isend", "Irecv", "Send", "Recv") if bare else ("isend", "irecv", "send", "recv")
        label = () if bare else (NAME,)

        def posting(name: str) -> Callable[..., Any]:
            return lambda x, *to: partial(getattr(calls, name), x, *to, *label)

        self.isend, self.irecv, self.send, self.recv = map(posting, names)
        self.wait_all = wait_all(bare)


def wait_all(bare: bool) -> Callable[[list[Any]], Any]:
    """Return a function that waits for all that is pending."""
    if bare:
        from mpi4py import MPI

        every: Callable[[list[Any]], Any] = MPI.Request.Waitall
        return every

    def wait(pending: list[Any]) -> None:
        for one in pending:
            one.wait()

    return wait


def hops(place: int, ranks: int) -> Route:
    """Return the messages of a steady pipeline: activations up and gradients down, each hop."""
    up = [(place + 1, TAG)] * (place + 1 < ranks)
    down = [(place - 1, TAG + 1)] * (place > 0)
    return up + down, [(peer, TAG) for peer, _ in down] + [(peer, TAG + 1) for peer, _ in up]


def ring(place: int, ranks: int) -> Route:
    """Return the messages of a halo: one to the next rank, one from the previous."""
    return [((place + 1) % ranks, TAG)], [((place - 1) % ranks, TAG)]


ROUTES = {"ring": ring, "stage-chain": hops}


def rounds(at: At) -> int:
    """Return the round trips of a sample of latency."""
    most = SHORT_ROUNDS if at.size <= SHORT_BYTES else LONG_ROUNDS
    return min(most, max(1, at.room // max(1, at.size))) if at.room else most


def in_flight(at: At) -> int:
    """Return the messages of a sample of bandwidth, as many as fit into the room of buffers."""
    return min(at.window, max(2, at.room // max(1, at.size))) if at.room else at.window


def exchange(at: At, wire: Wire, x: Any, y: Any, route: Route) -> Callable[[], Any]:
    """Return a call that posts all messages and waits for them."""
    calls = [wire.irecv(one, *to) for one, to in zip(y, route[1], strict=True)]
    calls += [wire.isend(one, *to) for one, to in zip(x, route[0], strict=True)]
    wait = wire.wait_all

    def run() -> None:
        wait([call() for call in calls])

    return run


def repeated(at: At, rows: list[Any]) -> list[Any]:
    """Return one thing for each round trip; without room, it is always the same."""
    return rows * (rounds(at) // len(rows))


def ping_pong(at: At, wire: Wire, x: Any, y: Any) -> Callable[[], Any]:
    """Return a call that makes all round trips of a sample, with a row each or always the same."""
    peer = 1 - at.group_rank
    sends, receives = (
        [wire.send(one, peer, TAG) for one in x],
        [wire.recv(one, peer, TAG) for one in y],
    )
    pairs = zip(repeated(at, sends), repeated(at, receives), strict=True)
    calls = [call for pair in pairs for call in (pair if at.group_rank == 0 else pair[::-1])]

    def run() -> None:
        for call in calls:
            call()

    return run


def windowed(at: At, wire: Wire, x: Any, y: Any) -> Callable[[], Any]:
    """Return a call that sends a window of messages, and then one short answer."""
    peer = 1 - at.group_rank
    send = exchange(at, wire, x, y, ([(peer, TAG)] * len(x), [(peer, TAG)] * len(y)))
    ack = at.ops.zeros((max(1, ACK_BYTES // at.item),), label="buffers")
    answer = (wire.send if at.group_rank else wire.recv)(ack, peer, ACK_TAG)

    def run() -> None:
        send()
        answer()

    return run


def both_ways(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the calls of a row of messages, which differ only in the wire."""
    return {
        "comm": lambda at, x, y: make(at, Wire(at, False), x, y),
        "mpi4py": lambda at, x, y: make(at, Wire(at, True), x, y),
    }


def rows_of(count: Callable[[At], int]) -> Callable[[At], Shape]:
    """Return the shape of that many messages."""
    return lambda at: (count(at), at.elements())


def routed(name: str) -> Case:
    """Return the row of a route, all of whose messages are posted at once."""

    def own(at: At) -> Route:
        return ROUTES[name](at.group_rank, at.ranks)

    def pieces(at: At) -> list[Piece]:
        count = at.elements()
        return [
            Piece(k * count, count, (peer,), sends.index((at.group_rank, tag)) * count)
            for k, (peer, tag) in enumerate(own(at)[1])
            for sends in [ROUTES[name](peer, at.ranks)[0]]
        ]

    return Case(
        name,
        rows_of(lambda at: len(own(at)[0])),
        rows_of(lambda at: len(own(at)[1])),
        pieces=pieces,
        bus=lambda ranks: 1.0,
        is_messages=True,
        **both_ways(lambda at, wire, x, y: exchange(at, wire, x, y, own(at))),
    )


def paired(name: str, make: Callable[..., Any], count: Callable[[At], int], **more: Any) -> Case:
    """Return the row of a pair. Its one direction goes from the first rank to the second."""
    one_way = name == "bandwidth"

    def sent(at: At) -> int:
        return 0 if one_way and at.group_rank else count(at)

    def received(at: At) -> int:
        return 0 if one_way and not at.group_rank else count(at)

    return Case(
        name,
        rows_of(sent),
        rows_of(received),
        pieces=lambda at: [Piece(0, received(at) * at.elements(), (1 - at.group_rank,), 0)],
        bus=lambda ranks: 1.0,
        pair=True,
        is_messages=True,
        **both_ways(make),
        **more,
    )


def in_place(at: At) -> Any:
    """Return MPI's constant."""
    from mpi4py import MPI

    return MPI.IN_PLACE


def all_reduce_bus(ranks: int) -> float:
    """Return 2 (P - 1) / P."""
    return 2 * (ranks - 1) / ranks


CASES = {
    case.name: case
    for case in (
        paired("latency", ping_pong, lambda at: rounds(at) if at.room else 1,
               operations=lambda at: 2 * rounds(at), function="latency"),
        paired("bandwidth", windowed, in_flight, operations=in_flight, function="window"),
        paired("bidirectional", windowed, in_flight, operations=in_flight, function="window",
               both=True),
        Case(
            "all-reduce", whole, None,
            lambda at, x, y: partial(at.comm.all_reduce, x, NAME),
            lambda at, x, y: partial(at.mpi.Allreduce, in_place(at), x),
            lambda at: summed(at, at.elements()),
            bus=all_reduce_bus, sums=True, function="all_reduce",
        ),
        Case(
            "iall-reduce", whole, None,
            lambda at, x, y: partial(at.comm.iall_reduce, x, NAME),
            lambda at, x, y: partial(at.mpi.Iallreduce, in_place(at), x),
            lambda at: summed(at, at.elements()),
            bus=all_reduce_bus, sums=True, posted=True,
        ),
        Case(
            "reduce-scatter", parts, part,
            lambda at, x, y: partial(at.comm.reduce_scatter, x, NAME),
            lambda at, x, y: partial(at.mpi.Reduce_scatter_block, x, y),
            lambda at: summed(at, part(at)[0], at.group_rank * part(at)[0]),
            sums=True,
        ),
        Case(
            "all-gather", part, parts,
            lambda at, x, y: partial(at.comm.all_gather, x, NAME),
            lambda at, x, y: partial(at.mpi.Allgather, x, y),
            lambda at: from_each(at, [part(at)[0]] * at.ranks, [0] * at.ranks),
        ),
        Case(
            "broadcast", whole, None,
            lambda at, x, y: partial(at.comm.broadcast, x, 0, NAME),
            lambda at, x, y: partial(at.mpi.Bcast, x, root=0),
            lambda at: [Piece(0, at.elements(), (0,), 0)],
            bus=lambda ranks: 1.0,
        ),
        Case(
            "all-to-all", parts, parts,
            lambda at, x, y: partial(at.comm.all_to_all, x, NAME),
            lambda at, x, y: partial(at.mpi.Alltoall, x, y),
            lambda at: from_each(
                at, [part(at)[0]] * at.ranks, [at.group_rank * part(at)[0]] * at.ranks
            ),
        ),
        Case(
            "all-to-allv",
            lambda at: (sum(uneven(at)[0]),),
            lambda at: (sum(uneven(at)[1]),),
            lambda at, x, y: partial(at.comm.all_to_allv, x, uneven(at)[0], NAME, uneven(at)[1]),
            lambda at, x, y: partial(
                at.mpi.Alltoallv, (x, uneven(at)[0]), (y, uneven(at)[1])
            ),
            lambda at: from_each(
                at, uneven(at)[1], parts_of(at)[:, : at.group_rank].sum(axis=1).tolist()
            ),
        ),
        routed("ring"),
        routed("stage-chain"),
    )
}  # fmt: skip


def chunks(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield parts of a range, none longer than AT_ONCE."""
    for start in range(first, last, AT_ONCE):
        yield start, min(last, start + AT_ONCE)
