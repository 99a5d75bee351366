"""Reports which numbers are not finite, and on which ranks; used only after a check has failed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from mpipar.comm.groups import Comms
from mpipar.comm.objects import broadcast_text, gather_objects
from mpipar.layers.flat import FlatParams
from mpipar.models.stage import PipelineStage
from mpipar.ops.signature import Array

SHOWN = 3  # lines of a report, and ranks of a line


def report(
    comms: Comms,
    stages: Mapping[int, PipelineStage],
    title: str,
    pieces_of: Callable[[FlatParams], list[Array]],
    losses: Mapping[int, float],
) -> list[str]:
    """Return lines that name losses, and tensors from the end of the model on, with their ranks.

    title: what the numbers are that pieces_of(flat) picks. losses: by microbatch.
    Comm: a gather of facts and a broadcast of text over inner, without records.
    """
    own = [
        (-math.inf, 0, f"the loss of microbatch {mb} is {loss}")
        for mb, loss in losses.items()
        if not math.isfinite(loss)
    ][:1]
    for number, stage in stages.items():
        for flat in stage.flats:
            own += [
                (-number, -param.unit, f"{title} of {param.name} is not finite")
                for param in flat.params
                for parts in [flat.parts(param, pieces_of(flat))]
                if not all(np.isfinite(comms.ops.to_host(part)).all() for _, part in parts)
            ]
    facts = gather_objects(comms.mpi_inner, [comms.grid.describe(), own]) or ()
    ranks: dict[str, list[str]] = {}
    for _, _, what, world_rank, place in sorted(
        (*one, world_rank, place)
        for world_rank, (place, found) in zip(comms["inner"].ranks, facts, strict=False)
        for one in found
    ):
        ranks.setdefault(what, []).append(f"rank {world_rank} ({place})")
    lines = [f"{what} on {', '.join(some[:SHOWN])}" for what, some in ranks.items()]
    return broadcast_text(comms.mpi_inner, "\n".join(lines[:SHOWN])).splitlines()
