"""The decoder as a sequence of layers, split into the stages that a pipeline runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mpipar.config.sections import Config
from mpipar.models.on_shapes import unit_flops
from mpipar.models.split import Split, balanced_layers


class Placed(Protocol):
    """Says which stages each pipeline rank holds, as `pipeline.instructions.Schedule` does."""

    @property
    def stages_by_rank(self) -> Sequence[Sequence[int]]: ...


def layer_split(config: Config, schedule: Placed) -> Split:
    """Return each stage's number of blocks: --stage-layers, or balanced over the ranks."""
    return config.grid.stage_layers or balanced_layers(
        unit_flops(config.model), schedule.stages_by_rank
    )
