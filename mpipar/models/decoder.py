"""The GPT-2 decoder as a sequence of layers, and a Stage: the contiguous run of them that one stage
computes.

    embedding -> block 0 -> ... -> block L-1 -> final norm -> head -> loss

Pre-norm blocks: x = x + attention(norm1(x)); x = x + ffn(norm2(x)). A stage with the first block
also holds the embedding, one with the last block also the final norm, head and loss. Letters: B
batch, T tokens, D model width.
"""

from __future__ import annotations

import math

from mpipar.layers.attention import Attention
from mpipar.layers.embedding import Embedding
from mpipar.layers.ffn import FeedForward
from mpipar.layers.loss import CrossEntropy, Head
from mpipar.layers.norm import LayerNorm
from mpipar.layers.param import FlatParams, Param
from mpipar.partition.tokens import hold

STD = 0.02  # GPT-2's standard deviation of initial weights


class Block:
    """One transformer block.

    Comm: two all_reduces over tp forward, two backward. With --ffn-cut gather or held tokens that
    are cut: those of the cuts.
    """

    def __init__(self, ops, index, config, held, comm):
        self.ops = ops
        name, d_model = f"block{index}", config.d_model
        # Residual branches start smaller so that the stream's variance does not grow with depth
        # (GPT-2).
        out_std = STD / math.sqrt(2 * config.layers)
        cuts, partial = held.cuts, held.partial_groups
        ffn_cuts = {"pair": cuts, "gather": ("gather", "gather")}[config.ffn_cut]
        self.norm1 = LayerNorm(ops, f"{name}.norm1", d_model, comm, partial)
        self.attn = Attention(ops, f"{name}.attn", d_model, config.heads, cuts, comm, STD, out_std)
        self.norm2 = LayerNorm(ops, f"{name}.norm2", d_model, comm, partial)
        self.ffn = FeedForward(
            ops, f"{name}.ffn", d_model, config.ffn, ffn_cuts, comm, STD, out_std)
        self.layers = [self.norm1, self.attn, self.norm2, self.ffn]
        self.params = [param for layer in self.layers for param in layer.params]

    def forward(self, x, stash):
        """y (B, T, D) of x (B, T, D)."""
        a = self.attn.forward(self.norm1.forward(x, stash), stash)
        x = self.ops.accumulate(a, x)
        f = self.ffn.forward(self.norm2.forward(x, stash), stash)
        return self.ops.accumulate(f, x)

    def backward_input(self, dy, stash):
        """dx (B, T, D) of dy (B, T, D); dy flows around each branch and through it."""
        dx = self.norm2.backward_input(self.ffn.backward_input(dy, stash), stash)
        dx = self.ops.accumulate(dx, dy)
        du = self.norm1.backward_input(self.attn.backward_input(dx, stash), stash)
        return self.ops.accumulate(du, dx)

    def backward_weight(self, stash):
        """Accumulate all gradients of the block. Comm: backward_weight of the cuts."""
        for layer in reversed(self.layers):
            layer.backward_weight(stash)


def table_param(name: str, config, comm) -> Param:
    """A (V, D) table cut by vocabulary: token embedding or LM head."""
    return Param(name, (config.vocab_size, config.d_model), comm, 0, std=STD)


def stage_parts(stage: int, stage_layers: tuple[int, ...]) -> tuple[range, bool, bool]:
    """Block indices of a stage, whether it is the first, whether it is the last."""
    first = sum(stage_layers[:stage])
    blocks = range(first, first + stage_layers[stage])
    return blocks, stage == 0, stage == len(stage_layers) - 1


def balanced_layers(config, num_stages: int) -> tuple[int, ...]:
    """Blocks per stage so that the slowest stage is as fast as possible.

    The head costs as much as V / (12 D + 2 T) blocks and counts on the last stage; the embedding
    costs next to nothing. A stage may hold no block. Source: FLOPs of a block 24 B T D^2 + 4 B T^2
    D, head 2 B T D V.
    """
    head = config.vocab_size / (12 * config.d_model + 2 * config.seq_len)
    low = config.layers // num_stages  # at least the mean without the head
    best = None
    for last in range(max(0, low - int(head) - 1), low + 1):
        rest = config.layers - last
        if num_stages == 1:
            return (config.layers,)
        share, extra = divmod(rest, num_stages - 1)
        slowest = max(share + (extra > 0), last + head)
        # Spare blocks go to the later of the other stages: the first ones stash more microbatches.
        split = (*[share] * (num_stages - 1 - extra), *[share + 1] * extra, last)
        if best is None or (slowest, -last) < best[:2]:
            best = (slowest, -last, split)
    return best[2]


class Stage:
    """A contiguous run of layers with its parameters in flat buffers.

    tables: the token tables this rank already holds, by name; a tied table that lies on the same
    rank as another stage's is that same Param, so the tie is a local sum and no message.
    copies: which groups hold copies of the parameters ("groups") and of a tied table
    ("tied_groups"), and whether this rank's copy is the one that norms and files count ("owner",
    "table_owner").
    """

    def __init__(self, ops, config, stage, stage_layers, comm, tables, copies=None):
        self.ops, self.stage, self.config = ops, stage, config
        self.held = hold(ops, config, comm)
        blocks, is_first, is_last = stage_parts(stage, stage_layers)
        elsewhere = set(tables)
        self.layers, self.loss = [], None
        if is_first:
            name = "embedding.tokens"
            table = tables.setdefault(name, table_param(name, config, comm))
            self.layers.append(
                Embedding(ops, table, config.seq_len, config.d_model, self.held, comm, STD))
        self.layers += [Block(ops, index, config, self.held, comm) for index in blocks]
        if is_last:
            name = "embedding.tokens" if config.tied else "head.table"
            table = tables.setdefault(name, table_param(name, config, comm))
            self.loss = CrossEntropy(ops, config.vocab_size, table, comm)
            partial = self.held.partial_groups
            self.layers.append(LayerNorm(ops, "final_norm", config.d_model, comm, partial))
            self.layers += [Head(ops, table, self.held), self.loss]
        # One Param per name: a tied table may be in two layers here, or belong to another stage's
        # buffers.
        params = {param.name: param for layer in self.layers for param in layer.params}
        own = [param for name, param in params.items() if name not in elsewhere]
        if copies is not None:
            self._mark_copies(own, copies)
        self.flat = FlatParams(ops, own)

    def _mark_copies(self, params, copies):
        for param in params:
            tied = self.config.tied and param.name == "embedding.tokens"
            groups = copies["tied_groups"] if tied else copies["groups"]
            param.grad_groups = (*param.grad_groups, *groups)
            owner = copies["table_owner"] if tied else copies["owner"]
            param.owner = param.owner and owner

    def set_loss_scale(self, scale: float) -> None:
        """What the loss backward multiplies by: 1 / number of tokens in the global batch."""
        if self.loss is not None:
            self.loss.scale = scale

    def out_shape(self, batch) -> tuple[int, ...]:
        """Shape of the activations that leave this stage, (B, tokens held, D); those that enter it
        are alike.
        """
        batch_size, tokens = batch.shape
        return (batch_size, self.held.length(tokens), self.config.d_model)

    in_shape = out_shape

    def forward(self, x, stash):
        """Activations (B, T, D) for the next stage; on the last stage the sum of the token
        losses.
        """
        for layer in self.layers:
            x = layer.forward(x, stash)
        return x

    def backward_input(self, dy, stash):
        """dx (B, T, D) for the stage before; dy is None on the last stage."""
        for layer in reversed(self.layers):
            dy = layer.backward_input(dy, stash)
        return dy

    def backward_weight(self, stash):
        """Accumulate all gradients of the stage; afterwards the stash is empty."""
        for layer in reversed(self.layers):
            layer.backward_weight(stash)
        assert not stash, f"stage {self.stage} left {list(stash)} in the stash"

    def backward(self, dy, stash, recorder):
        """Both halves, layer by layer, so that each layer's stash is freed as early as possible."""
        for layer in reversed(self.layers):
            recorder.phase = "I"
            dy = layer.backward_input(dy, stash)
            recorder.phase = "W"
            layer.backward_weight(stash)
        assert not stash, f"stage {self.stage} left {list(stash)} in the stash"
        return dy
