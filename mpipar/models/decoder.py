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
from mpipar.layers.norm import NORMS
from mpipar.layers.param import Param
from mpipar.models.stage import LayerRun, UnitFlops, stage_parts
from mpipar.partition.tokens import hold

STD = 0.02  # GPT-2's standard deviation of initial weights
ENTRY = "embedding"  # what the first stage holds below its blocks
CUT = "heads, ffn, vocabulary"  # what tp divides


class Block:
    """One transformer block.

    Comm: two all_reduces over tp forward, two backward. With another --ffn-cut than pair, or held
    tokens that are cut: those of the cuts.
    """

    def __init__(self, ops, index, config, held, comm):
        self.ops = ops
        name, d_model = f"block{index}", config.d_model
        # Residual branches start smaller so that the stream's variance does not grow with depth
        # (GPT-2).
        out_std = STD / math.sqrt(2 * config.layers)
        cuts, partial = held.cuts, held.partial_groups
        ffn_cuts = cuts if config.ffn_cut == "pair" else (config.ffn_cut, config.ffn_cut)
        norm = NORMS[config.norm]
        self.norm1 = norm(ops, f"{name}.norm1", d_model, comm, partial)
        self.attn = Attention(ops, f"{name}.attn", d_model, config.heads, cuts, comm, STD, out_std)
        self.norm2 = norm(ops, f"{name}.norm2", d_model, comm, partial)
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


def unit_flops(config) -> UnitFlops:
    """FLOPs per token: a block 8 D^2 + 4 D F + 4 T D, the head 2 D V; the embedding multiplies
    nothing.
    """
    width, ffn = config.d_model, config.ffn or 4 * config.d_model
    block = 8 * width**2 + 4 * width * ffn + 4 * config.seq_len * width
    return UnitFlops(0, block, 2 * width * config.vocab_size)


def describe(config) -> str:
    """The sizes of a resolved ModelConfig, for a headline."""
    return (f"{config.layers} layers, D {config.d_model}, {config.heads} heads, F {config.ffn},"
            f" T {config.seq_len}, V {config.vocab_size}{', tied head' if config.tied else ''}"
            f"{', RMSNorm' if config.norm == 'rms' else ''}")


class Stage(LayerRun):
    """A stage of the decoder.

    tables: the token tables this rank already holds, by name; a tied table that lies on the same
    rank as another stage's is that same Param, so the tie is a local sum and no message.
    copies: which groups hold copies of the parameters ("groups") and of a tied table
    ("tied_groups"), and whether this rank's copy is the one that norms and files count ("owner",
    "table_owner").
    """

    def __init__(self, ops, config, stage, stage_layers, comm, tables, copies=None):
        self.config = config
        self.held = hold(ops, config, comm)
        blocks, is_first, is_last = stage_parts(stage, stage_layers)
        elsewhere = set(tables)
        layers, loss = [], None
        if is_first:
            name = "embedding.tokens"
            table = tables.setdefault(name, table_param(name, config, comm))
            layers.append(
                Embedding(ops, table, config.seq_len, config.d_model, self.held, comm, STD))
        layers += [Block(ops, index, config, self.held, comm) for index in blocks]
        if is_last:
            name = "embedding.tokens" if config.tied else "head.table"
            table = tables.setdefault(name, table_param(name, config, comm))
            loss = CrossEntropy(ops, config.vocab_size, table, comm)
            partial = self.held.partial_groups
            layers.append(NORMS[config.norm](ops, "final_norm", config.d_model, comm, partial))
            layers += [Head(ops, table, self.held), loss]
        super().__init__(ops, stage, layers, loss, elsewhere, copies)

    def is_tied(self, param) -> bool:
        """Whether the first and the last stage share this parameter."""
        return self.config.tied and param.name == "embedding.tokens"

    def out_shape(self, batch) -> tuple[int, ...]:
        """Shape of the activations that leave this stage, (B, tokens held, D); those that enter it
        are alike.
        """
        batch_size, tokens = batch.shape
        return (batch_size, self.held.length(tokens), self.config.d_model)

    in_shape = out_shape
