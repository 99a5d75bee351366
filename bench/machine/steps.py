"""Training steps, predicted and then measured: every layout and schedule that a machine allows."""

from __future__ import annotations

from bench.machine.compute import ROUNDS, step_config, step_seconds
from bench.machine.verdicts import Subject, line
from mpipar import ops as ops_module
from mpipar.config.model import model_config
from mpipar.config.run import RunConfig
from mpipar.config.sections import Config
from mpipar.config.train import TrainConfig
from mpipar.plan.step import step_estimate

SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved")
CHUNKS = 2  # of each rank with interleaved


def layouts(world_size: int, tp: int) -> list[tuple[str, dict]]:
    """(name, settings of the grid) of the steps that passes of a `tp` predict."""
    if tp > 1:
        return [(f"tp={tp}" if tp == world_size else f"dp={world_size // tp},tp={tp}",
                 {"dp": world_size // tp, "tp": tp})]
    found = [(f"dp={world_size}", {"dp": world_size})]
    found += [(f"pp={world_size} {name}", {"pp": world_size, "schedule": name})
              for name in SCHEDULES]
    if world_size % 2 == 0 and world_size > 2:
        half = world_size // 2
        found.append((f"dp=2,pp={half} 1f1b", {"dp": 2, "pp": half, "schedule": "1f1b"}))
    return found


def verify_steps(world, machine, budget) -> list[dict]:
    """Compare a training step of each layout that the measured passes allow.

    The quietest of a few rounds counts. The layouts follow each other in each round, so that a slow
    spell of the machine hits all of them, and none in every round.
    Comm: the steps', and those of the budget.
    """
    cases: list[tuple] = []
    largest = {(str(units.model), units.tp): units
               for units in sorted(machine.units, key=lambda units: units.rows)}
    for units in largest.values():
        if world.size % units.tp:
            continue
        settings = {name: tuple(value) if isinstance(value, list) else value
                    for name, value in units.model.items()}  # JSON has no tuples
        model = model_config(settings | {"layers": CHUNKS * max(2, world.size)})
        base = Config(model, train=TrainConfig(optimizer=units.optimizer, warmup_steps=0),
                      run=RunConfig(dtype=units.dtype))
        for name, grid in layouts(world.size, units.tp):
            chunks = CHUNKS if grid.get("schedule") == "interleaved" else None
            config = step_config(base, units.rows, world.size, **grid, chunks=chunks)
            cases.append((name, config, units))
    guesses = [step_estimate(machine, config) for _, config, _ in cases]
    rounds = [[step_seconds(world, ops_module.make("cpu", units.dtype), config, own)
               for (_, config, units), own in budget.part(1 / (ROUNDS - number)).shares(cases)]
              for number in budget.rounds(ROUNDS)]
    return [line(Subject(f"step {name}", world.size, "-"), f"{units.rows} rows",
                 guess.total * 1e6, min(seconds) * 1e6, bool(guess.extrapolated))
            for (name, _, units), guess, *seconds in zip(cases, guesses, *rounds, strict=True)]
