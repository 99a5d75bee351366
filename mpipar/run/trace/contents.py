"""What a trace's files hold, as dataclasses into which the reader converts JSON.

What contradicts itself further down is found by what reads it: see
`trace_file.contradictions_are_data_errors`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from mpipar.comm.record import Record, Span
from mpipar.run.files.typed import built
from mpipar.run.trace.clock import CommonClock


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


# By the letter that begins a line after the head: the list of a RankTrace that it belongs to, and
# its type. `site` and `cut` of a record are indices of sites.
LINES = {
    "r": ("records", Record),
    "s": ("spans", Span),
    "o": ("operations", LayerOperation),
    "e": ("loads", Load),
}


@dataclass
class RankTrace:
    """What one rank did. Times are nanoseconds of the common clock since the trace began.

    place: {axis: coordinate}. groups: {axis: world ranks}. steps: [(step, start, end)]. cores: the
    cores of its host that it may run on. complete: false if it failed in the last step. recording:
    the same text in all files that one run wrote of the same steps. sites, lines: of its file, the
    places in the source and the number of lines after the head.
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
    sites: tuple[str, ...] = ()
    lines: int = 0

    @property
    def start(self) -> int:
        return self.steps[0][1]

    @property
    def end(self) -> int:
        return self.steps[-1][2]


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


@dataclass(frozen=True)
class Meta:
    """The part of meta.json that is read. model: see `model_config`."""

    recording: str
    world_size: int
    rank_order: tuple[str, ...]
    layout: dict[str, int]
    schedule: ScheduleFacts
    stages: tuple[str, ...]
    stage_layers: tuple[int, ...]
    model: dict
    batch_size: int
    dtype: str
    clock: CommonClock


def entries(kind, value: dict):
    """Return the entries of a JSON object that a dataclass has, as that dataclass.

    Raises a ValueError that says which entry lacks or has another type.
    """
    names = kind.__dataclass_fields__
    return built(kind, {name: value[name] for name in names if name in value}, "it")
