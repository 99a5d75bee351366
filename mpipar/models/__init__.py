"""The decoder as a sequence of layers, split into the stages that a pipeline runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mpipar.config.model import ModelConfig
from mpipar.config.sections import Config
from mpipar.layers.costs import value
from mpipar.models.decoder import letters, unit_costs
from mpipar.models.split import Split, UnitFlops, balanced_layers


class Placed(Protocol):
    """Says which stages each pipeline rank holds, as `pipeline.instructions.Schedule` does."""

    @property
    def stages_by_rank(self) -> Sequence[Sequence[int]]: ...


def unit_flops(config: ModelConfig) -> UnitFlops:
    """Return the FLOPs of a ModelConfig's units in a forward pass, per token."""
    config = config.completed()
    units, sizes = unit_costs(config), letters(config, 1, 1, 1) | {"T": 1}
    return UnitFlops(
        value(units.entry.flops, sizes),
        tuple(value(block.flops, sizes) for block in units.blocks),
        value(units.head.flops, sizes),
    )


def layer_split(config: Config, schedule: Placed) -> Split:
    """Return each stage's number of blocks: --stage-layers, or balanced over the ranks."""
    return config.grid.stage_layers or balanced_layers(
        unit_flops(config.model), schedule.stages_by_rank
    )
