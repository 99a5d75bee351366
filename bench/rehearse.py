"""A training step without its model: its messages and collectives, in order, on your own network.

    mpiexec -n 4 python -m bench.rehearse llama-8b --layout pp=2,tp=2 --schedule zb-h1

The first word is a preset; flags that this program does not know are those of `mpipar explain`.
Each rank runs the real worker on shapes, and notes what it sends, waits for and tests, in order. It
then plays that on the real wires, in the groups and phases of training. There are no weights, and
computing takes no time. In the first step, which is not timed, every payload is checked.

Columns: calls and bytes of a step, summed over ranks. predicted_ms: of a rank's calls by the links
of --machine, without waiting for late ranks. played_ms: how long a rank was blocked, mean over
ranks and steps; most_ms: of the rank with the most.
"""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from bench.program import Outcome, Program
from bench.training import config_of
from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.group import Comm
from mpipar.comm.objects import all_gather_objects, gather_objects
from mpipar.comm.record import Record, family
from mpipar.comm.recorder import Recorder, as_record
from mpipar.comm.transport import Counts, Exchanged, Request, ShapesTransport
from mpipar.config.text import counted
from mpipar.errors import EXIT_CHECK_FAILED, EXIT_OK, UsageError
from mpipar.interconnect.hosts import check_room, free_bytes
from mpipar.ops.signature import Array
from mpipar.run.console.tables import layout_text
from mpipar.run.data import rows
from mpipar.study.explain.predict import worker_on_shapes
from mpipar.study.plan.machine import Machine, load_machine
from mpipar.train import build

WARM_UP, CALL, WAIT, LOOK = 2, "call", "wait", "look"  # steps; what happens in a script


class Call(NamedTuple):
    """An operation of a `Comm`. shape: of the array that it is given.

    posted: whether the rank continues, and waits later. argument: the `op` of an all_reduce; the
    counts of an all_to_allv, those sent and those received.
    """

    record: Record
    shape: tuple[int, ...]
    posted: bool
    argument: Any


class Script(NamedTuple):
    """One training step of one rank. events: (CALL, WAIT or LOOK, number of the call)."""

    calls: list[Call]
    events: list[tuple[str, int]]


class Notes(Recorder):
    """A recorder that also notes when each operation begins, is tested and is waited for."""

    def __init__(self) -> None:
        super().__init__(None)
        self.events: list[tuple[str, int]] = []
        self.given: list[tuple[Any, ...]] = []  # what each call gets: see `Call`

    def call(self, shape: tuple[int, ...], posted: bool = False, argument: Any = None) -> int:
        """Note an operation, whose record is the newest; return its number."""
        self.given.append((shape, posted, argument))
        self.events.append((CALL, len(self.given) - 1))
        return len(self.given) - 1


class Noted:
    """The request of an operation that completes when it is waited for, not earlier."""

    def __init__(self, notes: Notes, number: int):
        self.notes, self.number = notes, number

    def Test(self) -> bool:
        self.notes.events.append((LOOK, self.number))
        return False

    def Wait(self) -> None:
        self.notes.events.append((WAIT, self.number))


class Listening(ShapesTransport):
    """A transport that sends nothing and notes each call."""

    def __init__(self, ops: Any, notes: Notes):
        super().__init__(ops)
        self.notes = notes

    def _posted(self, x: Array, *_: Any) -> Request:
        return Noted(self.notes, self.notes.call(x.shape, posted=True))

    iall_reduce = iall_gather = ireduce_scatter = isend = irecv = _posted

    def _blocking(self, x: Array, *_: Any) -> None:
        self.notes.call(x.shape)

    broadcast = reduce = _blocking

    def all_reduce(self, x: Array, op: str) -> None:
        self.notes.call(x.shape, argument=op)

    def all_gather(self, x: Array, group_size: int) -> Array:
        self.notes.call(x.shape)
        return super().all_gather(x, group_size)

    def reduce_scatter(self, x: Array) -> Array:
        self.notes.call(x.shape)
        return super().reduce_scatter(x)

    def all_to_all(self, x: Array) -> Array:
        self.notes.call(x.shape)
        return super().all_to_all(x)

    def all_to_allv(self, x: Array, counts: Counts, received: Counts | None) -> Exchanged:
        self.notes.call(x.shape, argument=(counts, received))
        return super().all_to_allv(x, counts, received)


def script_of(config: Any, world_rank: int) -> Script:
    """Return the script of a rank in the layout of a resolved config."""
    notes = Notes()
    worker = worker_on_shapes(config, world_rank, notes)
    for comm in worker.comms.groups.values():
        if comm.size > 1:
            comm.transport = Listening(worker.ops, notes)
    worker.train_step(1, lambda mb: rows.blank_batch(worker.ops, config))
    records = zip(notes.records, notes.given, strict=True)
    return Script([Call(record, *given) for record, given in records], notes.events)


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


def lay_out(script: Script) -> tuple[list[tuple[Any, ...]], list[int]]:
    """Return (dtype and shape of each array of a step, the number of that of each call).

    When a call is done, its array is free for another one of the same form.
    """
    free: dict[Any, list[int]] = defaultdict(list)
    forms, chosen = list[tuple[Any, ...]](), list[int]()
    for action, number in script.events:
        call = script.calls[number]
        form = call.record.dtype, call.shape
        if action == CALL:
            if not free[form]:
                forms.append(form)
                free[form].append(len(forms) - 1)
            chosen.append(free[form].pop())
        if action == WAIT or (action == CALL and not call.posted):
            free[form].append(chosen[number])
    return forms, chosen


class Player:
    """One rank of a rehearsal. wrong: what the check of payloads has found, or "".

    Comm: makes the groups of the layout; every rank of `world` must make its own.
    """

    def __init__(self, config: Any, world: Any, ops: Any, script: Script):
        self.world, self.ops, self.script, self.wrong = world, ops, script, ""
        grid = build.with_shared_heads(Grid.of(config.grid, world.rank), config.model)
        self.recorder = Recorder(None)
        self.comms = build.groups_of(
            config, grid, build.configured_schedule(config.grid), ops, self.recorder, world
        )
        forms, chosen = lay_out(script)
        arrays = [ops.zeros(shape, dtype, label="buffers") for dtype, shape in forms]
        self.arrays = [arrays[number] for number in chosen]

    def check(self) -> str:
        """Play a step whose payloads are checked; return what was wrong on this rank, or "".

        Afterwards all payloads are zero, so that no sum grows. Comm: that of a step.
        """
        self.play(checked=True)
        for x in self.arrays:
            x[...] = 0
        self.recorder.clear()
        return self.wrong

    def play(self, checked: bool = False) -> None:
        """Play one step. Comm: all that the script says."""
        calls, pending = self.script.calls, dict[int, Any]()
        for action, number in self.script.events:
            if action == CALL:
                made = self.begin(calls[number], self.arrays[number], checked)
                if calls[number].posted:
                    pending[number] = made
            elif action == WAIT:
                pending.pop(number).wait()
                if checked:
                    self.look_at(calls[number], self.arrays[number], None)
            else:
                pending[number].test()
        assert not pending, [calls[number].record.name for number in pending]

    def begin(self, call: Call, x: Any, checked: bool) -> Any:
        """Make a call; return its result, or what is pending."""
        record, comm = call.record, self.comms.groups[call.record.axis]
        if checked:
            fill(x, call, place_of(call, comm.group_rank, comm.size))
        with self.recorder.at(record.phase, record.stage, record.mb):
            made = (POSTED if call.posted else BLOCKING)[record.operation](comm, x, call)
        if checked and not call.posted:
            self.look_at(call, x, made)
        return made

    def look_at(self, call: Call, x: Any, result: Any) -> None:
        """Compare what a call delivered with what it should; keep the first difference."""
        comm = self.comms.groups[call.record.axis]
        self.ops.synchronize()
        self.wrong = self.wrong or problem(
            x, result, call, place_of(call, comm.group_rank, comm.size)
        )

    def steps(self, count: int) -> tuple[list[float], dict[Any, list[float]]]:
        """Return (seconds of each step, {barrier: calls, bytes, blocked ns of a step}).

        A barrier: axis, name, operation, phase. Comm: a barrier and a step for each.
        """
        times, sums = list[float](), defaultdict[Any, list[float]](lambda: [0.0] * 3)
        for _ in range(count):
            self.world.Barrier()
            start = time.perf_counter()
            self.play()
            times.append(time.perf_counter() - start)
            for record in map(as_record, self.recorder.entries):
                values = 1, record.payload_bytes, record.done_ns - record.waited_ns
                for k, value in enumerate(values):
                    sums[barrier_of(record)][k] += value / count
            self.recorder.clear()
        return times, dict(sums)

    def predicted(self, machine: Machine) -> dict[Any, float]:
        """Return {barrier: ms of this rank's calls by the links of a machine}."""
        found: dict[Any, float] = defaultdict(float)
        for record in (call.record for call in self.script.calls):
            ranks = self.comms.groups[record.axis].ranks
            seconds = seconds_of(machine, record, len(ranks), ranks[1] - ranks[0])
            found[barrier_of(record)] += 1e3 * seconds
        return dict(found)


def barrier_of(record: Record) -> tuple[str, ...]:
    """Return what the calls of one barrier have in common."""
    return record.axis, family(record.name), record.operation, record.phase


def seconds_of(machine: Machine, record: Record, ranks: int, stride: int) -> float:
    """Return the seconds of an operation by a machine's links. A send leaves without waiting."""
    nbytes = record.payload_bytes
    if record.tag >= 0:
        return machine.message(nbytes, stride) * (record.operation == "recv")
    if record.operation.startswith("all_to_all"):
        return machine.all_to_all(nbytes, ranks, stride)
    sums = record.operation == "all_reduce"
    return (machine.all_reduce if sums else machine.all_gather)(nbytes, ranks, stride)


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
    return Place(index, size, call.record.tag if call.record.tag >= 0 else call.record.seq)


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


def configured(args: Any, num_ranks: int) -> Any:
    """Return the resolved config of the words, for this many ranks. Raises UsageError."""
    config = config_of(["--preset", args.preset, *args.words])
    needed = Grid.of(config.grid, 0).world_size
    if needed != num_ranks or needed == 1:
        raise UsageError(
            f"{layout_text(config.grid)} ({counted(needed, 'rank')}): this job has"
            f" {counted(num_ranks, 'rank')}; start mpiexec -n {max(2, needed)}, with two ranks or"
            " more in the layout"
        )
    return config


def room_needed(script: Script) -> int:
    """Return the bytes of all arrays of a step."""
    return sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in lay_out(script)[0])


def measure(args: Any, session: Any) -> Outcome | int:
    """Check the payloads, play, and report what it took."""
    world = session.world
    config = session.agree(lambda: configured(args, world.size))
    machine = session.agree(lambda: load_machine(args.machine))
    ops = session.agree(lambda: ops_module.make_for(config.run, session.host_rank))
    script = session.agree(lambda: script_of(config, world.rank))
    session.agree(lambda: check_room(room_needed(script), len(session.host_ranks), free_bytes()))
    player = Player(config, world, ops, script)
    if wrong := [text for text in all_gather_objects(world, player.check()) if text]:
        if world.rank == 0:
            print("\n".join(wrong))
        return EXIT_CHECK_FAILED
    player.steps(WARM_UP)
    times, sums = player.steps(args.steps)
    own = [[key, [*sums[key], ms]] for key, ms in player.predicted(machine).items()]
    facts = gather_objects(world, [times, own])
    player.comms.close()
    if facts is None:
        return EXIT_OK
    steps = sorted(max(at) * 1e3 for at in zip(*(times for times, _ in facts), strict=True))
    grid, middle = config.grid, statistics.median(steps)
    about = {"ranks": world.size, "steps": args.steps, "step_ms": middle, "sheet": machine.name}
    return Outcome(
        barrier_rows([own for _, own in facts]),
        about,
        head=(
            f"{' '.join([args.preset, *args.words])}: {counted(world.size, 'rank')},"
            f" {grid.schedule}, {counted(grid.num_microbatches, 'microbatch')};"
            " every payload as it should be\n"
            f"a step takes {middle:.2f} ms ({steps[0]:.2f} to {steps[-1]:.2f},"
            f" {counted(len(steps), 'step')}), computing no time\n"
        ),
    )


def barrier_rows(by_rank: list[list[Any]]) -> list[dict[str, Any]]:
    """Return a row for each barrier: what was predicted, and what was played."""
    found = defaultdict[Any, list[Any]](list)
    for own in by_rank:
        for key, values in own:
            found[tuple(key)].append(values)
    rows = []
    for key, ranks in sorted(found.items()):
        calls, sent, blocked, predicted = zip(*ranks, strict=True)
        rows.append(
            dict(zip(("axis", "barrier", "operation", "phase"), key, strict=True))
            | {
                "calls": round(sum(calls)),
                "bytes": round(sum(sent)),
                "predicted_ms": sum(predicted) / len(ranks),
                "played_ms": sum(blocked) / len(ranks) * 1e-6,
                "most_ms": max(blocked) * 1e-6,
            }
        )
    return rows


def add_flags(parser: Any) -> None:
    """Add the flags that `mpipar explain` does not have."""
    parser.add_argument("preset", metavar="PRESET", help="the model, as --preset of training")
    parser.add_argument("--machine", default="cpu", help="sheet of the predicted links (cpu)")


main = Program(
    "rehearse",
    __doc__,
    measure,
    together=True,
    add=add_flags,
    counts={"--steps": (20, "timed steps")},
    takes_words=True,
).started(__name__)
