"""More ranks than cores: a pipeline's share of the cores, and how a prediction states it."""

from __future__ import annotations

from math import prod

from mpipar.comm.grid import AXES
from mpipar.files.text import counted

EQUAL_SHARES = "in the prediction, ranks that compute at the same time get equal shares"


def slots(grid_config, cores: int) -> int:
    """Return how many ranks run at full speed: those with a core, at least a group of tp and cp.

    Passes of such a group are measured as it is, even where it has fewer cores than ranks.
    """
    return max(cores, grid_config.tp * grid_config.cp)


def crowding(grid_config, cores: int) -> float:
    """Return the slowdown of work that all ranks of a layout do at the same time; at least 1."""
    ranks = prod(getattr(grid_config, axis) for axis in AXES)
    return max(1.0, ranks / slots(grid_config, cores))


def pipeline_cores(grid_config, cores: int) -> float | None:
    """Return `Costs.cores`: one pipeline's share of the cores; None if ranks share none."""
    share = crowding(grid_config, cores)
    return None if share == 1 else grid_config.pp / share


def sharing_note(grid_config, cores: int, sharing: float) -> str:
    """Return a prediction's note on more ranks than cores, or "". sharing: as in `Costs`."""
    ranks = prod(getattr(grid_config, axis) for axis in AXES)
    if ranks <= cores:
        return ""
    more = f", and passes take {sharing:.2f} times as much of a core" if sharing > 1 else ""
    return f"{ranks} ranks share {counted(cores, 'core')}: {EQUAL_SHARES}{more}"
