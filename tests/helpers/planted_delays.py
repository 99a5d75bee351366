"""Simulated traces of runs with a planted delay, so that the true cause is known.

Every rank is a generator that follows its program: it reads rows, runs passes layer by layer with
their tp barriers, sends and receives, sums gradients over dp, meets all ranks at the norm, and runs
the optimizer. It notes records, spans and operations as a run does. Times are milliseconds; every
piece of work varies by 2 %.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random

from mpipar.comm.grid import AXES, Grid
from mpipar.comm.record import Record, Span
from mpipar.config.model import model_config
from mpipar.models import unit_flops
from mpipar.models.split import stage_parts
from mpipar.pipeline.instructions import neighbours
from mpipar.pipeline.lowering import lower
from mpipar.pipeline.schedules.catalog import make_schedule
from mpipar.run.trace.clock import CommonClock
from mpipar.run.trace.trace_file import (
    LayerOperation,
    RankTrace,
    Trace,
    columns_of,
    common_facts,
)

LAYERS = ("norm1", "attn.qkv", "attn.proj", "norm2", "ffn.up", "ffn.down")
REDUCED = ("attn.proj", "ffn.down")  # layers that end in a barrier of tp
MODEL = {"layers": 4, "d_model": 64, "heads": 4, "ffn": 256, "seq_len": 32}
MS = 10**6  # nanoseconds
DATA_MS, OPTIMIZER_MS, BETWEEN_MS, SAVE_MS, WIRE_MS = 0.3, 1.5, 0.4, 0.5, 0.05


def record(operation, name, axis, posted, waited, done, **other):
    """Return a record with times in milliseconds."""
    values = {
        "seq": 1,
        "peer": -1,
        "tag": -1,
        "payload_bytes": 1024,
        "wire_bytes": 1024,
        "dtype": "float32",
        "step": 1,
        "stage": 0,
        "mb": 0,
        "phase": "F",
        "site": "mpipar/layers/ffn.py:33",
        "cut": "mpipar/layers/parallel/row.py:20",
    } | other
    times = (round(time * MS) for time in (posted, waited, done))
    return Record(*times, operation, name, axis, **values)


@dataclass(frozen=True)
class Run:
    """What is simulated. fault: what is planted on `rank`, `delay` ms in each step.

    Faults: data, F or B (of one layer), gc, opt, save, between, link, or "" for none. link: (axis,
    ranks) of the slow link, which are a group, or the sender and the receiver.
    """

    layout: tuple[tuple[str, int], ...]
    fault: str = ""
    rank: int = 0
    link: tuple[str, tuple[int, ...]] = ("", ())
    delay: float = 0.0
    schedule: str = "1f1b"
    microbatches: int = 4
    stage_layers: tuple[int, ...] = ()
    vocab_size: int = 64
    block_ms: float = 3.0
    steps: int = 3
    timed_layers: bool = False
    seed: int = 0


def with_operations(rank, operations):
    """Give these operations of layers to a RankTrace, as its file would."""
    texts = {}
    rank.operations = columns_of(LayerOperation, operations, texts)
    rank.texts = tuple(texts)


class Simulator:
    """Simulates a run. `trace` is the result, `step_ms` the mean length of a step."""

    def __init__(self, run: Run):
        self.run, self.random = run, Random(run.seed)
        sizes = {axis: dict(run.layout).get(axis, 1) for axis in AXES}
        self.sizes = sizes
        world_size = math.prod(sizes.values())
        self.grids = [Grid(rank, sizes) for rank in range(world_size)]
        self.schedule = make_schedule(run.schedule, sizes["pp"], run.microbatches)
        split = MODEL["layers"] // sizes["pp"]
        self.stage_layers = run.stage_layers or (split,) * sizes["pp"]
        self.model = MODEL | {"vocab_size": run.vocab_size}
        units = unit_flops(model_config(self.model))
        self.head_ms = run.block_ms * units.head / units.blocks[0]
        self.arrivals = defaultdict(dict)  # of a meeting or message: {rank: when it arrived}
        self.ends = {}  # of a meeting or message: when its data has arrived
        self.free = defaultdict(float)  # of a link: when it is free again
        self.clock = [0.0] * world_size
        self.step, self.posted, self.counts = {}, {}, defaultdict(int)
        self.operations = defaultdict(list)  # of layers, by rank
        self.ranks = []
        for rank, grid in enumerate(self.grids):
            groups = {axis: grid.group(axis) for axis in AXES} | {"world": tuple(range(world_size))}
            self.ranks.append(
                RankTrace(
                    "planted",
                    rank,
                    f"host{rank}",
                    {axis: grid.group_rank(axis) for axis in AXES},
                    self.schedule.stages_by_rank[grid.group_rank("pp")],
                    groups,
                    (),
                )
            )
        running = {rank: self._program(rank) for rank in range(world_size)}
        while running:  # a generator yields until what it waits for has arrived
            for rank in list(running):
                if next(running[rank], "ended") == "ended":
                    del running[rank]
        for rank, own in self.operations.items():
            with_operations(self.ranks[rank], own)
        meta = common_facts(
            self.schedule,
            self.stage_layers,
            sizes,
            "embedding",
            recording="planted",
            rank_order=list(AXES),
            model=self.model,
            batch_size=16,
            dtype="float32",
        )
        self.trace = Trace(
            Path("run"), meta, self.ranks, CommonClock((0,) * world_size, {}, {}), []
        )
        self.step_ms = (self.trace.end - self.trace.start) / MS / run.steps

    def _planted(self, fault, rank):
        return self.run.delay if (fault, rank) == (self.run.fault, self.run.rank) else 0.0

    def _work(self, rank, length, extra=0.0):
        """Let time pass on a rank; return its start and end in nanoseconds."""
        start = self.clock[rank]
        self.clock[rank] += length * self.random.uniform(0.98, 1.02) + extra
        return round(start * MS), round(self.clock[rank] * MS)

    def _span(self, kind, rank, ends, stage=-1, mb=-1):
        self.ranks[rank].spans.append(Span(kind, *ends, self.step[rank], stage, mb))

    def _meet(self, rank, axis, name, posted=None, size=4096, **facts):
        """Wait for the rest of a group, then for the transfer. Yields while others are missing."""
        group = self.ranks[rank].groups[axis]
        if len(group) == 1:
            return
        self.counts[rank, axis, name] += 1
        waited = self.clock[rank]
        posted = waited if posted is None else posted
        key = axis, group, name, self.counts[rank, axis, name]
        arrived = self.arrivals[key]
        arrived[rank] = posted
        while len(arrived) < len(group):
            yield
        self.clock[rank] = max(waited, self._travel(key, (axis, group), max(arrived.values())))
        self._record(
            rank,
            "all_reduce",
            name,
            axis,
            (posted, waited, self.clock[rank]),
            payload_bytes=size,
            wire_bytes=size,
            **facts,
        )

    def _travel(self, key, link, sent):
        """Return when the data of a meeting or message arrives: a link carries one at a time."""
        if key not in self.ends:
            slow = self.run.fault == "link" and self.run.link == link
            each = {"tp": 4 * self.run.microbatches * max(self.stage_layers), "dp": 2,
                    "pp": self.run.microbatches}.get(link[0], 1)  # fmt: skip
            length = self._wire_ms() + (self.run.delay / each if slow else 0)
            self.ends[key] = self.free[link] = max(sent, self.free[link]) + length
        return self.ends[key]

    def _wire_ms(self):
        """Return the duration of a healthy transfer."""
        return WIRE_MS

    def _record(self, rank, operation, name, axis, times, **facts):
        self.ranks[rank].records.append(
            record(operation, name, axis, *times, **{"step": self.step[rank], **facts})
        )

    def _program(self, rank):
        """Run all steps of a rank."""
        for step in range(1, self.run.steps + 1):
            self.step[rank] = step
            start = self.clock[rank]
            yield from self._pipeline(rank)
            self._span("pipeline", rank, (round(start * MS), round(self.clock[rank] * MS)))
            posted = self.posted.pop(rank, None)
            for _ in range(2):
                yield from self._meet(rank, "dp", "grads.bucket", posted, 2**20, phase="sync")
            yield from self._meet(rank, "world", "step.norm", size=24, phase="sync")
            self._span("opt", rank, self._work(rank, OPTIMIZER_MS, self._planted("opt", rank)))
            self.ranks[rank].steps += ((step, round(start * MS), round(self.clock[rank] * MS)),)
            if step < self.run.steps:
                self._work(rank, BETWEEN_MS, self._planted("between", rank))
                if self.run.fault in ("", "save"):
                    self._span("save", rank, self._work(rank, SAVE_MS, self._planted("save", rank)))
                    yield from self._meet(rank, "world", "save.written", size=0, phase="save")

    def _pipeline(self, rank):
        """Run the program of one step: reads, passes and messages."""
        grid, schedule, read, receives = self.grids[rank], self.schedule, set(), {}

        def reading(instr):
            if instr.mb not in read:
                read.add(instr.mb)
                extra = self._planted("data", rank) if len(read) == 1 else 0.0
                self._span("data", rank, self._work(rank, DATA_MS, extra), instr.stage, instr.mb)

        for instr in lower(schedule, grid.group_rank("pp")):
            taken, given = neighbours(schedule, instr)
            if instr.kind.startswith("RECV"):
                reading(instr)
                receives[taken[0][:3]] = self.clock[rank]
            elif instr.kind.startswith("SEND"):
                self._send(rank, given[0])
            elif instr.kind == "REDUCE_GRAD":
                self.posted[rank] = self.clock[rank]
            else:
                for message in taken:
                    if message.is_remote:
                        yield from self._receive(rank, message, receives.pop(message[:3]))
                reading(instr)
                yield from self._pass(rank, instr)

    def _key(self, rank, message, source, target):
        return (
            "message",
            self.step[rank],
            message[:3],
            self.grids[rank].rank_at(pp=source),
            self.grids[rank].rank_at(pp=target),
        )

    def _send(self, rank, message):
        now = self.clock[rank]
        self.arrivals[self._key(rank, message, message.source, message.target)][rank] = now
        self._record(
            rank,
            "send",
            "activations" if message.direction == "F" else "gradients",
            "pp",
            (now, now, now),
            peer=message.target,
            tag=self._tag(message),
            payload_bytes=8192,
            wire_bytes=8192,
        )

    def _receive(self, rank, message, posted):
        source, waited = self.grids[rank].rank_at(pp=message.source), self.clock[rank]
        key = self._key(rank, message, message.source, message.target)
        sent = self.arrivals[key]
        while source not in sent:
            yield
        self.clock[rank] = max(waited, self._travel(key, ("pp", (source, rank)), sent[source]))
        self._record(
            rank,
            "recv",
            "activations" if message.direction == "F" else "gradients",
            "pp",
            (posted, waited, self.clock[rank]),
            peer=message.source,
            tag=self._tag(message),
            payload_bytes=8192,
            wire_bytes=0,
        )

    def _tag(self, message):
        return (message.stage * 99 + message.mb) * 2 + (message.direction == "B")

    def _pass(self, rank, instr):
        """Run a forward or backward, layer by layer."""
        start, stage, tp = self.clock[rank], instr.stage, self.sizes["tp"]
        blocks, _, is_last = stage_parts(stage, self.stage_layers)
        times = 2 if instr.kind == "B" else 1
        late = blocks[-1] if blocks else None
        for block in blocks:
            for layer in LAYERS:
                extra = 0.0
                if (block, layer) == (late, "ffn.up"):
                    extra = self._planted(instr.kind, rank) / self.run.microbatches
                    if gc := self._planted("gc", rank) / self.run.microbatches:
                        self._span("gc", rank, self._work(rank, 0, gc))
                ends = self._work(rank, times * self.run.block_ms / len(LAYERS) / tp, extra)
                self._operation(rank, instr, f"block{block}.{layer}", ends)
                if layer in REDUCED:
                    yield from self._meet(
                        rank,
                        "tp",
                        f"block{block}.{layer}",
                        stage=stage,
                        mb=instr.mb,
                        phase=instr.kind,
                    )
        if is_last:
            self._operation(rank, instr, "head", self._work(rank, times * self.head_ms / tp))
        ends = round(start * MS), round(self.clock[rank] * MS)
        self._span(instr.kind, rank, ends, stage, instr.mb)

    def _operation(self, rank, instr, layer, ends):
        if self.run.timed_layers:
            self.operations[rank].append(
                LayerOperation(
                    layer, "matmul", *ends, self.step[rank], instr.stage, instr.mb, instr.kind
                )
            )
