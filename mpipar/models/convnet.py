"""A convolutional network as a sequence of layers, and its Stage.

    stem -> block 0 -> ... -> block L-1 -> final norm -> mean over places -> head -> loss

The stem is a convolution, GELU and a 2 x 2 pooling. A block is x = x + down(gelu(up(norm(x)))). Its
two convolutions have the cuts of a decoder's feed-forward network. Letters: B images, P and Q
height and width after the stem, D channels of the stream, F channels inside a block, V classes.
"""

from __future__ import annotations

import math

from mpipar.comm.grid import chunk_size
from mpipar.config.model import ConvnetConfig
from mpipar.layers.context import Context
from mpipar.layers.contracts import Layer
from mpipar.layers.conv import PATCH, Conv, MaxPool, MeanPool
from mpipar.layers.costs import Cost, array, product_cost, together
from mpipar.layers.ffn import FeedForward
from mpipar.layers.loss import CrossEntropy, Head
from mpipar.layers.norm import NORMS, Residual
from mpipar.layers.param import Param
from mpipar.layers.stash import Stash
from mpipar.models.stage import BlockKind, LayerRun, UnitCosts, block_costs, stage_parts
from mpipar.ops.array_ops import out_length
from mpipar.ops.signature import Array
from mpipar.partition.tokens import WholeTokens

KERNEL = 3  # width of every convolution's kernel, with one zero of padding around the image
ENTRY = "stem"  # what the first stage holds before its blocks
LETTERS = """\
B images of a microbatch, D channels of the stream, F channels inside a pair, V classes, d, f and v
a rank's pieces of D, F and V, S0 and S places of an image before and after the stem, C its
channels, k width of the kernel, e bytes of a number, s bytes of one in a sum"""
CUT = "channels, classes"  # what tp divides


def deviation(channels: int) -> float:
    """Return the standard deviation of initial weights.

    It preserves the variance through GELU, which halves it (arXiv 1502.01852).
    """
    return math.sqrt(2 / (KERNEL**2 * channels))


def stem_size(config: ConvnetConfig) -> tuple[int, int]:
    """Return height and width after the stem's convolution, before its pooling."""
    height, width = (
        out_length(side, KERNEL, config.stem_stride, KERNEL // 2) for side in config.image_shape[:2]
    )
    return height, width


def stream_size(config: ConvnetConfig) -> tuple[int, int]:
    """Return (P, Q), the height and width after the stem's pooling."""
    height, width = stem_size(config)
    return height // MaxPool.width, width // MaxPool.width


class Stem:
    """y (B, P, Q, D) = pool(gelu(conv(images))), cut by output channels and gathered.

    Images have few channels, so there is nothing to cut on the input side.
    """

    def __init__(self, context: Context, config: ConvnetConfig):
        self.ops, self.name = context.ops, "stem"
        height, width, channels = config.image_shape
        self.conv = Conv(
            context,
            "stem",
            (height, width),
            (channels, config.channels),
            cut="gather",
            std=deviation(channels),
            stride=config.stem_stride,
        )
        self.pool = MaxPool(context, "stem.pool")
        self.params = self.conv.params

    @staticmethod
    def cost() -> Cost:
        """Return its Cost, without the images, which belong to the microbatch."""
        conv = product_cost("stem", "gather", "C", "D", "B*S0", patch=PATCH)
        return together(
            conv._replace(stash={}, kept={}, barriers=conv.barriers[:1]),
            Cost(stash=array("B*S0", "D"), kept=array("B*S0", "D")),
        )

    def forward(self, x: Array, stash: Stash) -> Array:
        """Return y (B, P, Q, D) of the microbatch's images; x is ignored. Comm: one all_gather."""
        h = self.conv.forward(stash.batch.images, stash)
        stash[self.name, "h"] = h
        return self.pool.forward(self.ops.gelu_forward(h), stash)

    def backward_input(self, dy: Array, stash: Stash) -> None:
        """Keep dy for the convolution; the images need no gradient."""
        da = self.pool.backward_input(dy, stash)
        stash[self.name, "dy"] = self.ops.gelu_backward_input(da, stash.pop((self.name, "h")))

    def backward_weight(self, stash: Stash) -> None:
        """Accumulate the gradients of the convolution."""
        self.conv.backward_weight(stash)


class ConvPair(FeedForward):
    """y = down(gelu(up(x))): convolutions from D to F channels and back. Comm: see Linear."""

    def __init__(
        self,
        context: Context,
        name: str,
        size: tuple[int, int],
        widths: tuple[int, int],
        *,
        cuts: tuple[str, str],
        out_std: float,
    ):
        self.ops, self.name = context.ops, name
        outer, inner = widths
        self.up = Conv(
            context, f"{name}.up", size, (outer, inner), cut=cuts[0], std=deviation(outer)
        )
        self.down = Conv(context, f"{name}.down", size, (inner, outer), cut=cuts[1], std=out_std)
        self.params = [*self.up.params, *self.down.params]


def pair_block(context: Context, config: ConvnetConfig, index: int) -> list[Layer]:
    """Return the layers of a block of two convolutions.

    Their barriers: one all_reduce over tp forward and one backward, or those of another --ffn-cut.
    """
    assert config.ffn, "completed"
    name = f"block{index}"
    # Residual branches start smaller so that the stream's variance does not grow with depth.
    out_std = deviation(config.ffn) / math.sqrt(config.layers)
    norm = NORMS[config.norm](context, f"{name}.norm", config.channels)
    pair = ConvPair(
        context,
        name,
        stream_size(config),
        (config.channels, config.ffn),
        cuts=context.pair(config.ffn_cut),
        out_std=out_std,
    )
    return [Residual(norm, pair)]


def pair_cost(config: ConvnetConfig) -> Cost:
    """Return the Cost of a block of two convolutions."""
    cuts = WholeTokens.cuts if config.ffn_cut == "pair" else (config.ffn_cut,) * 2
    return together(NORMS[config.norm].cost("B*S"), ConvPair.cost("block*", cuts, "B*S", PATCH))


BLOCKS = {"pair": BlockKind(pair_block, pair_cost)}  # by config.block_kind(index)


def unit_costs(
    config: ConvnetConfig,
    method: str | None = None,
    scores: bool = False,
    dispatch: str = "",
) -> UnitCosts:
    """Return what the units cost.

    The other arguments have no effect, because there are neither attention nor experts.
    """
    head = together(
        NORMS[config.norm].cost("B*S"), Head.cost(WholeTokens, "B"), CrossEntropy.cost("B")
    )
    return UnitCosts(Stem.cost(), block_costs(BLOCKS, config), head, array("B*S", "D"))


def letters(
    config: ConvnetConfig, rows: int, tp: int, cp: int, table_multiple: int = 1
) -> dict[str, float]:
    """Return the sizes of LETTERS for a microbatch of `rows` images on a rank, except e and s.

    table_multiple: see `Ops`; by default there are no padding rows, as in the FLOPs of the model
    itself.
    """
    assert config.ffn, "completed"
    return {
        "B": rows,
        "S0": math.prod(stem_size(config)),
        "S": math.prod(stream_size(config)),
        "C": config.image_shape[2],
        "k": KERNEL,
        "D": config.channels,
        "F": config.ffn,
        "V": config.classes,
        "d": chunk_size(config.channels, tp),
        "f": chunk_size(config.ffn, tp),
        "v": chunk_size(config.classes, tp, table_multiple),
    }


def describe_model(config: ConvnetConfig) -> str:
    """Return the sizes of a resolved ModelConfig, for a headline."""
    image, stream = (
        "x".join(map(str, shape)) for shape in (config.image_shape, stream_size(config))
    )
    return (
        f"{config.layers} pairs of convolutions, {config.channels} channels, {config.ffn}"
        f" inside a pair, images {image}, {stream} after the stem, {config.classes} classes"
        f"{', RMSNorm' if config.norm == 'rms' else ''}"
    )


class Stage(LayerRun):
    """A stage of the network. Stages share no parameter, so `tables` stays empty."""

    def __init__(
        self,
        context: Context,
        config: ConvnetConfig,
        stage: int,
        stage_layers: tuple[int, ...],
        tables: dict[str, Param],
    ):
        blocks, is_first, is_last = stage_parts(stage, stage_layers)
        units = context.blocks(
            lambda context, index: BLOCKS[config.block_kind(index)].layers(context, config, index),
            blocks,
        )
        loss = None
        if is_first:
            units.insert(0, [Stem(context, config)])
        if is_last:
            table = Param(
                context,
                "head.table",
                (config.classes, config.channels),
                placement={"tp": 0},
                std=1 / math.sqrt(config.channels),
                multiple=context.ops.table_multiple,
            )
            loss = CrossEntropy(context, table)
            norm = NORMS[config.norm](context, "final_norm", config.channels)
            units.append([norm, MeanPool(context, "mean"), Head(context, table), loss])
        super().__init__(context, stage, units, config.channels, stream_size(config), loss=loss)
