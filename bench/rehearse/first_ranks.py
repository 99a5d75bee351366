"""The first ranks of a larger layout: each makes its own calls, while most peers are absent.

A collective runs over the members that are present, each of which sends as much to each of them as
in the whole group. A message from or to an absent rank is exchanged with its *stand-in*, rank (peer
mod N) of the N ranks that are present. A stand-in posts its side of all these messages when the
step begins, and waits for them when it ends, so that no rank waits for what an absent one would
compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from bench.rehearse.script import CALL, WAIT, Call, Event, Script
from mpipar.comm.connect import connect
from mpipar.comm.facts import all_gather_facts
from mpipar.comm.grid import Grid
from mpipar.comm.group import Comm
from mpipar.comm.groups import Comms
from mpipar.comm.record import POINT_TO_POINT, Record
from mpipar.config.sections import Config
from mpipar.files.text import counted
from mpipar.train.build import with_shared_heads

ABSENT = "absent"  # the group of messages that absent ranks would send or receive
STAND_IN = "/stand-in"  # appended to the names of its messages
OTHER_SIDE = {"send": "recv", "recv": "send"}
BY_PARTS = ("reduce_scatter", "all_to_all")  # of an array with a part for each rank of the group


@dataclass(frozen=True)
class FirstRanks(Grid):
    """The place of a rank in a layout of which only the first `present` ranks exist."""

    present: int = 0

    @classmethod
    def here(cls, config: Config, world: Any) -> FirstRanks:
        """Return the place of this rank of `world` in the layout of a resolved config."""
        return replace(cls.of(config.grid, world.rank), present=world.size)

    @property
    def world_size(self) -> int:
        return self.present or super().world_size

    def group(self, *groups: str) -> tuple[int, ...]:
        """Return the present members of a group; see `Grid.group`."""
        return self._there(super().group(*groups))

    def partition(self, axis: str, groups: Iterable[Iterable[int]]) -> list[tuple[int, ...]]:
        """Return the present members of each group; see `Grid.partition`."""
        return [found for ranks in super().partition(axis, groups) if (found := self._there(ranks))]

    def _there(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if rank < self.world_size)


def with_stand_ins(script: Script, world: Any) -> Script:
    """Return the script of a rank of `world` with stand-ins for absent peers, some of which it
    plays.

    Comm: an all-gather of facts.
    """
    calls, asked = [], []
    for call in script.calls:
        ranks = script.groups[call.record.axis]
        if call.record.operation not in POINT_TO_POINT:
            calls.append(among_present(call, ranks, world))
            continue
        peer = ranks[call.record.peer]
        place = [rank for rank in ranks if rank < world.size]
        if peer < world.size:
            calls.append(call._replace(record=call.record._replace(peer=place.index(peer))))
            continue
        record = call.record._replace(
            axis=ABSENT,
            peer=peer % world.size,
            tag=(2 * len(asked) + (call.record.operation == "recv")),
        )  # directions share no tag
        calls.append(call._replace(record=record))
        asked.append((record._replace(dtype=str(record.dtype)), call.shape))
    mine = [
        Call(mirrored(Record(*record), world_rank), tuple(shape), True, False, None)
        for world_rank, messages in enumerate(all_gather_facts(world, asked))
        for record, shape in messages
        if Record(*record).peer == world.rank
    ]
    here = len(mine)
    events = [Event(0, CALL, number) for number in range(here)]
    events += [
        event._replace(number=event.number + here) if event.action in (CALL, WAIT) else event
        for event in script.events
    ]
    events += [Event(0, WAIT, number) for number in range(here)]
    groups = {
        axis: tuple(rank for rank in ranks if rank < world.size)
        for axis, ranks in script.groups.items()
    }
    return script._replace(
        calls=(*mine, *calls),
        events=tuple(events),
        groups=groups,
        passes=tuple(one._replace(first=one.first + here) for one in script.passes),
    )


def among_present(call: Call, ranks: tuple[int, ...], world: Any) -> Call:
    """Return a collective of the members `ranks` as one of the present members.

    A root that is absent is replaced by the first member.
    """
    places = [place for place, rank in enumerate(ranks) if rank < world.size]
    record, shape, argument = call.record, call.shape, call.argument
    if record.peer >= 0:
        record = record._replace(peer=places.index(record.peer) if record.peer in places else 0)
    if record.operation in BY_PARTS or (record.operation == "all_gather" and call.posted):
        shape = (len(places), *shape[1:])
    elif record.operation == "all_to_allv":
        argument = tuple([counts[place] for place in places] for counts in argument)
        shape = (sum(argument[0]), *shape[1:])
    return call._replace(record=record, shape=shape, argument=argument)


def mirrored(record: Record, world_rank: int) -> Record:
    """Return the record of a stand-in for a message of `world_rank`, whose record is given."""
    return record._replace(
        operation=OTHER_SIDE[record.operation],
        peer=world_rank,
        name=record.name + STAND_IN,
        phase="sync",
        stage=-1,
        mb=-1,
    )


def group_of(comms: Comms, world: Any) -> Comm:
    """Return the group of messages of absent ranks. Comm: a split over the world."""
    ranks = tuple(range(world.size))
    wire = connect(comms.ops, world, ranks, comms.options._replace(all_reduce="mpi"))
    return Comm(ABSENT, ranks, world.rank, wire, comms.recorder)


def described(config: Config, script: Script, rows: Iterable[dict], world: Any) -> str:
    """Describe which part of a layout is present. script: of rank 0; rows: those that are shown."""
    whole = with_shared_heads(Grid.of(config.grid, 0), config.model)
    here = FirstRanks.here(config, world)
    groups = ", ".join(
        f"{len(script.groups[axis])} of {whole.size(axis)} in {axis}"
        for axis in script.groups
        if axis in whole.parts and whole.size(axis) > 1
    )
    messages = sum(
        row["calls"]
        for row in rows
        if row["axis"] == ABSENT and not row["barrier"].endswith(STAND_IN)
    )
    return (
        f"the first {here.world_size} of {whole.world_size} ranks; of the members of rank 0's"
        f" groups these are here: {groups}. A step has {counted(messages, 'message')} with"
        f" absent peers, for which rank (peer mod {world.size}) stands in"
    )
