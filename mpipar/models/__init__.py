"""Models as sequences of layers, split into the stages that a pipeline runs.

A model is a module with `Stage`, `BLOCKS`, `unit_costs`, `letters`, `LETTERS`, `describe_model`,
`ENTRY` and `CUT`. The data it reads is handled by mpipar/data, its form on disk by
mpipar/checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

from mpipar.config.model import ModelConfig
from mpipar.config.sections import Config
from mpipar.layers.costs import value
from mpipar.models import convnet, decoder
from mpipar.models.split import Split, UnitFlops, balanced_layers

MODELS = {"decoder": decoder, "convnet": convnet}


class Placed(Protocol):
    """Says which stages each pipeline rank holds, as `pipeline.instructions.Schedule` does."""

    @property
    def stages_by_rank(self) -> Sequence[Sequence[int]]: ...


def model_of(config: ModelConfig) -> ModuleType:
    """Return the module of a ModelConfig's model."""
    return MODELS[config.model]


def unit_flops(config: ModelConfig) -> UnitFlops:
    """Return the FLOPs of a ModelConfig's units in a forward pass, per image or per token."""
    model, config = model_of(config), config.completed()
    units, sizes = model.unit_costs(config), model.letters(config, 1, 1, 1) | {"T": 1}
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
