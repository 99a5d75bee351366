"""The decoder as a sequence of layers, and its Stage, a contiguous run of them.

    embedding -> block 0 -> ... -> block L-1 -> final norm -> head -> loss

A block is a list of layers; its index selects the row of BLOCKS that makes them. A dense block is
x = x + attention(norm1(x)); x = x + ffn(norm2(x)). The first stage also holds the embedding, and
the last one the final norm, head and loss. GPT-2, Llama and related models are choices of layers
from the tables NORMS, EMBEDDINGS and FFNS. Letters: B batch, T tokens, D model width.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mpipar.config.model import ModelConfig
from mpipar.layers.attention import Attention
from mpipar.layers.context import Context
from mpipar.layers.embedding import EMBEDDINGS
from mpipar.layers.ffn import FFNS, FeedForward
from mpipar.layers.linears import FFN_CUTS, LINEARS
from mpipar.layers.loss import CrossEntropy, Head
from mpipar.layers.moe import MixtureOfExperts
from mpipar.layers.norm import NORMS, Norm, Residual
from mpipar.layers.parallel.column import ColumnLinear
from mpipar.layers.parallel.linear import Linear
from mpipar.layers.parallel.ring_linears import ColumnRingLinear, RowRingLinear
from mpipar.layers.parallel.row import RowLinear
from mpipar.layers.parallel.sequence import (
    ColumnSequenceLinear,
    RowSequenceLinear,
    SequenceShardedTokens,
)
from mpipar.layers.param import ALONE, Param
from mpipar.layers.recompute import ActivationRecompute
from mpipar.layers.rotation import Rotation
from mpipar.layers.stash import Layer
from mpipar.models.split import stage_parts
from mpipar.models.stage import PipelineStage

STD = 0.02  # GPT-2's standard deviation of initial weights
ENTRY = "embedding"  # what the first stage holds before its blocks
CUT = "heads, ffn, vocabulary"  # what tp divides
TOKENS = "embedding.tokens"  # the table that a tied head shares


def linears_of(context: Context, config: ModelConfig) -> tuple[type[Linear], type[Linear]]:
    """Return the cuts of two products, the second of which reads the first one's result."""
    if context.tp.size == 1 or not config.sequence_parallel:
        return ColumnLinear, RowLinear
    if config.tp_matmul == "ring":
        return ColumnRingLinear, RowRingLinear
    return ColumnSequenceLinear, RowSequenceLinear


def attention(
    context: Context, config: ModelConfig, name: str, rotation: Rotation | None
) -> Attention:
    """Return attention whose heads are divided among the ranks of tp."""
    Column, Row = linears_of(context, config)
    rows, width, head_width, kv_heads = (
        config.rows,
        config.d_model,
        config.head_dim,
        config.kv_heads,
    )
    assert head_width, "completed"
    assert kv_heads, "completed"
    head, kv_head = (config.heads, head_width), (kv_heads, head_width)
    if rows == "in":  # q, k and v are one tensor
        qkv = Column(
            context,
            f"{name}.qkv",
            (width,),
            (3, *head),
            out_axis=1,
            std=STD,
            bias=config.bias != "none",
        )
    else:
        tensors = {
            f"{name}.q": (head, "tp"),
            f"{name}.k": (kv_head, "kv_heads"),
            f"{name}.v": (kv_head, "kv_heads"),
        }
        qkv = Column(
            context,
            f"{name}.qkv",
            (width,),
            tensors,
            std=STD,
            bias=config.bias != "none",
            rows=rows,
        )
    bias, std = config.bias == "all", out_std(config)
    proj = Row(context, f"{name}.proj", head, (width,), std=std, bias=bias, rows=rows)
    return Attention(
        context,
        name,
        qkv,
        proj,
        heads=config.heads,
        kv_heads=kv_heads,
        head_width=head_width,
        rotation=rotation,
    )


def feed_forward(context: Context, config: ModelConfig, name: str, ffn: int) -> FeedForward:
    """Return a feed-forward network of this width, which is divided among the ranks of tp."""
    Up, Down = linears_of(context, config)
    if config.ffn_cut != "pair":
        Up, Down = (LINEARS[cut] for cut in FFN_CUTS[config.ffn_cut])
    kind, width = FFNS[config.activation], config.d_model
    wide = {f"{name}.{tensor}": ((ffn,), "tp") for tensor in kind.tensors}
    bias, rows = config.bias == "all", config.rows
    up = Up(context, f"{name}.up", (width,), wide, std=STD, bias=bias, rows=rows)
    std = out_std(config)
    down = Down(context, f"{name}.down", (ffn,), (width,), std=std, bias=bias, rows=rows)
    return kind(name, up, down)


def dense_block(
    context: Context, config: ModelConfig, index: int, rotation: Rotation | None
) -> list[Layer]:
    """Return the layers of a pre-norm block whose tokens all pass the same feed-forward network.

    Their barriers: two all_reduces over tp forward and two backward, or those of the cuts for an
    --ffn-cut other than pair and where the held tokens are cut.
    """
    assert config.ffn, "completed"
    ffn = feed_forward(context, config, f"block{index}.ffn", config.ffn)
    return block_around(context, config, index, rotation, ffn)


def expert_block(
    context: Context, config: ModelConfig, index: int, rotation: Rotation | None
) -> list[Layer]:
    """Return the layers of a pre-norm block with experts, and perhaps a shared network."""
    name, shared = f"block{index}", config.shared_expert_ffn
    beside = [feed_forward(context, config, f"{name}.shared", shared)] if shared else []
    moe = MixtureOfExperts(context, f"{name}.moe", config, std=STD, out_std=out_std(config))
    return block_around(context, config, index, rotation, *beside, moe)


def out_std(config: ModelConfig) -> float:
    """Return the standard deviation of the weights that end residual branches.

    As in GPT-2, it is smaller so that the stream's variance does not grow with depth.
    """
    return STD / math.sqrt(2 * config.layers)


def block_around(
    context: Context,
    config: ModelConfig,
    index: int,
    rotation: Rotation | None,
    *branches: Layer,
) -> list[Layer]:
    """Return the layers of a block: attention, then the branches side by side."""
    name = f"block{index}"
    attn = attention(context, config, f"{name}.attn", rotation)
    return [
        Residual(norm_layer(context, f"{name}.norm1", config), attn),
        Residual(norm_layer(context, f"{name}.norm2", config), *branches),
    ]


BLOCKS = {"dense": dense_block, "experts": expert_block}  # by config.block_kind(index)


def norm_layer(context: Context, name: str, config: ModelConfig) -> Norm:
    """Return the norm over the model width that the config names."""
    return NORMS[config.norm](context, name, config.d_model, config.norm_eps)


def shared_table(
    context: Context, name: str, config: ModelConfig, tables: dict[str, Param]
) -> Param:
    """Return the (V, D) table of this name, cut by vocabulary: token embedding or LM head.

    tables: those that this rank already holds; a new one is added to them.
    """
    if name not in tables:
        tied = config.tied and name == TOKENS
        tables[name] = Param(
            context,
            name,
            (config.vocab_size, config.d_model),
            placement={"tp": 0},
            std=STD,
            copies=context.tied if tied else ALONE,
            multiple=context.ops.table_multiple,
        )
    return tables[name]


class Stage(PipelineStage):
    """A stage of the decoder.

    tables: the token tables this rank already holds, by name. If both stages of a tied table are on
    one rank, they share one Param, and the tie is a local sum that needs no message.
    """

    def __init__(
        self,
        context: Context,
        config: ModelConfig,
        stage: int,
        stage_layers: tuple[int, ...],
        tables: dict[str, Param],
    ):
        if config.sequence_parallel and context.tp.size > 1:
            layout = SequenceShardedTokens(context.ops, context.tp)
            context = replace(context, token_layout=layout)
        blocks, is_first, is_last = stage_parts(stage, stage_layers)
        params_of_other_stages = set(tables)
        rotation = Rotation(context.ops, config) if config.positions == "rope" else None
        units = [
            BLOCKS[config.block_kind(index)](context, config, index, rotation) for index in blocks
        ]
        if context.recompute_blocks:
            recorder = context.comms.recorder
            units = [[ActivationRecompute(layers, recorder)] for layers in units]
        loss = None
        if is_first:
            table = shared_table(context, TOKENS, config, tables)
            embedding = EMBEDDINGS[config.positions](context, table, config.longest_row, std=STD)
            units.insert(0, [embedding])
        if is_last:
            name = TOKENS if config.tied else "head.table"
            table = shared_table(context, name, config, tables)
            loss = CrossEntropy(context, table)
            norm = norm_layer(context, "final_norm", config)
            units.append([norm, Head(context, table), loss])
        super().__init__(
            context,
            stage,
            units,
            config.d_model,
            loss=loss,
            params_of_other_stages=params_of_other_stages,
        )
