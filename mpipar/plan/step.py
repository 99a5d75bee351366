"""The time of a layout's training step on a machine with a known cost model.

A simulation times the passes and their messages in the schedule's order. After the pipeline come
gradient sums, norm and update, whose barriers are those of the real code on shapes. The update's
time is proportional to the number of parameters. Overlap of gradient sums with passes is not
modelled, so the estimate errs on the high side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpipar import models
from mpipar.data.rows import rows_per_microbatch
from mpipar.errors import UsageError
from mpipar.layers.context import recomputed_blocks
from mpipar.pipeline.costs import Costs
from mpipar.pipeline.simulate import simulate
from mpipar.plan.machine import HOP, SENDING, STREAM, Machine
from mpipar.plan.measure import (
    crowding,
    pipeline_cores,
    sharing_note,
    unit_counts,
    unit_memory,
)
from mpipar.plan.predict import Prediction, predict, predict_stages
from mpipar.train.build import configured_schedule

BUCKET = "grads.bucket"  # a sum that is posted first and waited for later
OF_ZERO = (".gather", ".scatter")  # name endings of what ZeRO-3 sends, also posted
HALVES = ("reduce_scatter", "all_gather")


@dataclass(frozen=True)
class StepEstimate:
    """Seconds of one training step by part, and the operations outside the measured range.

    sharing: the note on more ranks than cores, or "". peak_bytes: of the fullest rank.
    """

    pipeline: float
    barriers: float
    update: float
    extrapolated: tuple[str, ...]
    sharing: str = ""
    peak_bytes: int = 0

    @property
    def total(self) -> float:
        return self.pipeline + self.barriers + self.update


def measured_units(machine: Machine, config):
    """Return the machine's `Units` for a config.

    Raises UsageError, which lists the available ones. With context parallelism there are none,
    because a pass on a part of the tokens is not measured.
    """
    if config.grid.cp > 1:
        raise UsageError(
            f"cp {config.grid.cp}: a cost model has no passes on a part of the tokens;"
            " leave --machine out, or predict a layout with cp 1"
        )
    return machine.units_of(
        config.model, config.run.dtype, config.grid.tp, rows_per_microbatch(config), config.grid.ep
    )


def costs_of(machine: Machine, config, message_bytes: int) -> Costs:
    """Return the costs of a config by unit, as the simulator of schedules reads them.

    A number of rows that was not measured is scaled from the nearest measured one, and a block by
    its FLOPs. Raises UsageError if the machine's file lacks this model.
    """
    units = measured_units(machine, config)
    factor = rows_per_microbatch(config) / units.rows
    once = units.block  # the machine's file has the mean of blocks without recomputation
    twice = replace(once, i=once.i + once.f)
    split = models.layer_split(config, configured_schedule(config.grid))
    again = [place < recomputed_blocks(config) for count in split for place in range(count)]
    flops = models.unit_flops(config.model).blocks
    blocks = [
        (twice if runs_again else once).scaled(one * len(flops) / sum(flops))
        for runs_again, one in zip(again, flops, strict=True)
    ]
    parts = [units.embedding, *blocks, units.head]
    parts = [passes.scaled(factor) for passes in parts]
    return Costs(
        f=tuple(passes.f for passes in parts),
        i=tuple(passes.i for passes in parts),
        w=tuple(passes.w for passes in parts),
        cores=pipeline_cores(config.grid, machine.cores),
        sharing=units.sharing,
        **(link_costs(machine, message_bytes) if config.grid.pp > 1 else {}),
        **unit_memory(config),
    )


def link_costs(machine: Machine, message_bytes: int) -> dict:
    """Return the fields of Costs for messages of this size by the slowest kind of link.

    A single message takes the time of a hop, and occupies the link as long as one of a stream. That
    may be longer, because a shaped link lets the first bytes after a pause pass at once. Without a
    measured stream, the fitted line's time per byte occupies the link. Meanwhile the message takes
    a share of its sender's core, if that was measured.
    """
    curve, found = machine.curve(HOP), message_estimates(machine, message_bytes)
    hop = found[HOP].seconds
    busy = curve.piece(message_bytes).us_per_byte * message_bytes * 1e-6
    if STREAM in found:
        busy = found[STREAM].seconds
    sending = found[SENDING].seconds / busy if SENDING in found and busy else 0.0
    return {
        "latency": hop - busy,
        "message_bytes": message_bytes,
        "bandwidth": message_bytes / busy if busy else None,
        "eager_bytes": machine.eager_bytes(curve.link),
        "sending": min(1.0, sending),
    }


def message_estimates(machine: Machine, message_bytes: int) -> dict:
    """Return the measurements of a message by the slowest kind of link: {operation: Estimate}."""
    link = machine.curve(HOP).link
    return {
        one.operation: one.estimate(message_bytes)
        for one in machine.curves
        if one.link == link and one.operation in (HOP, STREAM, SENDING)
    }


def largest_message(steps) -> int:
    """Return the bytes of the largest message between stages in these ranks' steps on shapes."""
    return max(
        (
            record.payload_bytes
            for step in steps
            for record in step.recorder.records
            if record.operation == "send" and record.phase not in ("sync", "opt")
        ),
        default=0,
    )


def schedule_costs(machine: Machine, config) -> Costs:
    """Return the costs of a resolved config by unit, for choosing a schedule.

    Raises UsageError if the machine's file lacks the model or the message.
    """
    plain = replace(
        config, grid=replace(config.grid, schedule="gpipe", chunks=None, stage_layers=None)
    )
    return costs_of(machine, plain, largest_message([predict(plain, 0)]))


def step_estimate(machine: Machine, config) -> StepEstimate:
    """Predict a step of a resolved config. Raises UsageError if the machine's file lacks a curve.

    Barriers and update are those of the slowest pipeline rank.
    """
    steps = predict_stages(config)
    units, outside = measured_units(machine, config), set()
    if units.rows != rows_per_microbatch(config):
        outside.add(f"passes of {rows_per_microbatch(config)} row(s)")
    if units.optimizer != config.train.optimizer:
        outside.add(f"the update of {config.train.optimizer}, only that of {units.optimizer}")
    message = largest_message(steps)
    if message and any(one.extrapolated for one in message_estimates(machine, message).values()):
        outside.add(f"a message of {message} bytes")
    schedule = configured_schedule(config.grid)
    stages = costs_of(machine, config, message).merged(unit_counts(config, schedule))
    pipeline = float(simulate(schedule, stages).makespan)
    barriers = max(behind_the_pipeline(machine, step, outside) for step in steps)
    updated = max(step.num_params for step in steps)
    if config.memory.zero:  # each data rank updates its pieces
        updated /= config.grid.dp * config.grid.cp
    update = updated * units.update_seconds_per_parameter
    crowd = crowding(config.grid, machine.cores)
    update *= crowd * units.sharing if crowd > 1 else 1
    return StepEstimate(
        pipeline,
        barriers,
        update,
        tuple(sorted(outside)),
        sharing_note(config.grid, machine.cores, units.sharing),
        max(step.peak_total for step in steps),
    )


def step_parts(machine: Machine, config) -> dict[str, float]:
    """Return the seconds of a predicted step by part; raises UsageError as `step_estimate` does.

    The pipeline's time consists of the busiest rank's passes, its wait for others if messages took
    no time, and what messages add.
    """
    whole = step_estimate(machine, config)
    schedule = configured_schedule(config.grid)
    stages = costs_of(machine, config, 0).merged(unit_counts(config, schedule))
    timeline = simulate(schedule, replace(stages, latency=0, bandwidth=None))
    passes, silent = float(max(timeline.busy)), float(timeline.makespan)
    return {
        "passes of the busiest rank": passes,
        "idle in the pipeline": silent - passes,
        "messages between stages": whole.pipeline - silent,
        "sums over replicas": whole.barriers,
        "update": whole.update,
    }


def behind_the_pipeline(machine: Machine, step: Prediction, outside: set) -> float:
    """Return the seconds of one rank's sums over replicas and the world; extend `outside`.

    ZeRO's gathers and scatters are included. Each moves half of the bytes of an all_reduce, and the
    machine's file measures only the whole. Groups smaller than the world all run at once, so their
    contention is included.
    """
    seconds = 0.0
    for record in step.recorder.records:
        posted = record.name == BUCKET or record.name.endswith(OF_ZERO)
        if not posted and record.phase not in ("sync", "opt"):
            continue
        ranks, half = len(step.groups[record.axis]), record.operation in HALVES
        operation = "all-reduce" if half else record.operation.replace("_", "-")
        operation = "iall-reduce" if posted else operation
        found = machine.estimate(operation, record.payload_bytes, ranks)
        if found.extrapolated:
            outside.add(f"{operation} of {record.payload_bytes} bytes")
        together = 1 < ranks < len(step.groups["world"])
        share = 0.5 if half else 1.0
        seconds += share * found.seconds * (machine.contention_factor(operation) if together else 1)
    return seconds
