"""Collective products: one piece of an all-gather or reduce-scatter travels during each multiply.

The q pieces travel around the ring of ranks, so that one barrier of the whole group becomes q - 1
messages to the next neighbour, with as many bytes in total. In their records, the time between
posted and waited is the part that is overlapped with computation. Source: Wang et al., Overlap
communication with dependent computation via decomposition, ASPLOS 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpipar.comm.group import Comm
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array

TAG = 0  # messages between two ranks arrive in the order in which they are sent


def pieces(ops: Ops, x: Array, comm: Comm, name: str) -> Iterator[tuple[int, Array]]:
    """Yield (group_rank, its x) of every rank, from this one backwards, while the next one arrives.

    All x have one shape. A piece is valid until the next one is requested, because two buffers
    alternate.
    Comm: size - 1 times one isend to the next rank and one irecv from the one before.
    """
    group_rank, block = comm.group_rank, x
    buffers = [ops.empty(x.shape, label="buffers") for _ in range(min(2, comm.size - 1))]
    for step in range(1, comm.size):
        after = buffers[step % len(buffers)]
        arriving = comm.irecv(after, comm.neighbor(-1), TAG, name)
        leaving = comm.isend(block, comm.neighbor(1), TAG, name)
        yield group_rank, block
        block = arriving.wait()
        leaving.wait()
        group_rank = comm.neighbor(-step)
    yield group_rank, block


def total(ops: Ops, part: Callable[[int], Array], comm: Comm, name: str) -> Array:
    """Return the sum over all ranks of their part(this rank's group_rank).

    part(group_rank) computes, into a new array, what this rank adds to that rank's sum. Each sum
    starts at the next rank and travels once around the ring, and every rank adds its part as the
    sum passes. 16-bit activations are rounded at each addition.
    Comm: size - 1 times one isend to the next rank and one irecv from the one before.
    """
    sum_so_far = part(comm.neighbor(-1))
    after = ops.empty(sum_so_far.shape, label="buffers")
    for step in range(2, comm.size + 1):
        arriving = comm.irecv(after, comm.neighbor(-1), TAG, name)
        leaving = comm.isend(sum_so_far, comm.neighbor(1), TAG, name)
        own = part(comm.neighbor(-step))
        arriving.wait()
        leaving.wait()
        sum_so_far = ops.accumulate(own, after)
    return sum_so_far
