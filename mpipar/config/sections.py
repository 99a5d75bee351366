"""The whole configuration: its sections, and their fields in one flat key space.

The fields are the only source: command-line flags, TOML keys and `config.toml` are generated from
them. Field `seq_len` = flag `--seq-len` = TOML key `seq-len`. `None` means "chosen by resolve()",
which turns a Config and a number of ranks into a complete one. The defaults are the preset `tiny`;
PRESETS holds what the other presets change.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from mpipar.config.grid import GridConfig
from mpipar.config.model import ModelConfig
from mpipar.config.presets import OF_MODEL, PRESETS
from mpipar.config.run import RunConfig
from mpipar.config.train import TrainConfig


@dataclass(frozen=True)
class Config:
    """Everything a command needs to know."""

    model: ModelConfig = field(default_factory=ModelConfig)
    grid: GridConfig = field(default_factory=GridConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)


def settings(config: Config) -> Iterable[tuple[str, dataclasses.Field, object]]:
    """Every (section name, field, value) of a Config, in the order they are written."""
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        for one in dataclasses.fields(part):
            yield section.name, one, getattr(part, one.name)


FIELDS = {one.name: one for _, one, _ in settings(Config())}


def build(values: dict) -> Config:
    """A Config from flat values over their preset; batch size and microbatches wait for resolve."""
    default = OF_MODEL.get(values.get("model", "decoder"), "tiny")
    values = {"preset": default} | values
    preset = PRESETS.get(values["preset"], {})
    values = {name: value for name, value in preset.items()
              if name not in ("batch_size", "num_microbatches")} | values
    parts = {}
    for section in dataclasses.fields(Config):
        names = [one.name for one in dataclasses.fields(section.type)]
        parts[section.name] = section.type(**{n: values[n] for n in names if n in values})
    return Config(**parts)
