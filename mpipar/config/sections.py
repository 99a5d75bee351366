"""The whole configuration: its sections, and their fields in one flat namespace.

The fields are the single source: command-line flags, TOML keys and `config.toml` are generated from
them. Field `seq_len` = flag `--seq-len` = TOML key `seq-len`. `None` means that resolve() chooses;
it turns a Config and a number of ranks into a complete one. The defaults are the preset `tiny`;
PRESETS holds what the other presets change.
"""

import dataclasses
from dataclasses import dataclass, field

from mpipar.config.grid import GridConfig
from mpipar.config.model import ModelConfig, model_config
from mpipar.config.presets import PRESETS
from mpipar.config.run import RunConfig
from mpipar.config.setting import argument, flag
from mpipar.config.train import MemoryConfig, TrainConfig


@dataclass(frozen=True)
class Config:
    """Everything a command needs to know."""

    model: ModelConfig = field(default_factory=ModelConfig)
    grid: GridConfig = field(default_factory=GridConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)


SECTIONS = {one.name: one.default_factory for one in dataclasses.fields(Config)}  # name: class
ROWS = tuple(
    (section, one) for section, part in SECTIONS.items() for one in dataclasses.fields(part)
)
FIELDS = {one.name: one for _, one in ROWS}
FLAGS = tuple(name for name, one in FIELDS.items() if not one.metadata["of_weights"])
# Field -> (field, value, ...) of the choice that it belongs to; that field may belong to another.
# Without values, the choice is a field that is unset by default, and any value of it will do.
CHOICES = {name: one.metadata["only"] for name, one in FIELDS.items() if one.metadata["only"]}


def named(name: str) -> str:
    """Return what messages call a setting: its flag, or its key where it has no flag."""
    return argument(name, FIELDS[name].metadata) if name in FIELDS else flag(name)


def settings(config: Config) -> list[tuple[str, dataclasses.Field, object]]:
    """Return every (section name, field, value) that is in force in this Config, in file order."""
    found = [(section, one, getattr(getattr(config, section), one.name)) for section, one in ROWS]
    values = {one.name: value for _, one, value in found}
    return [
        row for row in found if row[1].name not in CHOICES or not_taken(row[1].name, values) is None
    ]


def not_taken(name: str, values: dict) -> tuple[str, ...] | None:
    """Return the (field, value, ...) that a field needs to be in force, or None if it is."""
    if name not in CHOICES:
        return None
    choice, *wanted = CHOICES[name]
    other = not_taken(choice, values)
    if other is None and (values[choice] in wanted if wanted else values[choice] is not None):
        return None
    return other or (choice, *wanted)


def in_force(config: Config) -> dict[str, object]:
    """Return the value of every field that has a meaning in this Config, by its name."""
    return {one.name: value for _, one, value in settings(config)}


def build(values: dict) -> Config:
    """Return a Config from flat values on top of their preset.

    Batch size and microbatches are left to resolve(). Values of a choice that is not taken are
    dropped.
    """
    preset = PRESETS.get(values.get("preset", "tiny"), {})
    values = {
        name: value
        for name, value in preset.items()
        if name not in ("batch_size", "num_microbatches")
    } | values
    parts = [
        part(
            **{one.name: values[one.name] for one in dataclasses.fields(part) if one.name in values}
        )
        for part in (GridConfig, TrainConfig, RunConfig, MemoryConfig)
    ]
    return Config(model_config(values), *parts)
