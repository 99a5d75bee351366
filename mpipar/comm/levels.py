"""Two-level all-reduce: inside each host, across the hosts, and inside again.

Each rank of a host sums one share, and the ranks with the same share sum it across the hosts, so
that only a share of a rank's bytes crosses the slow links. Then the shares are gathered inside the
host. Each level is a call of its own group, and so a barrier of its own in the record: `NAME/host`,
`NAME/across`, `NAME/host`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpipar.comm.algorithms.steps import Posted, Steps
from mpipar.comm.checked import CallCheck
from mpipar.comm.facts import all_gather_facts
from mpipar.comm.grid import chunk_size
from mpipar.comm.group import Comm, Pending
from mpipar.comm.record import NO_ENTRY, Recorder
from mpipar.comm.request import Array
from mpipar.comm.transport import Transport
from mpipar.ops.functions import Ops

if TYPE_CHECKING:
    from mpi4py import MPI


LEVELED = ("levels", "window")  # rows of --all-reduce that use levels between hosts


class LeveledComm(Comm):
    """A group over several hosts, whose sums travel in levels. Posted sums finish in their order.

    levels: three groups. near: this rank's host; far: the ranks at its place of all hosts; back:
    the host once more. What is posted after a sum across hosts starts at a different time on each
    rank, so it needs its own communicator.
    """

    def __init__(
        self,
        axis: str,
        ranks: tuple[int, ...],
        index: int,
        transport: Transport | None,
        recorder: Recorder,
        check: CallCheck | None,
        levels: tuple[Comm, Comm, Comm],
    ):
        super().__init__(axis, ranks, index, transport, recorder, check)
        self.near, self.far, self.back = levels
        self.near.check = check
        self.ops = self.near.transport.ops
        self.before: deque[Posted] = deque()

    def shares(self, x: Array) -> Array:
        """Return x as one share per rank of the host: its own memory, or a zero-padded copy."""
        size, count = x.size, self.near.size
        if size % count == 0:
            return x.reshape(count, -1)
        parts = self.ops.zeros((count, chunk_size(size, count)), x.dtype, label="buffers")
        self.ops.copy(parts.reshape(-1)[:size], x.reshape(-1))
        return parts

    def all_reduce(self, x: Array, name: str, op: str = "sum") -> Array:
        """Reduce x in place. Comm: a reduce_scatter, an all_reduce, an all_gather of the levels."""
        if op != "sum":
            return super().all_reduce(x, name, op)
        while self.before:
            self.before[0].Wait()
        own = self.near.reduce_scatter(self.shares(x), f"{name}/host")
        self.far.all_reduce(own, f"{name}/across")
        whole = self.near.all_gather(own, f"{name}/host")
        self.ops.copy(x.reshape(-1), whole.reshape(-1)[: x.size])
        return x

    def iall_reduce(self, x: Array, name: str) -> Pending:
        """Post the sum of x in place. Comm: as `all_reduce`, each level after the one before."""
        return Pending(Posted(self.steps(x, name), self.before), NO_ENTRY, x)

    def steps(self, x: Array, name: str) -> Steps:
        """Yield the levels, one after another."""
        parts, near = self.shares(x), self.near
        yield near.ireduce_scatter(parts, f"{name}/host")
        yield self.far.iall_reduce(parts[0], f"{name}/across")
        if near.index > 0:
            self.ops.copy(parts[near.index], parts[0])
        yield self.back.iall_gather(parts, f"{name}/host")
        if x.size % near.size:
            self.ops.copy(x.reshape(-1), parts.reshape(-1)[: x.size])

    def zeros(self, ops: Ops, shape: tuple[int, ...], dtype: Any, label: str) -> Array:
        return self.near.zeros(ops, shape, dtype, label)

    def close(self) -> None:
        super().close()
        for group in (self.near, self.far, self.back):
            group.close()


def hosts_of(mpi_world: MPI.Intracomm) -> list[int]:
    """Return, for each world rank, the lowest rank of its host.

    Comm: a split and a gather of facts over the world, and one inside each host.
    """
    from mpi4py import MPI

    host: Any = mpi_world.Split_type(MPI.COMM_TYPE_SHARED)
    first = min(all_gather_facts(host, mpi_world.rank))
    host.Free()
    return all_gather_facts(mpi_world, first)


def near_and_far(
    ranks: Sequence[int],
    hosts: Sequence[int],
    own: int,
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the members of a group on the host of `own`, and those at its place of each host.

    None where two levels make no sense: on one host, with one rank on each host, or with different
    numbers of ranks.
    """
    members: dict[int, list[int]] = {}
    for member in ranks:
        members.setdefault(hosts[member], []).append(member)
    counts = {len(there) for there in members.values()}
    if len(members) == 1 or len(counts) > 1 or counts == {1}:
        return None
    near = members[hosts[own]]
    place = near.index(own)
    return tuple(near), tuple(there[place] for there in members.values())
