"""Reports which numbers are not finite, and on which ranks; used only after a check has failed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from mpipar.comm.grid import Grid
from mpipar.comm.groups import Comms
from mpipar.comm.objects import broadcast_text, gather_objects
from mpipar.layers.flat import FlatParams
from mpipar.models.decoder import Stage
from mpipar.ops.functions import Ops
from mpipar.ops.signature import Array

SHOWN = 3  # tensors of a report, and ranks of a tensor
PiecesOf = Callable[[FlatParams], list[Array]]
Losses = dict[int, float]  # by microbatch
Facts = dict[str, Any]


class Inspected(Protocol):
    """What a report needs from a `Worker`."""

    ops: Ops
    grid: Grid
    comms: Comms
    stages: dict[int, Stage]


def bad_numbers(worker: Inspected, pieces_of: PiecesOf, losses: Losses) -> Facts:
    """Return what is not finite on this rank: {"losses": [mb, value], "tensors": [rows]}.

    pieces_of(flat) picks the arrays, one for each segment. losses: {microbatch: loss}. A row is:
    stage, unit, name, how many numbers, index of the first one in the whole tensor.
    """
    rows = []
    for number, flat in (
        (number, flat) for number, stage in worker.stages.items() for flat in stage.flats
    ):
        pieces = pieces_of(flat)
        for param in flat.params:
            bad = [
                first + place
                for first, values in flat.parts(param, pieces)
                for place in np.flatnonzero(~np.isfinite(worker.ops.to_host(values)))
            ]
            if bad:
                first = [int(place) for place in np.unravel_index(bad[0], param.local_shape)]
                first = [place + start for place, (start, _) in zip(first, param.box, strict=True)]
                rows.append([number, param.unit, param.name, len(bad), first])
    bad_losses = [[mb, value] for mb, value in losses.items() if not math.isfinite(value)]
    return {"place": worker.grid.describe(), "losses": bad_losses, "tensors": rows}


def describe(title: str, facts: Mapping[int, Facts]) -> list[str]:
    """Return lines that name the losses and the first tensors that are not finite.

    title: what the tensors' numbers are. facts: by world rank.
    """
    found = [
        f"the loss of microbatch {mb} is {value} on rank {world_rank} ({fact['place']})"
        for world_rank, fact in facts.items()
        for mb, value in fact["losses"][:1]
    ][:SHOWN]
    holders: dict[str, list[int]] = {}
    for _, _, name, world_rank in sorted(
        (-stage, -unit, name, world_rank)
        for world_rank, fact in facts.items()
        for stage, unit, name, *_ in fact["tensors"]
    ):
        holders.setdefault(name, []).append(world_rank)
    for name, ranks in list(holders.items())[:SHOWN]:
        count, first = next(row[3:] for row in facts[ranks[0]]["tensors"] if row[2] == name)
        what = "1 number is" if count == 1 else f"{count} numbers are"
        where = ", ".join(f"rank {holder} ({facts[holder]['place']})" for holder in ranks[:SHOWN])
        more = f" and {len(ranks) - SHOWN} others" if len(ranks) > SHOWN else ""
        found.append(f"{title} of {name}: {what} not finite, first {first}: on {where}{more}")
    if len(holders) > SHOWN:
        found.append(f"and the {title} of {len(holders) - SHOWN} other tensors")
    return found


def report(worker: Inspected, title: str, pieces_of: PiecesOf, losses: Losses) -> list[str]:
    """Return `describe` of all ranks of inner. For the arguments see `bad_numbers`.

    Comm: a gather of facts and a broadcast of text over them, without records.
    """
    comms = worker.comms
    facts = gather_objects(comms.mpi_inner, bad_numbers(worker, pieces_of, losses)) or ()
    lines = describe(title, dict(zip(comms["inner"].ranks, facts, strict=False)))
    return broadcast_text(comms.mpi_inner, "\n".join(lines)).splitlines()
