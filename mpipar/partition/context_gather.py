"""All-gather attention: every rank collects all keys and values, and attends with its own queries.

It has one barrier where the ring has many messages, but briefly needs memory for all keys and
values of a layer. They are gathered again for the backward pass. Source: Dubey et al., arXiv
2407.21783, section 3.3.2.
"""

from __future__ import annotations

from mpipar.comm.grid import held_and_whole
from mpipar.ops.signature import Array
from mpipar.partition.chunks import packed, rounded
from mpipar.partition.contracts import Attending, Out, Saved


def forward(here: Attending, q: Array, k: Array, v: Array) -> tuple[Array, Saved]:
    """Return y (B, n, H, d). Comm: one all_gather of k and v together."""
    keys, values = _gathered(here, k, v)
    y, stats = here.ops.attention_block_forward(
        q, keys, values, here.batch.positions, here.batch.all_positions
    )
    y = rounded(here.ops, y, q.dtype)
    return y, (q, k, v, y, stats)


def backward_input(here: Attending, dy: Array, saved: Saved, out: Out) -> None:
    """Write dq, dk, dv. The sums of dk and dv are float32 even with 16-bit activations.

    Comm: one all_gather of k and v, one reduce_scatter of dk and dv.
    """
    ops, comm, (q, k, v, y, stats) = here.ops, here.comm, saved
    keys, values = _gathered(here, k, v)
    dq, *whole = ops.attention_block_backward(
        dy,
        q,
        keys,
        values,
        stats,
        ops.attention_delta(dy, y),
        q_pos=here.batch.positions,
        k_pos=here.batch.all_positions,
    )
    parts = ops.empty((comm.size, 2, *k.shape), whole[0].dtype, label="buffers")
    for place in range(comm.size):
        for which, gradient in enumerate(whole):
            for held, there in held_and_whole(gradient.shape[1], "gather", comm.size, place):
                ops.copy(parts[place][which][:, held], gradient[:, there])
    dkv = comm.reduce_scatter(parts, here.name)
    for to, gradient in zip(out, (dq, dkv[0], dkv[1]), strict=True):
        ops.copy(to, gradient)


def _gathered(here: Attending, k: Array, v: Array) -> tuple[Array, Array]:
    """Return (k, v) of all tokens, in the order of the row. Comm: one all_gather."""
    ops, size = here.ops, here.comm.size
    parts = here.comm.all_gather(packed(ops, k, v), here.name)  # (size, 2, B, n, Hkv, d)
    rows, _, *head = k.shape
    tokens = here.batch.all_positions.shape[0]
    whole = ops.empty((2, rows, tokens, *head), k.dtype, label="buffers")
    for place in range(size):
        for held, there in held_and_whole(tokens, "gather", size, place):
            ops.copy(whole[:, :, there], parts[place][:, :, held])
    return whole[0], whole[1]
