"""The list of all parameters of a model, the same on every rank."""

from __future__ import annotations

from mpipar import ops as ops_module
from mpipar.comm.groups import Comms
from mpipar.config.model import ModelConfig
from mpipar.layers.context import Context
from mpipar.layers.param import Param
from mpipar.models.decoder import Stage
from mpipar.models.split import Split


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
