"""What a computing command needs before it starts: checked configuration, data and device."""

from __future__ import annotations

from dataclasses import dataclass

from mpipar import data
from mpipar import ops as ops_module
from mpipar.checkpoint import weights as checkpoint
from mpipar.commands.resolve import resolve
from mpipar.config.run import RunConfig
from mpipar.config.sections import Config, is_in_force
from mpipar.data.source import BYTE_VOCABULARY
from mpipar.errors import DataError, EnvironmentProblem, UsageError
from mpipar.inference.generate import encode


@dataclass(frozen=True)
class Inputs:
    """A complete configuration, and its ops, data and prompt. notes: lines for the user."""

    config: Config
    notes: list[str]
    ops: object
    train_part: object
    held_out: object
    prompt: list[int]


def prepare(reading, world_size: int, host_rank: int, checks=()) -> Inputs:
    """Check everything that can be checked before allocating anything.

    host_rank: place of this process on its host. checks: the command's own pairs (function that
    lists a config's problems, error class). Raises one UserError with all problems of flags,
    layout, schedule, prompt, data and device.
    """
    found = {}

    def data_problems(config):
        try:
            found["parts"], found["what"] = data.data_of(config.model).load(config)
        except DataError as error:
            return error.problems
        return []

    def device_problems(config):
        try:
            found["ops"] = ops_module.make_for(config.run, host_rank)
        except EnvironmentProblem as error:
            return error.problems
        return []

    def prompt_problems(config):
        try:
            found["prompt"] = prompt_tokens(config)
        except UsageError as error:
            return error.problems
        return []

    checks = [*checks, (prompt_problems, UsageError), (data_problems, DataError),
              (checkpoint.weight_problems, DataError), (device_problems, EnvironmentProblem)]
    config, notes = resolve(reading, world_size, checks)
    train_part, held_out = found["parts"]
    notes.append(f"data: {found['what']}; {len(train_part):,} to train on,"
                 f" {len(held_out):,} held out")
    return Inputs(config, notes, found["ops"], train_part, held_out, found["prompt"])


def prompt_tokens(config) -> list[int]:
    """The prompt's tokens; none for a model without text, or if the default prompt does not fit.

    The default prompt is text. A model of token ids starts from the held-out part instead.
    """
    if not is_in_force(config, "prompt"):
        return []
    run, vocab_size = config.run, config.model.vocab_size
    default = run.prompt == RunConfig().prompt and vocab_size > BYTE_VOCABULARY
    return [] if default or not run.sample_tokens else encode(run.prompt, vocab_size)
