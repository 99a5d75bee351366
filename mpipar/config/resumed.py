"""The settings of a run that goes on: those that it had, below what the user names again."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace

from mpipar.comm.grid import AXES, LAYOUT
from mpipar.config.grid import AUTO
from mpipar.config.model import CUTS, FAMILIES
from mpipar.config.reading import Reading, over
from mpipar.config.setting import flag

# What decides the numbers of a run. With another value it would be another run.
FIXED = ("preset", "dtype", "seed", "loss_scale", "loss_scale_interval", "batch_size", "optimizer",
         "lr", "lr_schedule", "min_lr_ratio", "decay_ratio", "warmup_steps", "weight_decay",
         "beta1", "beta2", "eps", "clip")
# What belongs to one start of the program, not to the run.
OF_A_START = ("resume", "out", "run_name", "trace", "trace_ops", "progress")
# What is chosen together: who names one of them chooses all of them anew.
ORDER = ("schedule", "schedule_csv", "chunks", "group_size", "stage_layers")


def resumed(reading: Reading, saved: Mapping[str, object], world_size: int) -> Reading:
    """The Reading of a run that goes on on this many ranks.

    saved: the values of the run's config.toml. A layout that the user names is chosen anew, and so
    is one that does not fit the number of ranks. Stages and groups depend on it. What was chosen
    (auto) stays.
    """
    given = {name: value for name, value in reading.given.items()
             if (name, value) != ("schedule", AUTO)}
    problems = [*reading.unread, *unchangeable(given, saved)]
    fits = world_size == math.prod(saved.get(axis, 1) for axis in AXES)
    named = any(axis in given for axis in LAYOUT)
    reading = replace(reading, given=given, unread=tuple(problems),
                      chooses_layout=reading.chooses_layout and (named or not fits))
    dropped = set(OF_A_START)
    if any(name in given for name in ORDER):
        dropped |= set(ORDER)
    if named or not fits:
        dropped |= {*LAYOUT, *ORDER, "cp_attention"} - {"schedule"}
    return over({name: value for name, value in saved.items() if name not in dropped}, reading)


def unchangeable(given: Mapping[str, object], saved: Mapping[str, object]) -> list[str]:
    """One problem for each value that the user names, but that the saved run has otherwise."""
    shape = [one.name for part in FAMILIES.values() for one in fields(part) if one.name not in CUTS]
    return [f"{flag(name)} {shown(given[name])}: can't change in a run that goes on, which has"
            f" {shown(saved.get(name))}; leave {flag(name)} out, or start a new run"
            for name in dict.fromkeys([*shape, *FIXED])
            if name in given and given[name] != saved.get(name)]


def shown(value) -> str:
    """A value as the user types it."""
    if value is None:
        return "the default"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
