"""What a command that computes needs before it starts: configuration, data and device, all checked."""

from __future__ import annotations

from mpipar import ops as ops_module
from mpipar.commands.resolve import resolve
from mpipar.data.rows import split
from mpipar.data.source import load_tokens
from mpipar.errors import DataError, EnvironmentProblem, UsageError
from mpipar.generate import encode


def prepare(reading, world_size: int):
    """Check everything that can be checked before anything is allocated.

    Returns (config, notes, ops, (training part, held-out part)); raises one UserError with all problems
    found: flags, layout, schedule, prompt, data and device. Comm: none.
    """
    found = {}

    def data_problems(config):
        try:
            tokens, found["what"] = load_tokens(config.run.data, config.model.vocab_size)
            found["parts"] = split(tokens, config.train.batch_size, config.model.seq_len)
        except DataError as error:
            return error.problems
        return []

    def device_problems(config):
        try:
            found["ops"] = ops_module.make(config.run.device, config.run.dtype)
        except EnvironmentProblem as error:
            return error.problems
        return []

    def prompt_problems(config):
        try:
            encode(config.run.prompt, config.model.vocab_size)
        except UsageError as error:
            return error.problems
        return []

    checks = [(prompt_problems, UsageError), (data_problems, DataError),
              (device_problems, EnvironmentProblem)]
    config, notes = resolve(reading, world_size, checks)
    train_part, held_out = found["parts"]
    notes.append(f"data: {found['what']}; {len(train_part):,} to train on, {len(held_out):,} held out")
    return config, notes, found["ops"], (train_part, held_out)
