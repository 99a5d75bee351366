"""The FLOPs of a model's units, counted by running them on shapes: stages are split by them."""

from __future__ import annotations

from mpipar.comm.grid import Grid
from mpipar.comm.groups import Comms
from mpipar.comm.record import Recorder
from mpipar.config.model import ModelConfig
from mpipar.layers.context import Context
from mpipar.layers.contracts import Layer
from mpipar.layers.flat import FlatParams
from mpipar.layers.loss import Head
from mpipar.layers.stash import Batch, Stash
from mpipar.models.decoder import BLOCKS, TOKENS, shared_table
from mpipar.models.split import UnitFlops
from mpipar.ops.shape_ops import ShapeOps


def unit_flops(config: ModelConfig) -> UnitFlops:
    """Return the FLOPs of a model's units in a forward pass, per token.

    One block of each kind and the head run on a rank of their own. Rotations, which are no
    products, are left out.
    """
    config = config.completed()
    ops, tokens = ShapeOps("float32"), config.seq_len
    context = Context(ops, Comms(Grid(0, {}), ops, Recorder()))
    ids, x = ops.empty((1, tokens), "int64"), ops.empty((1, tokens, config.d_model))
    stash = Stash(Batch(ids, None, ids[0]))

    def flops(layers: list[Layer]) -> float:
        FlatParams(ops, [param for layer in layers for param in layer.params])
        before, y = ops.flops.total(), x
        for layer in layers:
            y = layer.forward(y, stash)
        return (ops.flops.total() - before) / tokens

    kinds = {config.block_kind(index): index for index in range(config.layers)}
    blocks = {
        kind: flops(BLOCKS[kind](context, config, index, None)) for kind, index in kinds.items()
    }
    head = flops([Head(context, shared_table(context, TOKENS, config, {}))])
    return UnitFlops(
        0.0, tuple(blocks[config.block_kind(index)] for index in range(config.layers)), head
    )
