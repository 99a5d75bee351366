"""The GPT-2 decoder as a sequence of layers, and its Stage, a contiguous run of them.

    embedding -> block 0 -> ... -> block L-1 -> final norm -> head -> loss

A pre-norm block is x = x + attention(norm1(x)); x = x + ffn(norm2(x)). The first stage also holds
the embedding, and the last one the final norm, head and loss. Letters: B batch, T tokens, D model
width.
"""

from __future__ import annotations

import math
from dataclasses import replace

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
TOKENS = "embedding.tokens"  # the table that a tied head shares


class Block:
    """One transformer block.

    Comm: two all_reduces over tp forward and two backward. With another --ffn-cut than pair, or
    where the held tokens are cut, the barriers are those of the cuts.
    """

    def __init__(self, context, index, config):
        self.ops = context.ops
        name, d_model = f"block{index}", config.d_model
        # As in GPT-2, residual branches start smaller so that the stream's variance does not grow
        # with depth.
        out_std = STD / math.sqrt(2 * config.layers)
        norm = NORMS[config.norm]
        self.norm1 = norm(context, f"{name}.norm1", d_model)
        self.attn = Attention(
            context, f"{name}.attn", d_model, config.heads, std=STD, out_std=out_std)
        self.norm2 = norm(context, f"{name}.norm2", d_model)
        self.ffn = FeedForward(context, f"{name}.ffn", d_model, config.ffn,
                               cuts=context.pair(config.ffn_cut), std=STD, out_std=out_std)
        self.layers = [self.norm1, self.attn, self.norm2, self.ffn]
        self.params = [param for layer in self.layers for param in layer.params]

    def forward(self, x, stash):
        """y (B, T, D) of x (B, T, D)."""
        x = self._attend(x, stash)
        f = self.ffn.forward(self.norm2.forward(x, stash), stash)
        return self.ops.accumulate(f, x)

    def recompute(self, x, stash):
        """Fill the stash as forward does, without the last product and its barrier."""
        x = self._attend(x, stash)
        self.ffn.recompute(self.norm2.forward(x, stash), stash)

    def _attend(self, x, stash):
        """x + attention(norm1(x)) (B, T, D)."""
        a = self.attn.forward(self.norm1.forward(x, stash), stash)
        return self.ops.accumulate(a, x)

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


def shared_table(context, name: str, config, tables) -> Param:
    """The (V, D) table of this name, cut by vocabulary: token embedding or LM head.

    tables: those that this rank already holds. A new table is added to them.
    """
    if name not in tables:
        tied = config.tied and name == TOKENS
        tables[name] = Param(context, name, (config.vocab_size, config.d_model), cut_axis=0,
                             std=STD, copies=context.tied if tied else context.copies)
    return tables[name]


def unit_flops(config) -> UnitFlops:
    """FLOPs per token: a block takes 8 D^2 + 4 D F + 4 T D, the head 2 D V, the embedding none."""
    width, ffn = config.d_model, config.ffn or 4 * config.d_model
    block = 8 * width**2 + 4 * width * ffn + 4 * config.seq_len * width
    return UnitFlops(0, block, 2 * width * config.vocab_size)


def describe_model(config) -> str:
    """The sizes of a resolved ModelConfig, for a headline."""
    return (f"{config.layers} layers, D {config.d_model}, {config.heads} heads, F {config.ffn},"
            f" T {config.seq_len}, V {config.vocab_size}{', tied head' if config.tied else ''}"
            f"{', RMSNorm' if config.norm == 'rms' else ''}")


class Stage(LayerRun):
    """A stage of the decoder.

    tables: the token tables this rank already holds, by name. If both stages of a tied table lie on
    one rank, they share one Param. Then the tie is a local sum and needs no message.
    """

    def __init__(self, context, config, stage, stage_layers, tables):
        held = hold(context.ops, config, context.tp)
        context = replace(context, held=held)
        self.held, self.width = held, config.d_model
        blocks, is_first, is_last = stage_parts(stage, stage_layers)
        elsewhere = set(tables)
        units = [[block] for block in context.blocks(Block(context, index, config)
                                                     for index in blocks)]
        loss = None
        if is_first:
            table = shared_table(context, TOKENS, config, tables)
            units.insert(0, [Embedding(context, table, config.seq_len, std=STD)])
        if is_last:
            name = TOKENS if config.tied else "head.table"
            table = shared_table(context, name, config, tables)
            loss = CrossEntropy(context, table)
            norm = NORMS[config.norm](context, "final_norm", config.d_model)
            units.append([norm, Head(context, table), loss])
        super().__init__(context, stage, units, loss=loss, elsewhere=elsewhere)

    def out_shape(self, batch) -> tuple[int, ...]:
        """Shape of the activations that enter or leave this stage, (B, tokens held, D)."""
        batch_size, tokens = batch.shape
        return (batch_size, self.held.length(tokens), self.width)

    in_shape = out_shape
