"""What a command that computes needs before it starts: configuration, data and device, all
checked.
"""

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
    """A complete configuration and what belongs to it; notes are lines for the user."""

    config: Config
    notes: list[str]
    ops: object
    train_part: object
    held_out: object
    prompt: list[int]


def prepare(reading, world_size: int, host_rank: int, checks=()) -> Inputs:
    """Check everything that can be checked before anything is allocated.

    host_rank: place of this process on its host. checks: a command's own (problems of a config,
    error class). Raises one UserError with all problems found: flags, layout, schedule, prompt,
    data and device. Comm: none.
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
    """The prompt's tokens; none of a model without text, none where nobody typed one that this
    vocabulary could understand.

    The default prompt is text, so a model of token ids starts from the held-out part instead.
    """
    if not is_in_force(config, "prompt"):
        return []
    run, vocab_size = config.run, config.model.vocab_size
    default = run.prompt == RunConfig().prompt and vocab_size > BYTE_VOCABULARY
    return [] if default or not run.sample_tokens else encode(run.prompt, vocab_size)
