"""Replays the script of a rank on a real network: the step of a training run, without its model.

Payloads show whether an operation delivered the right data to the right rank. A number identifies
its sender, its receiver, and the call of the group. All are small and whole, so that their sums are
exact in every type.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from bench.rehearse.first_ranks import ABSENT, FirstRanks, group_of
from bench.rehearse.script import CALL, LOOK, SPAN, WAIT, Call, Script, script_of
from mpipar import models
from mpipar.comm.grid import Grid, consecutive_slices
from mpipar.comm.group import Comm
from mpipar.comm.record import Record, Recorder, Tally, as_record
from mpipar.train import build

ALIGNED = 16  # numbers between two places of an arena

BLOCKING: Mapping[str, Callable[[Comm, Any, Call], Any]] = {
    "all_reduce": lambda comm, x, call: comm.all_reduce(x, call.record.name, call.argument),
    "all_gather": lambda comm, x, call: comm.all_gather(x, call.record.name),
    "reduce_scatter": lambda comm, x, call: comm.reduce_scatter(x, call.record.name),
    "all_to_all": lambda comm, x, call: comm.all_to_all(x, call.record.name),
    "all_to_allv": lambda comm, x, call: comm.all_to_allv(
        x, call.argument[0], call.record.name, call.argument[1]
    ),
    "broadcast": lambda comm, x, call: comm.broadcast(x, call.record.peer, call.record.name),
    "reduce": lambda comm, x, call: comm.reduce(x, call.record.peer, call.record.name),
}
POSTED: Mapping[str, Callable[[Comm, Any, Call], Any]] = {
    "all_reduce": lambda comm, x, call: comm.iall_reduce(x, call.record.name),
    "all_gather": lambda comm, x, call: comm.iall_gather(x, call.record.name),
    "reduce_scatter": lambda comm, x, call: comm.ireduce_scatter(x, call.record.name),
    "send": lambda comm, x, call: comm.isend(
        x, call.record.peer, call.record.tag, call.record.name
    ),
    "recv": lambda comm, x, call: comm.irecv(
        x, call.record.peer, call.record.tag, call.record.name
    ),
}


class Form(NamedTuple):
    """The form of an array. axis: the group whose memory contains it, or ""."""

    axis: str
    dtype: Any
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


def lay_out(script: Script) -> tuple[list[Form], list[int]]:
    """Return (the arrays of a step, the number of that of each call).

    When a call is done, its array is free for another one of the same form.
    """
    free: dict[Form, list[int]] = {}
    forms: list[Form] = []
    chosen: list[int] = []
    for event in script.events:
        if event.action not in (CALL, WAIT):
            continue
        call = script.calls[event.number]
        own = call.record.axis if call.posted and call.record.tag < 0 else ""
        form = Form(own, call.record.dtype, call.shape)
        if event.action == CALL:
            if not free.setdefault(form, []):
                forms.append(form)
                free[form].append(len(forms) - 1)
            chosen.append(free[form].pop())
        if event.action == WAIT or not call.posted:
            free[form].append(chosen[event.number])
    return forms, chosen


def room_needed(script: Script) -> int:
    """Return the bytes of all arrays of a step."""
    return sum(form.size * np.dtype(form.dtype).itemsize for form in lay_out(script)[0])


class Steps(NamedTuple):
    """seconds, records: of each step that a rank has played."""

    seconds: list[float]
    records: list[list[Record]]


class Placed(Recorder):
    """A recorder that knows where in the sources of training each call is made."""

    def __init__(self) -> None:
        super().__init__(None)
        self.call: Call | None = None  # the current one

    def tally(self, axis, group_size, dtype, operation, name, frame) -> Tally:
        """Return the tally of the current call, whoever makes it here."""
        assert self.call is not None
        record = self.call.record
        line = (operation, name, axis, group_size, dtype, self.phase, record.site, record.cut)
        if line not in self.tallies:
            self.tallies[line] = Tally(*line[:6], found=(record.site, record.cut))
        return self.tallies[line]


class Player:
    """One rank of a rehearsal. It has what a Tracer asks of a Worker.

    seconds: of computing before each event of the script, or None. sleeps: whether a rank that
    would compute sleeps; otherwise it keeps its core busy. wrong: what the check of payloads found.
    grid: this rank's place, which may be one of the first ranks of a larger layout.
    Comm: makes the groups of the layout; every rank of `world` must make its own.
    """

    def __init__(
        self,
        config: Any,
        world: Any,
        ops: Any,
        script: Script | None = None,
        grid: Grid | None = None,
    ):
        self.config, self.world, self.ops = config, world, ops
        self.script = script_of(config, world.rank) if script is None else script
        self.grid = build.with_shared_heads(grid or Grid.of(config.grid, world.rank), config.model)
        self.schedule = build.configured_schedule(config.grid)
        self.stage_layers = models.layer_split(config, self.schedule)
        self.stages = self.schedule.stages_by_rank[self.grid.place("pp")]
        self.recorder = Placed()
        self.comms = build.groups_of(config, self.grid, self.schedule, ops, self.recorder, world)
        if isinstance(self.grid, FirstRanks):
            self.comms.groups[ABSENT] = group_of(self.comms, world)
        self.seconds: Sequence[float] | None = None
        self.sleeps, self.wrong = False, ""
        self.arrays = self.make_arrays(*lay_out(self.script))

    def settle(self) -> None:
        """Wait for the device."""
        self.ops.synchronize()

    def close(self) -> None:
        """Free the groups. Comm: every rank must call it."""
        self.comms.close()

    def comm(self, call: Call) -> Comm:
        """Return the group of a call."""
        return self.comms.groups[call.record.axis]

    def make_arrays(self, forms: list[Form], chosen: list[int]) -> list[Any]:
        """Return the array of each call. Posted sums and gathers use arenas of their groups, as
        gradients do. Comm: that of `Comm.zeros`, group by group.
        """
        arrays: list[Any] = [None] * len(forms)
        for axis, kind in sorted({(form.axis, str(form.dtype)) for form in forms}):
            numbers = [
                number
                for number, form in enumerate(forms)
                if (form.axis, str(form.dtype)) == (axis, kind)
            ]
            sizes = [-(-forms[number].size // ALIGNED) * ALIGNED for number in numbers]
            shape, dtype = (sum(sizes),), forms[numbers[0]].dtype
            arena = (
                self.comms.groups[axis].zeros(self.ops, shape, dtype, "buffers")
                if axis
                else self.ops.zeros(shape, dtype, label="buffers")
            )
            for number, run in zip(numbers, consecutive_slices(sizes), strict=True):
                form = forms[number]
                arrays[number] = arena[run][: form.size].reshape(form.shape)
        return [arrays[number] for number in chosen]

    def check(self) -> str:
        """Play a step whose payloads are checked; return what was wrong on this rank, or "".

        Afterwards all payloads are zero, so that no sum grows. Comm: that of a step.
        """
        self.wrong = ""
        self.play(0, checked=True)
        for x in self.arrays:
            x[...] = 0
        self.recorder.clear()
        return self.wrong

    def play(self, step: int, checked: bool = False) -> None:
        """Play one step. Comm: all that the script says."""
        recorder, calls, passes = self.recorder, self.script.calls, self.script.passes
        recorder.step = step
        under_way: dict[int, Any] = {}  # by number; what the step tests meanwhile
        pending: dict[int, Any] = {}
        starts = []
        for place, (_, action, number) in enumerate(self.script.events):
            starts.append(perf_counter_ns())
            if self.seconds is not None and self.seconds[place] and not checked:
                self.compute(self.seconds[place])
            if action == CALL:
                made = self.begin(calls[number], self.arrays[number], checked)
                if calls[number].posted:
                    pending[number] = made
                    if calls[number].looked:
                        under_way[number] = made
            elif action == WAIT:
                under_way.pop(number, None)
                pending.pop(number).wait()
                if checked:
                    self.look_at(calls[number], self.arrays[number], None)
            elif action == LOOK:
                for other in [other for other, one in under_way.items() if one.test()]:
                    del under_way[other]
            else:
                assert action == SPAN, action
                one = passes[number]
                recorder.span(one.kind, starts[one.first], one.stage, one.mb)
        assert not pending, [calls[number].record.name for number in pending]

    def begin(self, call: Call, x: Any, checked: bool) -> Any:
        """Make a call; return its result, or what is pending."""
        record, recorder, comm = call.record, self.recorder, self.comm(call)
        recorder.call = call
        if checked:
            fill(x, call, place_of(call, comm.index, comm.size))
        with recorder.at(record.phase, record.stage, record.mb):
            made = (POSTED if call.posted else BLOCKING)[record.operation](comm, x, call)
        if checked and not call.posted:
            self.look_at(call, x, made)
        return made

    def look_at(self, call: Call, x: Any, result: Any) -> None:
        """Compare what a call delivered with what it should; keep the first difference."""
        comm = self.comm(call)
        self.settle()
        self.wrong = self.wrong or problem(x, result, call, place_of(call, comm.index, comm.size))

    def compute(self, seconds: float) -> None:
        """Spend the time of computing."""
        if self.sleeps:
            time.sleep(seconds)
            return
        end = perf_counter_ns() + int(seconds * 1e9)
        while perf_counter_ns() < end:
            pass

    def steps(
        self, count: int, seconds: float = 0.0, around: Callable[[int], Any] = nullcontext
    ) -> Steps:
        """Play `count` steps or more, for some seconds.

        around(step): the context in which a step is played. Comm: a broadcast, a barrier, a step.
        """
        times, records, end = [], [], time.perf_counter() + seconds
        going = np.ones(1, np.int64)
        while True:
            going[0] = len(times) < count or time.perf_counter() < end
            self.world.Bcast(going, 0)
            if not going[0]:
                return Steps(times, records)
            self.world.Barrier()
            start = time.perf_counter()
            with around(len(times) + 1):
                self.play(len(times) + 1)
            times.append(time.perf_counter() - start)
            made = map(as_record, self.recorder.entries)
            records.append([record for record in made if record.step == len(times)])
            if around is nullcontext:
                self.recorder.clear()


SENDERS, RECEIVERS, RANGE = 7, 3, 61  # pairwise coprime
POISON = 99  # a value that no rank sends


class Place(NamedTuple):
    """The place of a call: this rank's place in its group, the group's size, the call's number."""

    index: int
    size: int
    number: int

    def value(self, sender: int, receiver: int = 0) -> int:
        """Return what `sender` sends to `receiver`."""
        return 1 + (SENDERS * sender + RECEIVERS * receiver + self.number) % RANGE

    def summed(self, receiver: int = 0) -> int:
        """Return the sum of what all send to `receiver`."""
        return sum(self.value(sender, receiver) for sender in range(self.size))


def place_of(call: Call, index: int, size: int) -> Place:
    """Return the place of a call. All members make the same collectives; a message has a tag."""
    record = call.record
    return Place(index, size, record.tag if record.tag >= 0 else record.seq)


class Payload(NamedTuple):
    """What an operation delivers.

    given: yields (part, value) that this rank gives. wanted: (part, value) after the call; result:
    what it returned. A posted call leaves its result in x.
    """

    given: Callable[[Any, Call, Place], Any]
    wanted: Callable[[Any, Any, Call, Place], Any]


def to_all(parts: Any, place: Place) -> list[tuple[Any, int]]:
    """Return the part for each rank, and what it holds."""
    return [(part, place.value(place.index, receiver)) for receiver, part in enumerate(parts)]


def from_all(parts: Any, place: Place, receiver: int = 0) -> list[tuple[Any, int]]:
    """Return the part of each rank, and what it holds."""
    return [(part, place.value(sender, receiver)) for sender, part in enumerate(parts)]


def own(x: Any, call: Call, place: Place) -> list[tuple[Any, int]]:
    """Return the same number for all ranks."""
    return [(x, place.value(place.index))]


PAYLOADS = {
    "all_reduce": Payload(
        own,
        lambda x, result, call, place: [
            (
                x,
                max(map(place.value, range(place.size)))
                if call.argument == "max"
                else place.summed(),
            )
        ],
    ),
    "reduce": Payload(
        own,
        lambda x, result, call, place: [(x, place.summed())] * (call.record.peer == place.index),
    ),
    "broadcast": Payload(
        lambda x, call, place: own(x, call, place) * (call.record.peer == place.index),
        lambda x, result, call, place: [(x, place.value(call.record.peer))],
    ),
    "all_gather": Payload(
        lambda x, call, place: own(x[place.index] if call.posted else x, call, place),
        lambda x, result, call, place: from_all(x if call.posted else result, place),
    ),
    "reduce_scatter": Payload(
        lambda x, call, place: to_all(x, place),
        lambda x, result, call, place: [
            (x[0] if call.posted else result, place.summed(place.index))
        ],
    ),
    "all_to_all": Payload(
        lambda x, call, place: to_all(x, place),
        lambda x, result, call, place: from_all(result, place, place.index),
    ),
    "all_to_allv": Payload(
        lambda x, call, place: to_all(rows_of(x, call.argument[0]), place),
        lambda x, result, call, place: from_all(rows_of(*result), place, place.index),
    ),
    "send": Payload(
        lambda x, call, place: [(x, place.value(place.index, call.record.peer))],
        lambda x, result, call, place: [],
    ),
    "recv": Payload(
        lambda x, call, place: [],
        lambda x, result, call, place: [(x, place.value(call.record.peer, place.index))],
    ),
}


def fill(x: Any, call: Call, place: Place) -> None:
    """Write what this rank gives to a call."""
    x[...] = POISON
    for part, value in PAYLOADS[call.record.operation].given(x, call, place):
        part[...] = value


def rows_of(x: Any, counts: Any) -> list[Any]:
    """Return the rows of each rank, one after the other."""
    return [x[first:last] for first, last in pairwise(accumulate(counts, initial=0))]


def problem(x: Any, result: Any, call: Call, place: Place) -> str:
    """Return what is wrong after a call, or "". x: what was given. result: what was returned."""
    for part, value in PAYLOADS[call.record.operation].wanted(x, result, call, place):
        if not bool((part == np.asarray(value).astype(part.dtype)).all()):
            found = part.reshape(-1)[:1].tolist()
            return f"{call.record.name}: {call.record.operation} delivered {found}, not {value}"
    return ""
