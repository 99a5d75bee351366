"""Validates a trace's files: types, ranges and counts, before anything is computed from them.

A trace may come from anywhere. Each function raises a ValueError that says what is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from mpipar.comm.grid import AXES
from mpipar.comm.record import Record, Span
from mpipar.config.model import ModelConfig
from mpipar.config.sections import FIELDS
from mpipar.config.setting import value_problem
from mpipar.errors import UserError
from mpipar.files.text import shown
from mpipar.files.typed import built
from mpipar.pipeline.check import check
from mpipar.pipeline.csv_format import parse_instruction
from mpipar.pipeline.instructions import Schedule
from mpipar.pipeline.placements import PLACEMENTS
from mpipar.pipeline.schedules.catalog import MOST_PASSES
from mpipar.trace.clock import Sample


class LayerOperation(NamedTuple):
    """An operation of a layer, recorded only on request (ops/timed_ops.py)."""

    layer: str
    function: str
    start_ns: int
    end_ns: int
    step: int
    stage: int
    mb: int
    phase: str


class Load(NamedTuple):
    """Rows that a rank's experts get in a forward pass. first: the number of its first expert."""

    layer: str
    first: int
    step: int
    stage: int
    mb: int
    rows: list[int]


MOST_RANKS = 1 << 17
LATEST = 1 << 62  # ns; differences of times still fit into 64 bits
# By the letter that begins a line after the head: what the line holds, and the types of its values.
# `site` and `cut` of a record are indices into the head's list of sites.
LINES = {
    "r": (
        Record,
        (int, int, int, str, str, str, int, int, int, int, int, str, int, int, int, str, int, int),
    ),
    "s": (Span, (str, int, int, int, int, int)),
    "o": (LayerOperation, (str, str, int, int, int, int, int, str)),
    "e": (Load, (str, int, int, int, int, list)),
}


@dataclass
class RankTrace:
    """What one rank did. Times are nanoseconds of the common clock since the trace began.

    place: {axis: coordinate}. groups: {axis: world ranks}. steps: [(step, start, end)]. cores: the
    cores of its host that it may run on. core_wait_ns: how long it was ready to run but had no
    core. complete: false if it failed in the last step. recording: the same text in all files that
    one run wrote of the same steps. sites, lines: of its file, the places in
    the source and the number of lines after the head.
    """

    recording: str
    world_rank: int
    host: str
    place: dict[str, int]
    stages: tuple[int, ...]
    groups: dict[str, tuple[int, ...]]
    steps: tuple[tuple[int, int, int], ...]
    records: list[Record] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    operations: list[LayerOperation] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    complete: bool = True
    cores: tuple[int, ...] = ()
    core_wait_ns: int = 0
    sites: tuple[str, ...] = ()
    lines: int = 0

    @property
    def start(self) -> int:
        return self.steps[0][1]

    @property
    def end(self) -> int:
        return self.steps[-1][2]

    def by_letter(self) -> dict[str, list]:
        """Return the lists that the lines of its file fill: see LINES."""
        return {"r": self.records, "s": self.spans, "o": self.operations, "e": self.loads}


@dataclass(frozen=True)
class ScheduleFacts:
    """The entry `schedule` of meta.json."""

    name: str
    pp_size: int
    num_stages: int
    num_microbatches: int
    placement: str
    wired: bool
    programs: tuple[tuple[str, ...], ...]

    def schedule(self) -> Schedule:
        """Return the proved schedule; raises ValueError."""
        instrs = tuple(tuple(map(parse_instruction, program)) for program in self.programs)
        if (
            self.placement not in PLACEMENTS
            or len(instrs) != self.pp_size
            or not all(all(program) for program in instrs)
        ):
            raise ValueError("schedule: not one for this pipeline")
        if min(self.num_stages, self.num_microbatches) < 1 or (
            self.num_stages * self.num_microbatches > MOST_PASSES
        ):
            raise ValueError(f"schedule: must have 1 to {MOST_PASSES:,} forward passes")
        made = Schedule(**vars(self) | {"programs": instrs})
        try:
            check(made)
        except (UserError, LookupError, ArithmeticError) as error:
            raise ValueError(f"schedule: cannot run: {shown(str(error))}") from None
        return made


@dataclass(frozen=True)
class ClockFacts:
    """The entry `clock` of meta.json."""

    owners: tuple[int, ...]
    before: dict[str, Sample]
    after: dict[str, Sample]


@dataclass(frozen=True)
class Meta:
    """The part of meta.json that is read, besides the model."""

    recording: str
    world_size: int
    rank_order: tuple[str, ...]
    layout: dict[str, int]
    schedule: ScheduleFacts
    stages: tuple[str, ...]
    stage_layers: tuple[int, ...]
    batch_size: int
    dtype: str
    clock: ClockFacts


def entries(kind, value: dict):
    """Return the entries of a JSON object that a dataclass has, as that dataclass."""
    names = kind.__dataclass_fields__
    return built(kind, {name: value[name] for name in names if name in value}, "it")


def check_meta(value: dict) -> Schedule:
    """Check meta.json; return its schedule."""
    meta = entries(Meta, value)
    sizes = meta.layout
    if (
        sorted(meta.rank_order) != sorted(AXES)
        or sorted(sizes) != sorted(AXES)
        or min(sizes.values()) < 1
        or math.prod(sizes.values()) != meta.world_size
        or meta.world_size > MOST_RANKS
    ):
        raise ValueError(f"the layout {shown(sizes)} is not one of {meta.world_size} ranks")
    schedule, shape = meta.schedule.schedule(), value.get("model")
    if not isinstance(shape, dict):
        raise ValueError("it has no 'model'")
    sized = entries(ModelConfig, shape)
    for name in ModelConfig.__dataclass_fields__:
        one = getattr(sized, name)
        for number in one if isinstance(one, tuple) else (one,):
            if number is not None and (text := value_problem(name, FIELDS[name].metadata, number)):
                raise ValueError(text.removeprefix("--"))
    if (
        schedule.pp_size != sizes["pp"]
        or len(meta.stages) != schedule.num_stages
        or len(meta.stage_layers) != schedule.num_stages
        or min(meta.stage_layers) < 0
        or sum(meta.stage_layers) != sized.layers
    ):
        raise ValueError("its stages do not match its schedule and model")
    owners = meta.clock.owners
    if (
        len(owners) != meta.world_size
        or not all(owner == 0 or str(owner) in meta.clock.before for owner in owners)
        or any(name not in map(str, owners) for name in (*meta.clock.before, *meta.clock.after))
    ):
        raise ValueError("clock: some ranks have none")
    return schedule


def check_head(value: dict, num_stages: int, world_size: int) -> RankTrace:
    """Check the first line of a rank's file; return it."""
    head = entries(RankTrace, value)
    numbers = [time for step in head.steps for time in step]
    if (
        any(start >= end for _, start, end in head.steps)
        or any(
            before[2] > after[1] or before[0] >= after[0]
            for before, after in zip(head.steps, head.steps[1:], strict=False)
        )
        or not all(0 <= number < LATEST for number in numbers)
    ):
        raise ValueError("steps: must be [step, start, end] in order of time")
    if not all(0 <= stage < num_stages for stage in head.stages):
        raise ValueError(f"stages: must be below {num_stages}")
    for name, ranks in head.groups.items():
        if (
            head.world_rank not in ranks
            or len({*ranks}) < len(ranks)
            or not all(0 <= one < world_size for one in ranks)
        ):
            raise ValueError(f"groups.{name}: not a group of rank {head.world_rank}")
    return head


class LineCheck:
    """Checks the lines that follow the head of a rank's file, and converts their values."""

    def __init__(self, head: RankTrace, num_stages: int):
        self.head, self.num_stages = head, num_stages
        self.steps = {step for step, *_ in head.steps}

    def __call__(self, letter: str, values: list):
        """Return the record (with its call sites as text), span, operation or load of a line."""
        kind, types = LINES.get(letter, (None, None))
        if tuple(map(type, values)) != types:
            raise ValueError(f"{shown([letter, *values])} is not a line of a trace")
        for one in [*values[:-1], *values[-1]] if kind is Load else values:
            if not (
                one.isprintable() if type(one) is str else type(one) is int and -1 <= one < LATEST
            ):
                raise ValueError(f"{shown(one)} in {shown([letter, *values])}")
        found = kind(*values)
        if kind is not LayerOperation and (
            found.step not in self.steps or found.stage >= self.num_stages
        ):
            raise ValueError(f"step {found.step}, stage {found.stage}: not of this trace")
        if kind is Record:
            return self._record(found)
        if kind is Load and min(found.first, *found.rows, 0) < 0:
            raise ValueError(f"{shown(values)}: a negative number in a load")
        if kind is not Load and not 0 <= found.start_ns <= found.end_ns:
            raise ValueError("a span that ends before it begins")
        return found

    def _record(self, found: Record) -> Record:
        sites, group = self.head.sites, self.head.groups.get(found.axis)
        if group is None or not -1 <= found.peer < len(group):
            raise ValueError(f"a record of axis {shown(found.axis)} and peer {found.peer}")
        if not (found.posted_ns <= found.done_ns >= found.waited_ns or not found.done_ns):
            raise ValueError("a record that ends before it begins")
        if not (0 <= found.site < len(sites) and 0 <= found.cut < len(sites)):
            raise ValueError("a record without a place in the source")
        return found._replace(site=sites[found.site], cut=sites[found.cut])
