"""A network of convolutions as a sequence of layers, and its Stage.

    stem -> block 0 -> ... -> block L-1 -> final norm -> mean over places -> head -> loss

The stem is a convolution, GELU and a 2 x 2 pooling. A block is x = x + down(gelu(up(norm(x)))). Its
two convolutions have the cuts of a decoder's feed-forward network. Letters: B images, P and Q
height and width behind the stem, D channels of the stream, F channels inside a block, V classes.
"""

from __future__ import annotations

import math

from mpipar.layers.conv import Conv, MaxPool, MeanPool
from mpipar.layers.ffn import FeedForward
from mpipar.layers.loss import CrossEntropy, Head
from mpipar.layers.norm import NORMS
from mpipar.layers.param import Param
from mpipar.models.stage import LayerRun, UnitFlops, stage_parts
from mpipar.ops.image_ops import out_length

KERNEL = 3  # every convolution's, with one zero around the image
ENTRY = "stem"  # what the first stage holds below its blocks
CUT = "channels, classes"  # what tp divides


def deviation(channels: int) -> float:
    """Standard deviation of initial weights.

    It keeps the variance through GELU, which halves it (arXiv 1502.01852).
    """
    return math.sqrt(2 / (KERNEL**2 * channels))


def stem_size(config) -> tuple[int, int]:
    """Height and width behind the stem's convolution, before its pooling."""
    return tuple(out_length(side, KERNEL, config.stem_stride, KERNEL // 2)
                 for side in config.image_shape[:2])


def stream_size(config) -> tuple[int, int]:
    """(P, Q), the height and width behind the stem's pooling."""
    return tuple(side // MaxPool.width for side in stem_size(config))


class Stem:
    """y (B, P, Q, D) = pool(gelu(conv(images))), cut by output channels and collected.

    Images have few channels, so there is nothing to cut on the input side.
    """

    def __init__(self, context, config):
        self.ops, self.name = context.ops, "stem"
        height, width, channels = config.image_shape
        self.conv = Conv(context, "stem", (height, width), (channels, config.channels),
                         cut="gather", std=deviation(channels), stride=config.stem_stride)
        self.pool = MaxPool(context, "stem.pool")
        self.params = self.conv.params

    def forward(self, x, stash):
        """y (B, P, Q, D); reads the microbatch's images, ignores x. Comm: one all_gather."""
        h = self.conv.forward(stash.batch.images, stash)
        stash[self.name, "h"] = h
        return self.pool.forward(self.ops.gelu_forward(h), stash)

    def backward_input(self, dy, stash):
        """Keep dy for the convolution; nobody needs a gradient of the images."""
        da = self.pool.backward_input(dy, stash)
        stash[self.name, "dy"] = self.ops.gelu_backward_input(da, stash.pop((self.name, "h")))

    def backward_weight(self, stash):
        """Accumulate the gradients of the convolution."""
        self.conv.backward_weight(stash)


class ConvPair(FeedForward):
    """y = down(gelu(up(x))): convolutions from D to F channels and back. Comm: see Linear."""

    def __init__(self, context, name, size, widths, *, cuts, out_std):
        self.ops, self.name = context.ops, name
        outer, inner = widths
        self.up = Conv(context, f"{name}.up", size, (outer, inner), cut=cuts[0],
                       std=deviation(outer))
        self.down = Conv(context, f"{name}.down", size, (inner, outer), cut=cuts[1], std=out_std)
        self.params = [*self.up.params, *self.down.params]


class Block:
    """x = x + pair(norm(x)).

    Comm: one all_reduce over tp forward and one backward, or the barriers of another --ffn-cut.
    """

    def __init__(self, context, index, config):
        self.ops = context.ops
        # Residual branches start smaller so that the stream's variance does not grow with depth.
        out_std = deviation(config.ffn) / math.sqrt(config.layers)
        self.norm = NORMS[config.norm](context, f"block{index}.norm", config.channels)
        self.pair = ConvPair(
            context, f"block{index}", stream_size(config), (config.channels, config.ffn),
            cuts=context.pair(config.ffn_cut), out_std=out_std)
        self.params = [*self.norm.params, *self.pair.params]

    def forward(self, x, stash):
        """y (B, P, Q, D) of x (B, P, Q, D)."""
        return self.ops.accumulate(self.pair.forward(self.norm.forward(x, stash), stash), x)

    def recompute(self, x, stash):
        """Fill the stash as forward does, without the last product and its barrier."""
        self.pair.recompute(self.norm.forward(x, stash), stash)

    def backward_input(self, dy, stash):
        """dx (B, P, Q, D) of dy (B, P, Q, D); dy flows around the branch and through it."""
        dx = self.norm.backward_input(self.pair.backward_input(dy, stash), stash)
        return self.ops.accumulate(dx, dy)

    def backward_weight(self, stash):
        """Accumulate all gradients of the block. Comm: backward_weight of the cuts."""
        self.pair.backward_weight(stash)
        self.norm.backward_weight(stash)


def unit_flops(config) -> UnitFlops:
    """FLOPs per image. A convolution takes 2 k^2 times places, channels in and channels out."""
    wide, stem = math.prod(stream_size(config)), math.prod(stem_size(config))
    return UnitFlops(
        2 * KERNEL**2 * stem * config.image_shape[2] * config.channels,
        2 * (2 * KERNEL**2 * wide * config.channels * config.ffn),
        2 * config.channels * config.classes)


def describe_model(config) -> str:
    """The sizes of a resolved ModelConfig, for a headline."""
    image, stream = ("x".join(map(str, shape)) for shape in (config.image_shape,
                                                             stream_size(config)))
    return (f"{config.layers} pairs of convolutions, {config.channels} channels, inside a pair"
            f" {config.ffn}, images {image}, behind the stem {stream}, {config.classes} classes"
            f"{', RMSNorm' if config.norm == 'rms' else ''}")


class Stage(LayerRun):
    """A stage of the network. Stages share no parameter, so `tables` stays empty."""

    def __init__(self, context, config, stage, stage_layers, tables):
        self.shape = (*stream_size(config), config.channels)
        blocks, is_first, is_last = stage_parts(stage, stage_layers)
        units = [[block] for block in context.blocks(
            lambda context, index: Block(context, index, config), blocks)]
        loss = None
        if is_first:
            units.insert(0, [Stem(context, config)])
        if is_last:
            table = Param(context, "head.table", (config.classes, config.channels), cut_axis=0,
                          std=1 / math.sqrt(config.channels))
            loss = CrossEntropy(context, table)
            norm = NORMS[config.norm](context, "final_norm", config.channels)
            units.append([norm, MeanPool(context, "mean"), Head(context, table), loss])
        super().__init__(context, stage, units, loss=loss)

    def out_shape(self, batch) -> tuple[int, ...]:
        """Shape of the activations between any two stages, (B, P, Q, D)."""
        return (batch.shape[0], *self.shape)

    in_shape = out_shape
