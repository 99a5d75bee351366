"""Examples of cut layers: two products, attention by heads and by tokens, a cut vocabulary."""

from __future__ import annotations

import numpy as np

from mpipar.comm.grid import Grid, chunk_slice, token_pieces
from mpipar.comm.group import Comm
from mpipar.comm.groups import Comms
from mpipar.layers.context import Context
from mpipar.layers.flat import FlatParams
from mpipar.layers.parallel.column import ColumnLinear
from mpipar.layers.parallel.linear import Linear
from mpipar.layers.parallel.local_attention import LocalAttention
from mpipar.layers.parallel.ring_attention import RingAttention
from mpipar.layers.parallel.row import RowLinear
from mpipar.layers.stash import Batch, Stash
from mpipar.study.examples.wires import difference

X = np.array([[1.0, 2.0], [3.0, 1.0]])  # two tokens
W_UP = np.array([[1.0, 0.0, 2.0, 1.0], [0.0, 1.0, 1.0, -1.0]])
W_DOWN = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, -1.0]])
DY = np.array([[1.0, 0.0], [0.0, 1.0]])
HEADS = 4
TOKENS = np.array([[1.0, 0.0, 1.0, 2.0], [0.0, 1.0, 2.0, 1.0]])
W_QKV = np.array(
    [  # maps a token's four numbers to q, k and v of four heads
        [1, 0, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0],
        [0, 1, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1],
        [0, 0, 1, 1, 1, 1, 0, 0, 1, 0, 0, 1],
    ],
    float,
)
W_PROJ = np.array([[1, 0], [0, 1], [1, 1], [1, -1]], float)
LOGITS = np.array(
    [[2.0, 1.0, 0.0, 3.0, 1.0, 0.0, 2.0, 1.0], [0.0, 4.0, 1.0, 1.0, 2.0, 0.0, 0.0, 1.0]]
)
TARGETS = np.array([3, 4])
LENGTH = 8  # tokens of the example of context parallelism


def product(case, group: Comm, kind: type[Linear], name: str, w: np.ndarray) -> Linear:
    """Return a layer over a group that holds this rank's part of w."""
    comms = Comms.solo(case.ops, Grid(group.group_rank, {"tp": group.size}))
    comms["tp"] = group
    layer = kind(Context(case.ops, comms), name, w.shape[:1], w.shape[1:], std=0.0, bias=False)
    FlatParams(case.ops, layer.params)
    whole = w if kind.cuts_outputs else w.T
    own = whole[:, chunk_slice(whole.shape[1], group.size, group.group_rank)]
    case.ops.copy(layer.w, own if kind.cuts_outputs else own.T)
    return layer


def ffn(case) -> list[float]:
    """Compute y = (x w_up) w_down: the first product is cut by columns, the second by rows.

    The activation between them is left out: it acts on each number alone, and needs no barrier.
    """

    def both(group, board):
        up = product(case, group, ColumnLinear, "ffn.up", W_UP)
        down = product(case, group, RowLinear, "ffn.down", W_DOWN)
        stash = Stash()
        board.note("x, whole on each rank: two tokens of two numbers", X)
        board.note("w_up: each rank holds some columns", up.w)
        h = up.forward(X, stash)
        board.note("h = x w_up: each rank computes its columns, without a barrier", h)
        board.note("w_down: each rank holds the rows that fit its h", down.w)
        y = down.forward(h, stash)
        board.say("backward, from dy")
        board.note("dy, whole on each rank", DY)
        dh = down.backward_input(DY, stash)
        board.note("dh = dy w_down^T: each rank computes its columns, without a barrier", dh)
        dx = up.backward_input(dh, stash)
        down.backward_weight(stash)
        up.backward_weight(stash)
        board.note("gradient of w_down = h^T dy: each rank has that of its rows", down.dw)
        board.note("gradient of w_up = x^T dh: each rank has that of its columns", up.dw)
        return y, dx, up.dw, down.dw

    y, dx, d_up, d_down = both(case.comm, case.board)
    whole = both(case.alone, case.silent)
    part = chunk_slice(W_UP.shape[1], case.comm.size, case.comm.group_rank)
    return [
        difference(y, whole[0]),
        difference(dx, whole[1]),
        difference(d_up, whole[2][:, part]),
        difference(d_down, whole[3][part]),
    ]


def attention(case) -> list[float]:
    """Attend by heads, which are independent: each rank takes its own, and one sum joins them."""

    def heads(group, board):
        part = chunk_slice(HEADS, group.size, group.group_rank)
        board.note("x, whole on each rank: two tokens of four numbers", TOKENS)
        ops, width = case.ops, 3 * (part.stop - part.start)
        by_head = np.ascontiguousarray(W_QKV.reshape(4, 3, HEADS).swapaxes(1, 2)).reshape(4, -1)
        layer = product(case, group, ColumnLinear, "attn.qkv", by_head)  # q, k, v of each head
        w = layer.w.reshape(4, -1, 3).swapaxes(1, 2).reshape(4, width)
        qkv = layer.forward(TOKENS[None], Stash())
        qkv = qkv.reshape(1, 2, -1, 3).swapaxes(2, 3).reshape(1, 2, width)
        q, k, v = (
            np.ascontiguousarray(one)[..., None]
            for one in np.moveaxis(qkv.reshape(1, 2, 3, -1), 2, 0)
        )
        for name, x, matrix in zip("qkv", (q, k, v), np.split(w, 3, axis=1), strict=True):
            board.note(f"w_{name} of its own heads, a column for each", matrix)
            board.note(f"{name} = x w_{name}", x[0, :, :, 0])
        places = np.arange(2)
        y, _ = ops.attention_forward(q, k, v, places, places)
        board.note(
            "what its heads attend to: token 1 sees tokens 0 and 1, token 0 only itself",
            y[0, :, :, 0],
        )
        board.note("w_proj: the rows of its own heads", W_PROJ[part])
        proj = product(case, group, RowLinear, "attn.proj", W_PROJ)
        return proj.forward(y.reshape(1, 2, -1), Stash())

    return [difference(heads(case.comm, case.board), heads(case.alone, case.silent))]


def vocabulary(case) -> list[float]:
    """Compute loss and gradient without gathering logits: three numbers for each token travel."""

    def loss(group, board):
        part, ops = chunk_slice(LOGITS.shape[1], group.size, group.group_rank), case.ops
        logits = LOGITS[:, part].copy()
        board.note(
            "logits of two tokens: each rank has those of its part of the vocabulary", logits
        )
        board.note("targets, on each rank", TARGETS[None])
        board.say(
            "a token's three numbers: largest logit, sum of exp(logit - largest),"
            " logit of its target (or 0)"
        )
        stats = ops.cross_entropy_forward(logits, TARGETS, part.start, LOGITS.shape[1])
        losses, sums = ops.cross_entropy_combine(group.all_gather(stats, "loss"))
        board.note(
            "loss of each token: log of the whole sum of exp, minus the target's logit",
            losses[None],
        )
        scale = 1 / len(TARGETS)
        gradient = ops.cross_entropy_backward_input(
            logits, TARGETS, sums, part.start, LOGITS.shape[1], scale
        )
        board.note("gradient of its logits: (softmax - 1 at the target) / tokens", gradient)
        return losses, gradient, part

    losses, gradient, part = loss(case.comm, case.board)
    whole = loss(case.alone, case.silent)
    return [difference(losses, whole[0]), difference(gradient, whole[1][:, part])]


def context(case) -> list[float]:
    """Attend with keys of zero, so that y is the mean of the v that a token sees.

    v of token t is 2t, so the mean over tokens 0 to t is t. Every y can be checked by eye.
    """
    q = np.ones((1, LENGTH, 1, 1))
    k, v = np.zeros(q.shape), 2 * np.arange(float(LENGTH)).reshape(q.shape)
    held = np.concatenate(
        [
            np.arange(one.start, one.stop)
            for one in token_pieces(LENGTH, "ring", case.comm.size, case.comm.group_rank)
        ]
    )
    case.board.note(
        "positions of the tokens that each rank holds: from both ends of the row", held[None]
    )
    case.board.note("their v", v[0, held, 0, 0][None])
    case.board.say("k and v travel together, k in the first row and v in the second")

    def attended(method, group, places, all_places):
        batch = Batch(None, None, places, all_places)
        mine = [np.ascontiguousarray(one[:, places]) for one in (q, k, v)]
        return method(case.ops, group, "k and v").forward(*mine, batch)[0][0, :, 0, 0]

    every = np.arange(LENGTH)
    found = attended(RingAttention, case.comm, held, every)
    case.board.note(
        "y, the mean of all v up to its token, equals the token's position", found[None]
    )
    return [difference(found, attended(LocalAttention, case.alone, every, None)[held])]
