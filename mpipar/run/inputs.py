"""Inputs of a computing command: checked configuration, data and device."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from mpipar import ops as ops_module
from mpipar.config.run import PROMPT
from mpipar.config.sections import Config
from mpipar.errors import DataError, EnvironmentProblem, UsageError
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.data import rows
from mpipar.run.data.prepared import is_dataset
from mpipar.run.data.tokenizer import (
    Tokenizer,
    files_digest,
    has_tokenizer,
    read_files,
    tokenizer_of,
)
from mpipar.run.generation import encode_prompts
from mpipar.run.resolve import resolve
from mpipar.run.source import tokenizer_folder


@dataclass(frozen=True)
class Inputs:
    """A complete configuration with its ops, data, tokenizer and prompt. notes: for the user."""

    config: Config
    notes: list[str]
    ops: object
    train_part: object
    held_out: object
    tokenizer: Tokenizer
    prompt: list[int]


def prepare(
    parsed, world_size: int, host_rank: int, checks=(), started=None, machine=None
) -> Inputs:
    """Check everything that can be checked before anything is allocated.

    host_rank: place of this process on its host; only the first reads all token files once.
    checks: the command's own pairs (function that lists a config's problems, error class). started:
    the checkpoint from which the run resumes. machine: the file of --machine. Raises one UserError
    with all problems of flags, layout, schedule, prompt, data and device.
    """
    found = {}

    def read_data(config):
        found["parts"], found["what"] = rows.load(config, thorough=host_rank == 0)

    def make_ops(config):
        found["ops"] = ops_module.make_for(config.run, host_rank)

    def read_text(config):
        if "parts" in found:  # whether a prompt is text depends on the data
            found["tokenizer"] = tokenizer_of_run(config, started, found["parts"][0])
            found["prompt"] = prompt_tokens(config, found["tokenizer"])

    def read_weights(config):
        found["unread"] = checkpoint.unread_notes(config)

    checks = [
        *checks,
        (read_data, DataError),
        (read_text, UsageError),
        (read_weights, DataError),
        (make_ops, EnvironmentProblem),
    ]
    config, notes = resolve(parsed, world_size, checks, machine)
    train_part, held_out = found["parts"]
    notes.append(
        f"data: {found['what']}; {len(train_part):,} to train on, {len(held_out):,} held out"
    )
    notes += found["unread"]
    notes += tokenizer_notes(config, found["tokenizer"], train_part)
    return Inputs(
        config, notes, found["ops"], train_part, held_out, found["tokenizer"], found["prompt"]
    )


def tokenizer_of_run(config, started, tokens) -> Tokenizer:
    """Return the tokenizer for prompts and generated text.

    It is that of prepared data, else of the weights that the run started from, else the default.
    tokens: the training part.
    Raises DataError and EnvironmentProblem.
    """
    prepared = next(filter(is_dataset, config.run.data), None)
    source = started or config.run.init_from
    folder = prepared or (tokenizer_folder(source) if source else None)
    return tokenizer_of(folder, config.model.vocab_size, is_text=tokens.dtype == np.uint8)


def tokenizer_notes(config, tokenizer: Tokenizer, tokens) -> list[str]:
    """Return notes on what the ids of token files mean. tokens: the training part."""
    source, data = config.run.init_from, config.run.data
    folder, notes = tokenizer_folder(source) if source else None, []
    if folder and has_tokenizer(folder) and files_digest(read_files(folder)) != tokenizer.digest:
        notes.append(
            f"the tokenizer files of --data differ from those of {folder}: where they do, an id"
            " had another meaning when the weights were trained"
        )
    if tokens.dtype != np.uint8 and not any(map(is_dataset, data)) and tokenizer.is_bytes:
        notes.append("a vocabulary of 256 is one of bytes: ids of --data are shown as bytes")
    return notes


def prompt_tokens(config, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens with which the text at the end begins; none if the model can't read them.

    The prompt is four letters of text. A model of token ids, of shorter rows, or without these
    letters starts from the held-out part instead.
    """
    if not config.run.sample_tokens:
        return []
    with suppress(UsageError):
        return encode_prompts(tokenizer, [("--prompt", PROMPT)], config.model)[0].ids
    return []
