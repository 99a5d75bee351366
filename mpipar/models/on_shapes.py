"""A model on shapes, the same on every rank: the list of its parameters, the FLOPs of its units."""

from __future__ import annotations

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.groups import Comms
from mpipar.comm.recorder import Recorder
from mpipar.config.model import ModelConfig
from mpipar.layers.context import Context
from mpipar.layers.flat import FlatParams
from mpipar.layers.loss import Head
from mpipar.layers.param import Param
from mpipar.layers.stash import Batch, Layer, Stash
from mpipar.models.decoder import BLOCKS, TOKENS, Stage, shared_table
from mpipar.models.split import Split, UnitFlops
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


def all_params(
    config: ModelConfig, stage_layers: Split, table_multiple: int = 1
) -> list[tuple[int, Param]]:
    """Return (stage, Param) of every whole tensor, from the real layers on shapes, without memory.

    They are sorted by name, the order in which every rank processes them. table_multiple: of the
    ranks whose shards are wanted, see `Ops`.
    """
    ops = ops_module.make("shapes", "float32")
    ops.table_multiple = table_multiple
    solo = Context(ops, Comms.solo(ops))
    tables: dict[str, Param] = {}
    found: list[tuple[int, Param]] = []
    for number in range(len(stage_layers)):
        stage = Stage(solo, config, number, stage_layers, tables)
        found += [(number, param) for param in stage.params]
    return sorted(found, key=lambda item: item[1].name)
