"""The pace of a rehearsal: how long computing takes, and what a cost model predicts for calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bench.rehearse.script import SPAN, Script
from mpipar.comm.record import POINT_TO_POINT, Record
from mpipar.errors import UsageError
from mpipar.plan import machine_file
from mpipar.plan.machine import HOP, Machine
from mpipar.plan.measure import unit_counts
from mpipar.plan.predict import predict
from mpipar.plan.step import HALVES, costs_of, largest_message, measured_units, step_estimate
from mpipar.train.build import configured_schedule


def spread(script: Script, seconds: Mapping[tuple[str, int], float]) -> list[float]:
    """Return the seconds of computing before each event of a script.

    seconds: of (kind, stage) of a pass. Within a pass they are distributed like its FLOPs, or put
    at its end if it has none.
    """
    found = [0.0] * len(script.events)
    for last, event in enumerate(script.events):
        if event.action == SPAN:
            one = script.passes[event.number]
            total = seconds.get((one.kind, one.stage), 0.0)
            within = range(one.first, last + 1)
            flops = sum(script.events[place].flops for place in within)
            if not flops:
                found[last] += total
            for place in within if flops else ():
                found[place] += total * script.events[place].flops / flops
    return found


class Pace(NamedTuple):
    """scale: of the time of computing, 0 for none. Its model: a rate of products, or a machine."""

    config: Any
    scale: float
    gflops: float | None
    machine: Machine | None

    @classmethod
    def of(cls, args: Any, config: Any) -> Pace:
        """Return the pace of the flags. Raises UsageError if the machine's file lacks something."""
        machine = machine_file.load(args.machine) if args.machine is not None else None
        pace = cls(config, args.compute, args.gflops, machine)
        if pace.modelled and config.grid.tp > 1:
            raise UsageError(
                "--machine: its passes of tp ranks include their barriers, which a"
                " rehearsal makes itself; with --tp, give --gflops N for --compute X"
            )
        if pace.modelled:
            measured_units(machine, config)
        return pace

    @property
    def modelled(self) -> bool:
        """Whether computing takes the time that the machine's file gives."""
        return self.machine is not None and self.scale > 0

    def seconds(self, script: Script) -> list[float] | None:
        """Return the seconds of computing before each event of a script; None if it takes none."""
        if not self.scale:
            return None
        if not self.modelled:
            return [self.scale * event.flops / (self.gflops * 1e9) for event in script.events]
        scaled = {key: self.scale * time for key, time in self._pass_seconds(script).items()}
        return spread(script, scaled)

    def _pass_seconds(self, script: Script) -> dict[tuple[str, int], float]:
        """Return {(kind, stage): seconds} of each pass, and of the update."""
        config = self.config
        units = measured_units(self.machine, config)
        message = largest_message([predict(config, script.world_rank)])
        costs = costs_of(self.machine, config, message).merged(
            unit_counts(config, configured_schedule(config.grid))
        )
        found = {}
        for stage, (f, i, w) in enumerate(zip(costs.f, costs.i, costs.w, strict=True)):
            found |= {("F", stage): f, ("I", stage): i, ("W", stage): w, ("B", stage): i + w}
        updated = script.num_params / (config.grid.dp * config.grid.cp if config.memory.zero else 1)
        return found | {("opt", -1): updated * units.update_seconds_per_parameter}

    def step_seconds(self) -> float | None:
        """Return the predicted step, if computing takes its modelled time."""
        return (
            step_estimate(self.machine, self.config).total
            if (self.modelled and self.scale == 1)
            else None
        )

    def call_seconds(self, record: Record, posted: bool, ranks: int) -> float | None:
        """Return the machine file's prediction for a call; None if it has none.

        A send and its receive are one message, which is counted where it is received.
        """
        if self.machine is None or record.operation == "send":
            return None
        half = record.operation in HALVES
        name = "all-reduce" if half else record.operation.replace("_", "-")
        name = HOP if record.operation in POINT_TO_POINT else f"{'i' * posted}{name}"
        try:
            found = self.machine.estimate(
                name, record.payload_bytes, 2 if record.operation in POINT_TO_POINT else ranks
            )
        except UsageError:
            return None
        return found.seconds * (0.5 if half else 1.0)
