"""Replica drift: checks that all copies of a tensor still have the same bits (--check-replicas).

Data-parallel ranks hold copies of every tensor that is not sharded over them (`--zero`), and
tensor-parallel ranks of every remaining_group one. A tied table has copies
on two pipeline ranks. All copies start equal and get equal updates, so they stay equal
bit by bit. If one differs, a memory, a link or a library is at fault, and the copies would drift
further apart without any error.
"""

from collections.abc import Iterator
from itertools import product
from operator import itemgetter
from time import perf_counter

import numpy as np

from mpipar.comm.grid import ISLAND
from mpipar.comm.objects import all_gather_objects
from mpipar.errors import DriftError, EnvironmentProblem, UserError
from mpipar.layers.param import Param
from mpipar.ops.signature import Array
from mpipar.run.checkpoint.state import place_among_copies
from mpipar.run.process.consistency import ranges
from mpipar.train.worker import Worker

DRIFT = (
    "copies of tensors differ that must be equal bit by bit. A memory, a link or a library is"
    " at fault, or hosts compute differently: resume from an older checkpoint, or accept it"
    " with --check-replicas 0"
)
SHOWN = 5  # pieces of a report
LEAST = np.iinfo(np.int64).min
NO_DRIFT = (
    "the MPI library reported copies of tensors that differ, but compared one by one they are all"
    " equal: its MPI_MAX is wrong (see mpipar doctor); use another library, or --check-replicas 0"
)
PieceOf = tuple[str, str, int]  # kind, name, shard


class Replicas:
    """Compares the copies of all tensors, piece by piece.

    A piece is a whole tensor, or one shard of a cut one, of the master weights or of a moment.
    Ranks with the same piece must hold the same bits, whichever group keeps them equal. places:
    (kind, name, shard) -> index of the piece in every rank's list. count, seconds: number of
    comparisons, and the time that all of them took.
    """

    def __init__(self, worker: Worker):
        self.worker = worker
        # What every rank holds whole: with --zero 1 the weights, with --zero 3 nothing.
        level = worker.config.memory.zero
        self.kinds = {0: ("master", *worker.optimizer.kinds), 1: ("master",), 3: ()}[level]
        pieces = [
            (param.name, shard)
            for _, param in worker.all_params
            for shard in range(len(param.shards(worker.grid)))
        ]
        islands = range(0 if worker.island is None else worker.grid.size(ISLAND))
        kinds = [
            key for kind in self.kinds for key in (kind, *(f"{kind}.{one}" for one in islands))
        ]
        self.places = {
            (kind, *piece): place for place, (kind, piece) in enumerate(product(kinds, pieces))
        }
        self.count, self.seconds = 0, 0.0

    def key(self, kind: str) -> str:
        """Return what the pieces of a kind are called here: of islands that have met, the weights
        are common, and everything else is an island's own.
        """
        island, met = self.worker.island, not self.worker.outer.begun
        return kind if island is None or (kind == "master" and met) else f"{kind}.{island}"

    def pieces(self) -> Iterator[tuple[PieceOf, Param, Array]]:
        """Yield ((kind, name, shard), param, numbers) of each piece here."""
        for kind in self.kinds:
            key = self.key(kind)
            for flat in self.worker.flats:
                if kind not in flat.state:
                    continue
                for param, _, values in flat.parts_in("data" if flat.is_sharded(kind) else kind):
                    yield (key, param.name, param.shard), param, values

    def checksums(self) -> dict[PieceOf, int]:
        """Return {(kind, name, shard): 64-bit checksum} of pieces here with copies elsewhere."""
        worker = self.worker
        return {
            piece: worker.ops.checksum(view)
            for piece, param, view in self.pieces()
            if place_among_copies(worker.comms, param)[1] > 1
        }

    def check(self, step: int) -> None:
        """Raise DriftError on every rank if any two copies of a piece differ.

        All copies are equal exactly if the largest checksum of a piece equals the smallest one,
        which is the complement of the largest complement. A rank without a piece gives the smallest
        number for both. Checksums are compared as signed numbers: widespread MPI libraries take
        unsigned ones for signed in MPI_MAX (Open MPI up to 4.1.4, MPICH up to 4.0.2).
        Comm: one all_reduce of two numbers per piece over world; where copies differ, an all-gather
        of checksums.
        """
        if not self.places:
            return
        worker, recorder, start = self.worker, self.worker.recorder, perf_counter()
        with recorder.at("check"):
            mine = self.checksums()
            ends = np.full((2, len(self.places)), LEAST, np.int64)
            for piece, checksum in mine.items():
                signed = np.uint64(checksum).astype(np.int64)
                ends[:, self.places[piece]] = signed, ~signed
            ends = worker.ops.to_host(
                worker.comms.world.all_reduce(worker.ops.asarray(ends), "check.replicas", "max")
            )
        differs = (ends[0] != ~ends[1]) & (ends > LEAST).any(axis=0)
        drifted = [piece for piece, place in self.places.items() if differs[place]]
        self.count, self.seconds = self.count + 1, self.seconds + perf_counter() - start
        if drifted:
            raise self._error(step, drifted, mine)

    def _error(self, step: int, drifted: list[PieceOf], mine: dict[PieceOf, int]) -> UserError:
        """Return an error that names each piece that drifted, with its ranks by what they hold.

        A fault spreads, because later gradients are computed with other weights. Where it began, it
        is isolated, so pieces that differ on the fewest ranks come first.
        If no two ranks differ after all, the reduction that said so was wrong.
        Comm: see `check`.
        """
        found, titles = [], {"master": "weights", **self.worker.optimizer.kinds}
        facts = all_gather_objects(self.worker.mpi_world, [mine.get(piece) for piece in drifted])
        for (kind, name, shard), *held in zip(drifted, *facts, strict=True):
            parts = sorted(
                (
                    [rank for rank, one in enumerate(held) if one == checksum]
                    for checksum in {*held} - {None}
                ),
                key=lambda ranks: (len(ranks), ranks),
            )
            sides = " unlike ".join(f"rank{'s' * (len(one) > 1)} {ranges(one)}" for one in parts)
            cut = f" (shard {shard})" if (kind, name, 1) in self.places else ""
            what = f"{titles[kind.split('.')[0]]} of {name}{cut}"
            if len(parts) > 1:
                found.append((len(parts[0]), f"{what}: {sides}"))
        if not found:
            return EnvironmentProblem(NO_DRIFT)
        lines = [line for _, line in sorted(found, key=itemgetter(0))]
        more = [f"and {len(lines) - SHOWN} others"] if len(lines) > SHOWN else []
        return DriftError([f"step {step}: {DRIFT}", *lines[:SHOWN], *more])
