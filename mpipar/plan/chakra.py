"""One training step of each rank as a Chakra execution trace, which ASTRA-sim reads.

A file is a sequence of protocol buffers, each preceded by its length: one GlobalMetadata, then the
nodes. The part of the schema that is used is defined here, so no library is needed. Source:
mlcommons/chakra, schema/protobuf/et_def.proto.

A node begins when those that it depends on are done. A rank computes and waits in sequence; a
posted operation depends on what came before, and nodes after its wait depend on it too. `comm_size`
is what a rank contributes, as in ASTRA-sim: one part in an all-gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mpipar.comm.record import POINT_TO_POINT
from mpipar.plan.script import CALL, WAIT, Call, Script

VERSION = "0.0.4"  # of the schema
COMP_NODE, COMM_SEND_NODE, COMM_RECV_NODE, COMM_COLL_NODE = 4, 5, 6, 7  # NodeType
COLLECTIVES = {  # CollectiveCommType
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "broadcast": 5,
    "all_to_all": 6,
    "all_to_allv": 6,
    "reduce_scatter": 7,
    "barrier": 9,
}
MESSAGES = {"send": COMM_SEND_NODE, "recv": COMM_RECV_NODE}
# Field numbers of Node, of AttributeProto and its kinds of values, and of GlobalMetadata.
NODE_ID, NODE_NAME, NODE_TYPE, NODE_DATA_DEPS, NODE_DURATION, NODE_ATTR = 1, 2, 3, 5, 7, 10
ATTR_NAME, INT32, INT64, UINT64, BOOL, STRING = 1, 7, 9, 13, 27, 29
METADATA_VERSION = 1
GROUP_BITS, TAG_BITS = 4, 27  # of a 31-bit tag: the group's, and the message's


def varint(number: int) -> bytes:
    """Return a number of any size, seven bits in each byte, the lowest first."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def whole(field: int, number: int) -> bytes:
    """Return a field that is a number."""
    return varint(field << 3) + varint(number)


def piece(field: int, content: bytes) -> bytes:
    """Return a field of bytes: a text, another message, or packed numbers."""
    return varint(field << 3 | 2) + varint(len(content)) + content


def attribute(name: str, kind: int, value: int | str) -> bytes:
    """Return an attribute of a node."""
    given = piece(kind, value.encode()) if isinstance(value, str) else whole(kind, value)
    return piece(NODE_ATTR, piece(ATTR_NAME, name.encode()) + given)


def framed(message: bytes) -> bytes:
    """Return a message preceded by its length."""
    return varint(len(message)) + message


def put_in(call: Call, q: int) -> int:
    """Return the bytes that one of q ranks contributes to a call."""
    record = call.record
    if record.operation == "all_to_allv":
        return math.prod(call.shape) * call.itemsize
    return record.payload_bytes // q if record.operation == "all_gather" else record.payload_bytes


class Groups:
    """Numbers of groups of ranks, from 1, as ASTRA-sim's communicator groups have them."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, ...], int] = {}

    def number(self, ranks: tuple[int, ...]) -> str:
        """Return the number of a group, assigning one if it has none."""
        return str(self.numbers.setdefault(ranks, len(self.numbers) + 1))

    def listed(self) -> dict[str, list[int]]:
        """Return {number: ranks}."""
        return {str(number): list(ranks) for ranks, number in self.numbers.items()}


def trace_of(script: Script, groups: Groups, gflops: float | None) -> Iterator[bytes]:
    """Yield the pieces of a rank's file.

    gflops: adds to each compute node its microseconds at this rate; None: it has only its FLOPs.
    """
    yield framed(piece(METADATA_VERSION, VERSION.encode()))
    after: dict[int, None] = {}  # what the rank's next node depends on
    posted: dict[int, int] = {}  # {call: node}
    numbers = iter(range(1, 1 << 62))
    axes = {axis: number for number, axis in enumerate(sorted(script.groups))}
    for event in script.events:
        if event.flops:
            node = next(numbers)
            yield framed(_node(node, "compute", COMP_NODE, after) + _computing(event.flops, gflops))
            after = {node: None}
        if event.action == CALL:
            call, node = script.calls[event.number], next(numbers)
            ranks = script.groups[call.record.axis]
            kind = MESSAGES.get(call.record.operation, COMM_COLL_NODE)
            made = (
                _message(call, ranks, script.world_rank, axes[call.record.axis])
                if call.record.operation in POINT_TO_POINT
                else _collective(call, len(ranks), groups.number(ranks))
            )
            yield framed(_node(node, call.record.name, kind, after) + made)
            posted[event.number] = node
            after = after if call.posted else {node: None}
        elif event.action == WAIT:
            after = {**after, posted[event.number]: None}


def _node(number: int, name: str, kind: int, after: dict[int, None]) -> bytes:
    """Return what every node has."""
    deps = piece(NODE_DATA_DEPS, b"".join(map(varint, after))) if after else b""
    return whole(NODE_ID, number) + piece(NODE_NAME, name.encode()) + whole(NODE_TYPE, kind) + deps


def _computing(flops: int, gflops: float | None) -> bytes:
    """Return the attributes of a compute node. Its one byte of tensors means: only FLOPs count."""
    duration = b"" if gflops is None else whole(NODE_DURATION, max(1, round(flops / gflops * 1e-3)))
    return (
        duration
        + attribute("is_cpu_op", BOOL, 0)
        + attribute("num_ops", INT64, flops)
        + attribute("tensor_size", UINT64, 1)
    )


def _message(call: Call, ranks: tuple[int, ...], own: int, group: int) -> bytes:
    """Return the attributes of a message."""
    record = call.record
    assert record.tag < 1 << TAG_BITS, record
    assert group < 1 << GROUP_BITS, group
    peer = ranks[record.peer]
    source, target = (own, peer) if record.operation == "send" else (peer, own)
    return (
        attribute("is_cpu_op", BOOL, 0)
        + attribute("comm_size", INT64, record.payload_bytes)
        + attribute("comm_src", INT32, source)
        + attribute("comm_dst", INT32, target)
        + attribute("comm_tag", INT32, group << TAG_BITS | record.tag)
    )


def _collective(call: Call, q: int, group: str) -> bytes:
    """Return the attributes of a collective."""
    return (
        attribute("is_cpu_op", BOOL, 0)
        + attribute("comm_type", INT64, COLLECTIVES[call.record.operation])
        + attribute("comm_size", INT64, put_in(call, q))
        + attribute("pg_name", STRING, group)
    )
