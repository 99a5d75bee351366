"""What a trace's files hold, as dataclasses, and the checks of what all ranks rely on.

A trace may come from anywhere. Each function raises a ValueError that says what is wrong. What
contradicts itself further down is found by what reads it: see `contradictions_are_data_errors`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from mpipar.comm.grid import AXES
from mpipar.comm.record import Record, Span
from mpipar.config.model import ModelConfig
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


class Line(NamedTuple):
    """What a line after the head holds. types: of its values. times: which of them are times."""

    kind: type
    types: tuple[type, ...]
    times: tuple[int, ...]


def line_of(kind, *types: type) -> Line:
    """Return the Line of a NamedTuple; its fields that end with _ns are times."""
    names = enumerate(kind._fields)
    return Line(kind, types, tuple(place for place, name in names if name.endswith("_ns")))


WHERE = (int, int, int, int)
LINES = {  # by the letter that begins a line; `site` and `cut` of a record are indices of sites
    "r": line_of(
        Record, int, int, int, str, str, str, *WHERE, int, str, int, int, int, str, *WHERE[:2]
    ),
    "s": line_of(Span, str, int, *WHERE),
    "o": line_of(LayerOperation, str, str, int, *WHERE, str),
    "e": line_of(Load, str, *WHERE, list),
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
    explicit_comm: bool
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
    if (
        schedule.pp_size != sizes["pp"]
        or len(meta.stages) != schedule.num_stages
        or len(meta.stage_layers) != schedule.num_stages
        or min(meta.stage_layers) < 0
        or sum(meta.stage_layers) != sized.layers
    ):
        raise ValueError("its stages do not match its schedule and model")
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
