"""A trace on disk: writes and reads one file per rank and `trace/meta.json`, without MPI.

The first line of a rank's file is its head, a JSON object: where the rank stood, its steps, all
texts that occur, and how many rows of each kind follow. Rows are whole numbers of 64 bits, column
by column; a text is its place among those of the head. The head and meta.json name the recording,
so that files of two recordings are never read as one. Times on disk are those of the rank's own
clock; the reader translates them to world rank 0's clock and starts at zero. What contradicts
itself further down is found by what reads it: see `contradictions_are_data_errors`.
"""

from __future__ import annotations

import gc
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, get_type_hints

import numpy as np

from mpipar.comm.record import Record, Span
from mpipar.config.text import brief, shown
from mpipar.errors import DataError, UsageError, broken
from mpipar.pipeline.csv_format import parse_instruction
from mpipar.pipeline.instructions import Schedule
from mpipar.run.console.metrics import read_lines
from mpipar.run.console.tables import crowded, describe_stage
from mpipar.run.files.bounded import built, open_regular, parse_json, problems_as, read_json
from mpipar.run.files.no_links import replace_file
from mpipar.run.trace.clock import CommonClock

SCHEMA = 5
METRICS = "metrics.jsonl"  # of a run folder
META = "trace/meta.json"  # also there: what the files of all ranks have in common
MOST_META = 64 << 20  # bytes of a JSON text
MIXED = "the files of trace/ must come from one run"
HOW_TO = "record one with: mpipar train --trace 10:12 --out FOLDER"


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


KINDS = {"records": Record, "spans": Span, "operations": LayerOperation}  # of rows, in their order


@dataclass
class RankTrace:
    """What one rank did. Times are nanoseconds of the common clock since the trace began.

    place: {axis: coordinate}. groups: {axis: world ranks}. steps: [(step, start, end)]. cores: the
    cores of its host that it may run on. complete: false if it failed in the last step. recording:
    the same text in all files that one run wrote of the same steps. texts, rows: of its file, the
    texts that rows refer to, and the number of rows of each kind. operations: a row of the array
    for each field of LayerOperation, because there are very many.
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
    operations: np.ndarray = field(default_factory=lambda: columns_of(LayerOperation, [], {}))
    complete: bool = True
    cores: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        return self.steps[0][1]

    @property
    def end(self) -> int:
        return self.steps[-1][2]

    def timed_operations(self) -> Iterator[LayerOperation]:
        """Return the operations of layers one by one, with their texts."""
        return map(LayerOperation, *_values(LayerOperation, self.operations, self.texts))


@dataclass(frozen=True)
class ScheduleFacts:
    """The entry `schedule` of meta.json."""

    name: str
    pp_size: int
    num_stages: int
    num_microbatches: int
    placement: str
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


@dataclass
class Trace:
    """All ranks of a run for a few steps.

    meta: trace/meta.json. metrics: the lines of metrics.jsonl.
    """

    folder: Path
    meta: dict
    ranks: list[RankTrace]
    clock: CommonClock
    metrics: list[dict]

    @property
    def num_steps(self) -> int:
        return len(self.ranks[0].steps)

    @property
    def start(self) -> int:
        return min(rank.start for rank in self.ranks)

    @property
    def end(self) -> int:
        return max(rank.end for rank in self.ranks)

    def windows(self) -> list[tuple[int, int]]:
        """Return when the first rank began and the last one ended, of each step."""
        return [
            (min(start for _, start, _ in step), max(end for _, _, end in step))
            for step in zip(*(rank.steps for rank in self.ranks), strict=True)
        ]

    def size(self) -> str:
        """Return ranks and layout, as in `4 ranks (pp 2 x tp 2)`."""
        sizes = self.meta["layout"].items()
        words = " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1)
        return f"{len(self.ranks)} ranks ({words})" if words else "one rank"

    def place(self, rank: RankTrace) -> str:
        """Return the rank's place on the axes that have several, as in `pp1 tp0`."""
        axes = [axis for axis in self.meta["rank_order"] if self.meta["layout"][axis] > 1]
        return " ".join(f"{axis}{rank.place[axis]}" for axis in axes) or "one rank"

    def crowded(self) -> str | None:
        """Return a remark on hosts with more ranks than cores, or None."""
        cores: dict[str, set[int]] = defaultdict(set)
        for rank in self.ranks:
            cores[rank.host].update(rank.cores)
        hosts = [rank.host for rank in self.ranks]
        return crowded(hosts, [len(cores[host]) or len(hosts) for host in hosts])

    def remarks(self) -> list[str]:
        """Return the caveats that a reader must know before trusting the numbers."""
        return broken(
            (self.crowded(), self.crowded()),
            (
                not all(rank.complete for rank in self.ranks),
                "the run failed in the last step that is shown",
            ),
            (
                self.num_steps == 1 < len(self.ranks),
                "one step is traced: what is slow in every step shows only with several",
            ),
        )

    def schedule(self) -> Schedule:
        """Return the schedule that the run used."""
        value = self.meta["schedule"]
        programs = tuple(tuple(map(parse_instruction, program)) for program in value["programs"])
        known = {name: value[name] for name in ScheduleFacts.__dataclass_fields__}
        return Schedule(**known | {"programs": programs})


def schedule_json(schedule: Schedule) -> dict:
    """Return a Schedule as values for JSON; `Trace.schedule` is the inverse."""
    return {name: getattr(schedule, name) for name in ScheduleFacts.__dataclass_fields__} | {
        "programs": [[str(instr) for instr in program] for program in schedule.programs]
    }


def common_facts(schedule: Schedule, stage_layers, layout: dict, entry: str, **more) -> dict:
    """Return what meta.json says of all ranks. layout: {axis: size}. entry: what precedes blocks.

    more: recording, rank_order, model, batch_size, dtype, and others.
    """
    return {
        "world_size": math.prod(layout.values()),
        "layout": layout,
        "schedule": schedule_json(schedule),
        "stage_layers": list(stage_layers),
        "stages": [
            describe_stage(stage, stage_layers, entry) for stage in range(schedule.num_stages)
        ],
        **more,
    }


def rank_name(world_rank: int) -> str:
    """Return the name of one rank's file in a run folder."""
    return f"trace/rank-{world_rank:05d}.bin"


def write_rank(folder: Path, head: dict, *rows: list) -> None:
    """Write a rank's file. Its head holds the number of rows, so that a reader notices if it is
    cut.

    head: recording, world_rank, host, place, stages, groups, steps, complete, cores. rows: a list
    for each of KINDS.
    """
    texts: dict[str, int] = {}
    tables = [columns_of(kind, own, texts) for kind, own in zip(KINDS.values(), rows, strict=True)]
    head = {
        "mpipar_trace": SCHEMA,
        **head,
        "fields": {name: kind._fields for name, kind in KINDS.items()},
        "texts": list(texts),
        "rows": list(map(len, rows)),
    }
    pieces = [f"{json.dumps(head)}\n".encode(), *tables]
    replace_file(rank_name(head["world_rank"]), pieces, sync=False, root=folder)


def _is_number(kind, name: str) -> bool:
    return get_type_hints(kind)[name] is int


def columns_of(kind, rows: list, texts: dict[str, int]) -> np.ndarray:
    """Return rows as whole numbers, column by column.

    texts: {text: its number}, to which those of the rows are added.
    """
    found = np.empty((len(kind._fields), len(rows)), "<i8")
    for name, numbers, column in zip(
        kind._fields, found, zip(*rows, strict=True), strict=bool(rows)
    ):
        numbers[:] = (
            column
            if _is_number(kind, name)
            else [texts.setdefault(str(one), len(texts)) for one in column]
        )
    return found


def _values(kind, columns, texts: Sequence[str]) -> list[list]:
    """Return the columns of a table as lists of numbers and texts."""
    return [
        column.tolist() if _is_number(kind, name) else [texts[one] for one in column.tolist()]
        for name, column in zip(kind._fields, columns, strict=True)
    ]


def write_meta(folder: Path, meta: dict) -> None:
    """Write trace/meta.json; world rank 0 alone calls it."""
    value = {"mpipar_trace": SCHEMA, **meta}
    replace_file(META, [json.dumps(value, indent=1).encode()], sync=False, root=folder)


def read(folder: str | Path) -> Trace:
    """Return the trace in a run folder.

    Raises DataError when there is none, or a part is missing or belongs to another run.
    """
    folder = Path(folder)
    if not os.path.isdir(folder / "trace"):  # false for a name that is too long
        raise DataError(f"{folder}: no run folder with a trace; {HOW_TO}")
    meta = read_json(META, cure=HOW_TO, most_bytes=MOST_META, root=folder)
    facts = _built(Meta, meta, folder / META)
    with contradictions_are_data_errors(folder), np.errstate(all="raise"):
        read = [_read_rank(folder, rank, facts) for rank in range(facts.world_size)]
        if len({tuple(step for step, *_ in rank.steps) for rank, _ in read}) > 1:
            raise DataError(f"{folder}: its ranks have different steps: {MIXED}; {HOW_TO}")
        first = min(facts.clock.common_ns(rank.world_rank, rank.start) for rank, _ in read)
        for rank, numbers in read:
            _fill(rank, numbers, facts.clock, first)
    with problems_as(DataError, str(folder / METRICS)):
        metrics, _ = read_lines(folder, METRICS)
    return Trace(folder, meta, [rank for rank, _ in read], facts.clock, metrics)


def _read_rank(folder: Path, world_rank: int, meta: Meta) -> tuple[RankTrace, bytes]:
    """Return what the head of one rank's file says, and the bytes of its rows."""
    path = folder / (name := rank_name(world_rank))
    with problems_as(DataError, str(path), HOW_TO), open_regular(name, folder) as file:
        head = file.readline(MOST_META)
        trace = _built(RankTrace, parse_json(head.decode()), path)
        counts = zip(trace.rows, KINDS.values(), strict=True)
        size = 8 * sum(count * len(kind._fields) for count, kind in counts)
        there = os.fstat(file.fileno()).st_size - len(head)
        if there != size:
            raise ValueError(f"{there:,} bytes of rows of {size:,}: was it copied only in part?")
        if (trace.world_rank, trace.recording) != (world_rank, meta.recording):
            raise ValueError(f"of another rank or run than {META} says: {MIXED}")
        return trace, file.read(size)


def _built(kind, value, path: Path):
    """Return the entries of a JSON object that a dataclass has, as that dataclass."""
    found = value.get("mpipar_trace") if isinstance(value, dict) else None
    if found != SCHEMA:
        raise DataError(
            f"{path}: trace schema {shown(found)}, this mpipar reads {SCHEMA}; {HOW_TO}"
        )
    names = kind.__dataclass_fields__
    with problems_as(DataError, f"{path}: not of a trace", HOW_TO):
        return built(kind, {name: value[name] for name in names if name in value}, "it")


def _fill(trace: RankTrace, numbers: bytes, clock: CommonClock, first: int) -> None:
    """Add the rows of its file to a rank's trace, in common time since `first`."""
    rows = np.frombuffer(numbers, "<i8")

    def since(local_ns):
        return clock.common_ns(trace.world_rank, local_ns) - first

    for (name, kind), count in zip(KINDS.items(), trace.rows, strict=True):
        own, rows = np.split(rows, [count * len(kind._fields)])
        own = own.reshape(len(kind._fields), count).copy()
        columns = dict(zip(kind._fields, own, strict=True))
        if kind is Record:  # a rank may have failed in one, or before its wait
            waited, done = columns["waited_ns"], columns["done_ns"]
            waited[(done == 0) & (waited == 0)] = trace.end
            done[done == 0] = trace.end
        for each, column in columns.items():
            if each.endswith("_ns"):
                column[:] = since(column)
            elif not _is_number(kind, each) and not (
                column.min(initial=0) >= 0 and column.max(initial=-1) < len(trace.texts)
            ):
                raise IndexError(each)
        as_rows = kind is not LayerOperation
        setattr(trace, name, [*map(kind, *_values(kind, own, trace.texts))] if as_rows else own)
    trace.steps = tuple((step, int(since(one)), int(since(end))) for step, one, end in trace.steps)


@contextmanager
def contradictions_are_data_errors(*folders: str | Path):
    """Raise DataError if these traces, each line of which is valid, contradict themselves.

    Times and partners of calls are not checked against each other while they are read. Until then
    no garbage is collected: there are very many rows, and all of them stay.
    """
    gc.disable()
    try:
        yield
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
        UsageError,
    ) as error:
        raise DataError(
            f"{' or '.join(map(str, folders))}: a trace that contradicts itself:"
            f" {type(error).__name__} {brief(str(error))}; {HOW_TO}"
        ) from error
    finally:
        gc.enable()
