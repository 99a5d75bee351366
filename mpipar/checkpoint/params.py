"""The list of all parameters of a model, whatever rank asks."""

from __future__ import annotations

from mpipar import models
from mpipar import ops as ops_module
from mpipar.comm.group import Comms
from mpipar.layers.context import Context


def all_params(config, stage_layers) -> list[tuple[int, object]]:
    """(stage, Param) of every whole tensor, from the real layers on shapes, without memory.

    They are in the order of their names, in which every rank goes through them.
    """
    ops = ops_module.make("shapes", "float32")
    solo = Context(ops, Comms.solo(ops))
    tables, found = {}, []
    for number in range(len(stage_layers)):
        stage = models.model_of(config).Stage(solo, config, number, stage_layers, tables)
        found += [(number, param) for param in stage.flat.params]
    return sorted(found, key=lambda item: item[1].name)
