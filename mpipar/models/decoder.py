"""The decoder as a sequence of layers, and its Stage, a contiguous run of them.

    embedding -> block 0 -> ... -> block L-1 -> final norm -> head -> loss

A pre-norm block is x = x + attention(norm1(x)); x = x + ffn(norm2(x)). The first stage also holds
the embedding, and the last one the final norm, head and loss. GPT-2, Llama and their kin are
choices of layers: the tables NORMS, EMBEDDINGS, ROTATIONS and FFNS hold them. Letters: B batch, T
tokens, D model width.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mpipar.files.text import counted
from mpipar.layers.attention import Attention
from mpipar.layers.embedding import EMBEDDINGS
from mpipar.layers.ffn import FFNS
from mpipar.layers.loss import CrossEntropy, Head
from mpipar.layers.norm import NORMS
from mpipar.layers.param import Param
from mpipar.layers.rotation import ROTATIONS
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

    def __init__(self, context, index, config, rotation):
        self.ops = context.ops
        name = f"block{index}"
        # As in GPT-2, residual branches start smaller so that the stream's variance does not grow
        # with depth.
        out_std = STD / math.sqrt(2 * config.layers)
        self.norm1 = norm_layer(context, f"{name}.norm1", config)
        self.attn = Attention(
            context, f"{name}.attn", config, rotation, std=STD, out_std=out_std)
        self.norm2 = norm_layer(context, f"{name}.norm2", config)
        self.ffn = FFNS[config.activation](
            context, f"{name}.ffn", config.d_model, config.ffn, cuts=context.pair(config.ffn_cut),
            std=STD, out_std=out_std, bias=config.bias == "all", rows=config.rows)
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


def norm_layer(context, name: str, config):
    """The norm over the model width that the config names."""
    return NORMS[config.norm](context, name, config.d_model, config.norm_eps)


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
    """FLOPs per token: of a block's products and attention, and of the head 2 D V.

    Queries and the projection behind attention take 2 D H d each, keys and values 2 D Hkv d each,
    attention 4 T H d. Each matrix of the feed-forward network takes 2 D F.
    """
    config = config.completed()
    width, heads = config.d_model, config.heads * config.head_dim
    keys, matrices = config.kv_heads * config.head_dim, 3 if config.activation == "swiglu" else 2
    block = (4 * width * (heads + keys) + 2 * matrices * width * config.ffn
             + 4 * config.seq_len * heads)
    return UnitFlops(0, block, 2 * width * config.vocab_size)


def describe_model(config) -> str:
    """The sizes of a resolved ModelConfig, for a headline, and what is not GPT-2's."""
    one = config.completed()
    keys = f" ({one.kv_heads} kv)" if one.kv_heads != one.heads else ""
    width = f" of {one.head_dim}" if one.head_dim * one.heads != one.d_model else ""
    more = [", tied head"] * one.tied + [", RMSNorm"] * (one.norm == "rms") + [
        ", SwiGLU"] * (one.activation == "swiglu") + [", RoPE"] * (one.positions == "rope")
    return (f"{counted(one.layers, 'layer')}, D {one.d_model},"
            f" {counted(one.heads, 'head')}{keys}{width}, F {one.ffn},"
            f" T {one.seq_len}, V {one.vocab_size}{''.join(more)}")


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
        rotation = ROTATIONS[config.positions](context.ops, config)
        units = [[block] for block in context.blocks(
            lambda context, index: Block(context, index, config, rotation), blocks)]
        loss = None
        if is_first:
            table = shared_table(context, TOKENS, config, tables)
            embedding = EMBEDDINGS[config.positions](context, table, config.seq_len, std=STD)
            units.insert(0, [embedding])
        if is_last:
            name = TOKENS if config.tied else "head.table"
            table = shared_table(context, name, config, tables)
            loss = CrossEntropy(context, table)
            norm = norm_layer(context, "final_norm", config)
            units.append([norm, Head(context, table), loss])
        super().__init__(context, stage, units, loss=loss, elsewhere=elsewhere)

    def out_shape(self, batch) -> tuple[int, ...]:
        """Shape of the activations that enter or leave this stage, (B, tokens held, D)."""
        batch_size, tokens = batch.shape
        return (batch_size, self.held.length(tokens), self.width)

    in_shape = out_shape
