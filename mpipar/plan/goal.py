"""One training step of all ranks as GOAL text, which LogGOPSim and ATLAHS simulate.

GOAL has three operations: `calc`, `send` and `recv`. `a requires b` starts a when b is done, and `a
irequires b` when b has begun, so a collective is written as the messages of an algorithm. Parts are
gathered in ceil(log2 q) rounds, in each of which a rank forwards what it has. A reduce-scatter is
the same in reverse, and an all-reduce is both; they send as many bytes as a ring, in fewer rounds.
Source of the rounds: Bruck et al., IEEE TPDS 8(11), 1997; of the grammar: txt2bin of
spcl/LogGOPSim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from mpipar.comm.record import POINT_TO_POINT
from mpipar.plan.script import CALL, WAIT, Call, Script

# A 32-bit tag: whether it is a collective's, the group, then the message's tag, or the call and the
# round. Several calls of a group may be in flight at once.
GROUP_BITS, ROUND_BITS = 4, 6
CALL_BITS = 31 - GROUP_BITS - ROUND_BITS
TEXTS_KEPT = 32  # of ranks, for their replicas

After = dict[str, None]  # ordered clauses: what must be done, or begun, before an operation begins


class Message(NamedTuple):
    """One message of a round. verb: send or recv; peer: place in the group."""

    verb: str
    peer: int
    nbytes: int


Rounds = list[list[Message]]


def gathered(q: int, index: int, part: int) -> Rounds:
    """Return the rounds in which q ranks gather parts of `part` bytes."""
    found, held = [], 1
    while held < q:
        passed = min(held, q - held) * part
        found.append(
            [
                Message("recv", (index + held) % q, passed),
                Message("send", (index - held) % q, passed),
            ]
        )
        held += min(held, q - held)
    return found


def scattered(q: int, index: int, part: int) -> Rounds:
    """Return the rounds in which q ranks add up and each gets its part: gathering in reverse."""
    turned = {"recv": "send", "send": "recv"}
    return [
        [Message(turned[one.verb], one.peer, one.nbytes) for one in reversed(messages)]
        for messages in reversed(gathered(q, index, part))
    ]


def along_chain(q: int, index: int, root: int, nbytes: int) -> Rounds:
    """Return the rounds of a broadcast from rank to rank, beginning with the root."""
    distance = (index - root) % q
    receives = [[Message("recv", (index - 1) % q, nbytes)]] if distance else []
    return receives + ([[Message("send", (index + 1) % q, nbytes)]] if distance < q - 1 else [])


def exchanged(q: int, index: int, sent: list[int], received: list[int]) -> Rounds:
    """Return one round in which each rank sends a part to every other one, its neighbour first."""
    others = [(index + ahead) % q for ahead in range(1, q)]
    before = [(index - ahead) % q for ahead in range(1, q)]
    return [
        [
            *(Message("recv", peer, received[peer]) for peer in before if received[peer]),
            *(Message("send", peer, sent[peer]) for peer in others if sent[peer]),
        ]
    ]


def _rows(q: int, index: int, call: Call) -> Rounds:
    """Return the round of an all_to_allv, of the rows that it sends and receives."""
    row = math.prod(call.shape[1:]) * call.itemsize
    sent, received = ([count * row for count in counts] for counts in call.argument)
    return exchanged(q, index, sent, received)


def _part(q: int, call: Call) -> int:
    return -(-call.record.payload_bytes // q)


ROUNDS: dict[str, Callable[[int, int, Call], Rounds]] = {
    "all_gather": lambda q, index, call: gathered(q, index, _part(q, call)),
    "reduce_scatter": lambda q, index, call: scattered(q, index, _part(q, call)),
    "all_reduce": lambda q, index, call: (
        scattered(q, index, _part(q, call)) + gathered(q, index, _part(q, call))
    ),
    "all_to_all": lambda q, index, call: exchanged(q, index, *[[_part(q, call)] * q] * 2),
    "all_to_allv": _rows,
    "broadcast": lambda q, index, call: along_chain(
        q, index, call.record.peer, call.record.payload_bytes
    ),
    "reduce": lambda q, index, call: [
        [Message("send" if one.verb == "recv" else "recv", one.peer, one.nbytes) for one in round_]
        for round_ in reversed(along_chain(q, index, call.record.peer, call.record.payload_bytes))
    ],
    "barrier": lambda q, index, call: gathered(q, index, 1),
}


class RankText:
    """The lines of a rank, with gaps for other ranks' numbers, in which its replicas differ.

    flops_per_ns: how fast it computes; a `calc` counts nanoseconds. peers: of each gap the group,
    and how many places further round it the peer is.
    """

    def __init__(self, script: Script, flops_per_ns: float):
        self.script, self.flops_per_ns = script, flops_per_ns
        self.lines: list[str] = []
        self.peers: list[tuple[str, int]] = []
        self.axes = {axis: number for number, axis in enumerate(sorted(script.groups))}
        assert len(self.axes) < 1 << GROUP_BITS, self.axes
        self.operations = 0
        self.index = {axis: ranks.index(script.world_rank) for axis, ranks in script.groups.items()}
        self.write()
        self.template = "\n".join(self.lines)

    def add(self, text: str, after: After) -> str:
        """Append an operation; return its label."""
        label = f"l{self.operations}"
        self.operations += 1
        self.lines.append(f"{label}: {text}")
        self.lines += [f"{label} {clause}" for clause in after]
        return label

    def message(self, one: Message, axis: str, tag: int, after: After) -> str:
        """Append a message; return its label."""
        self.peers.append((axis, one.peer - self.index[axis]))
        way = "to" if one.verb == "send" else "from"
        return self.add(f"{one.verb} {max(1, one.nbytes)}b {way} %d tag {tag}", after)

    def call(self, number: int, after: After) -> tuple[After, After]:
        """Append a call; return the clauses for (its begin, its end)."""
        call = self.script.calls[number]
        record, axis = call.record, call.record.axis
        group = self.axes[axis] << CALL_BITS + ROUND_BITS
        if record.operation in POINT_TO_POINT:
            one = Message(record.operation, record.peer, record.payload_bytes)
            assert record.tag < 1 << CALL_BITS + ROUND_BITS, record
            label = self.message(one, axis, group | record.tag, after)
            return {f"irequires {label}": None}, {f"requires {label}": None}
        tag = 1 << 31 | group | record.seq % (1 << CALL_BITS) << ROUND_BITS
        begun, ends = after, after
        rounds = ROUNDS[record.operation](len(self.script.groups[axis]), self.index[axis], call)
        for turn, messages in enumerate(rounds):
            labels = [self.message(one, axis, tag | turn, ends) for one in messages]
            ends = {f"requires {label}": None for label in labels}
            if turn == 0:
                begun = {f"irequires {label}": None for label in labels}
        return begun, ends

    def write(self) -> None:
        """Write all lines."""
        after: After = {}
        ends: dict[int, After] = {}
        for event in self.script.events:
            nanoseconds = round(event.flops / self.flops_per_ns)
            if nanoseconds:
                after = {f"requires {self.add(f'calc {nanoseconds}', after)}": None}
            if event.action == CALL:
                begun, done = self.call(event.number, after)
                after = dict(begun if self.script.calls[event.number].posted else done)
                ends[event.number] = done
            elif event.action == WAIT:
                after.update(ends.pop(event.number))

    def of(self, script: Script) -> bytes:
        """Return the text of this rank, or of a replica."""
        here = {axis: ranks.index(script.world_rank) for axis, ranks in script.groups.items()}
        known = {}
        for axis, offset in set(self.peers):
            ranks = script.groups[axis]
            known[axis, offset] = ranks[(here[axis] + offset) % len(ranks)]
        body = self.template % tuple(map(known.__getitem__, self.peers))
        return f"rank {script.world_rank} {{\n{body}\n}}\n".encode()


def goal_text(scripts: Iterable[Script], num_ranks: int, gflops: float) -> Iterator[bytes]:
    """Yield GOAL text, one rank at a time. gflops: what a rank computes in a nanosecond."""
    yield f"num_ranks {num_ranks}\n".encode()
    written: dict[int, RankText] = {}
    for script in scripts:
        known = written.get(id(script.events))
        if known is None:
            if len(written) == TEXTS_KEPT:
                del written[next(iter(written))]
            known = written[id(script.events)] = RankText(script, gflops)
        yield known.of(script)
