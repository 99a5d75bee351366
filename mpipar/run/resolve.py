"""From what the user typed to a complete Config, and to the inputs of a computing command.

One error reports all mistakes of flags, layout, files and device at once. Then all ranks compare
what determines a job's numbers. Hosts may hold different copies of a file: of data, weights, a
tokenizer, a schedule, or prompts. Ranks that start from them would train another model than
intended, so every byte is compared. One process per host reads a large file on behalf of all that
have the same one there.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from mpipar import ops as ops_module
from mpipar.config import resolve as config_resolve
from mpipar.config.grid import GridConfig
from mpipar.config.resolve import Rule
from mpipar.config.run import PROMPT
from mpipar.config.sections import Config, build, in_force, named
from mpipar.config.setting import flag
from mpipar.errors import DataError, EnvironmentProblem, UsageError, UserError
from mpipar.pipeline.csv_format import read_csv
from mpipar.pipeline.schedules.catalog import FAMILIES, LIMITS, Limit, num_stages
from mpipar.run.checkpoint import formats
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.weight_files import check_digests
from mpipar.run.data import parts
from mpipar.run.data.prepared import is_dataset, read_dataset
from mpipar.run.data.token_file import fingerprint, pieces_of
from mpipar.run.data.tokenizer import (
    Tokenizer,
    can_be_read,
    files_digest,
    read_files,
    tokenizer_of,
)
from mpipar.run.files.bounded import open_regular, problems_as
from mpipar.run.files.digests import digest_of
from mpipar.run.files.settings import ParsedConfig
from mpipar.run.folder import find_source, source_files, tokenizer_folder

# How routers are trained, which weights do not fix; but a bias per expert is one of the weights.
ROUTING = ("router_balance", "router_loss_coef")
MOST_PROBLEMS = 10  # listed for a file of prompts


def resolve(
    parsed: ParsedConfig,
    world_size: int,
    checks: Iterable[config_resolve.Check] = (),
    machine: str | None = None,
) -> tuple[Config, list[str]]:
    """Return a command's complete Config for this number of ranks, and notes for the user.

    checks: the command's own, besides the table of illegal combinations and the shape of weights.
    machine: the file of costs by which `train` chooses. Raises one UserError with all problems.
    Every rank that calls it gets the same Config.
    """
    config, source_notes, path = parsed.config, [], parsed.config.grid.schedule_csv
    errors: list[UserError] = []
    facts = {"machine": machine, "chooses_layout": parsed.chooses_layout}
    try:
        facts["csv"] = path and read_csv(Path(path))
    except UsageError as error:
        errors.append(error)
    if config.run.init_from is not None:
        try:
            source = find_source(config.run.init_from, f"--init-from {config.run.init_from}")
            given = parsed.given if "seq_len" not in parsed.bad else {}
            shape = formats.model_settings(source, given.get("seq_len"))
            if "seq_len" in given:  # rows may be shorter than the table of positions
                longest = shape.get("max_positions", shape.pop("seq_len"))
                if shape["positions"] == "learned":  # rotations fit rows of any length
                    shape["max_positions"] = longest
                    shape["seq_len"] = min(given["seq_len"], longest)
            config = with_weights_shape(parsed, shape, source)
            parsed = replace(parsed, config=config)
            source_notes = formats.start_notes(source)
        except UserError as error:
            errors.append(error)
    elif (size := data_vocabulary(parsed)) > config.model.vocab_size:
        config = replace(config, model=replace(config.model, vocab_size=size))
        source_notes = [f"--vocab-size {size}, the vocabulary of the data"]
    if problems := parsed.problems:
        errors.insert(0, UsageError(problems))
    config, notes = config_resolve.resolve(
        config, world_size, checks, errors=errors, bad=parsed.bad, rules=RULES, **facts
    )
    return config, [*parsed.notes, *notes, *source_notes]


def with_weights_shape(parsed: ParsedConfig, shape: dict, source: str) -> Config:
    """Return the Config with the shape of its first weights; UsageError if flags contradict it.

    What the weights fix counts as given, so that a flag may belong to it, as --router-balance to
    the experts of the weights.

    source: the folder of these weights, which the Config names from now on.
    """
    typed = in_force(parsed.config) | parsed.given
    given = typed.keys() & parsed.given.keys() - parsed.bad
    shape = {
        name: value
        for name, value in shape.items()
        if not (name in ROUTING and name in given and "bias" not in (value, typed[name]))
    }
    found = [
        f"{named(name)} {typed[name]}: contradicts --init-from {typed['init_from']}, where it "
        f"is {value}; leave {named(name)} out"
        for name, value in shape.items()
        if name in given and typed[name] not in (None, value)
    ]
    if found:
        raise UsageError(found)
    kept = {name: value for name, value in typed.items() if value is not None}
    return build(kept | shape | {"init_from": source})


def data_vocabulary(parsed: ParsedConfig) -> int:
    """Return the vocabulary size of prepared data, 0 if the user names the model's."""
    if "vocab_size" not in parsed.given:
        for folder in filter(is_dataset, parsed.config.run.data):
            with suppress(DataError):  # reported where the data is read
                return read_dataset(Path(folder))[0].vocab_size
    return 0


# --- the full table of illegal combinations: that of settings alone, and the schedules'


def breaks(limit: Limit, v: SimpleNamespace) -> bool:
    """Return whether counts break a limit of their schedule; a file has none."""
    family = None if v.schedule_csv else FAMILIES.get(v.schedule)
    return family is not None and limit.broken(family, v.pp, v.num_microbatches, v.chunks)


def stages(v: SimpleNamespace) -> int | None:
    """Return the number of stages into which the schedule of these values splits the model."""
    if v.csv or v.schedule_csv or v.schedule not in FAMILIES:
        return v.csv.num_stages if v.csv else None
    return num_stages(v.schedule, v.pp, v.chunks)


RULES = (
    *config_resolve.RULES,
    *(
        Rule(
            limit.name,
            limit.settings,
            partial(breaks, limit),
            limit.sentence,
            complete="pp" in limit.settings,  # which may be chosen
        )
        for limit in LIMITS
    ),
    Rule(
        "number of stages",
        ("stage_layers", "schedule_csv", "schedule", "pp", "chunks"),
        lambda v: v.stage_layers is not None and stages(v) not in (None, len(v.stage_layers)),
        "it must give the number of blocks for each stage of the schedule; use as many numbers as"
        " there are stages, or leave --stage-layers out",
        complete=True,
    ),
    *(
        Rule(
            f"{name} and a file",
            (name, "schedule_csv"),
            lambda v, name=name: v.schedule_csv and getattr(v, name) != getattr(GridConfig, name),
            f"the file brings its own order of work; leave {flag(name)} out",
        )
        for name in ("schedule", "chunks")
    ),
    *(
        Rule(
            f"{name.replace('_', ' ')} of a file",
            (name, "schedule_csv"),
            lambda v, name=name, own=own: v.csv and getattr(v, name) != getattr(v.csv, own),
            f"the schedule of the file is made for {flag(name)} {{csv.{own}}}; use that",
            complete=True,
        )
        for name, own in (("pp", "pp_size"), ("num_microbatches", "num_microbatches"))
    ),
)


@dataclass(frozen=True)
class Prompt:
    """A prompt as it was typed, and its tokens."""

    typed: str
    ids: list[int]


class Inputs:
    """A complete configuration with its ops, data, tokenizer and prompt.

    config, ops, tokenizer. train_part, held_out: tokens. prompt: the tokens with which the text at
    the end begins. notes: for the user.
    """

    def __init__(
        self, parsed, world_size: int, host_rank: int, checks=(), started=None, machine=None
    ):
        """Check everything that can be checked before anything is allocated.

        host_rank: place of this process on its host; only the first reads all token files once.
        checks: the command's own pairs (function that lists a config's problems, error class).
        started: the checkpoint from which the run resumes. machine: the file of --machine. Raises
        one UserError with all problems of flags, layout, schedule, prompt, data and device.
        """
        self.train_part = self.held_out = None

        def read_data(config):
            (self.train_part, self.held_out), self.what = parts.load(
                config, thorough=host_rank == 0
            )

        def read_text(config):
            if self.train_part is not None:  # whether a prompt is text depends on the data
                # That of prepared data, else of the first weights, else the default.
                folder = next(filter(is_dataset, config.run.data), None) or tokenizer_folder(
                    started or config.run.init_from
                )
                is_text = self.train_part.dtype == np.uint8
                self.tokenizer = tokenizer_of(folder, config.model.vocab_size, is_text)
                self.prompt = prompt_tokens(config, self.tokenizer, self.held_out)

        def read_weights(config):
            self.unread = checkpoint.unread_notes(config)

        def make_ops(config):
            self.ops = ops_module.make_for(config.run, host_rank)

        checks = [
            *checks,
            (read_data, DataError),
            (read_text, UsageError),
            (read_weights, DataError),
            (make_ops, EnvironmentProblem),
        ]
        self.config, notes = resolve(parsed, world_size, checks, machine)
        self.notes = [
            *notes,
            (
                f"data: {self.what}; {len(self.train_part):,} to train on,"
                f" {len(self.held_out):,} held out"
            ),
            *self.unread,
            *tokenizer_notes(self.config, self.tokenizer, self.train_part),
        ]


def tokenizer_notes(config, tokenizer: Tokenizer, tokens) -> list[str]:
    """Return notes on what the ids of token files mean. tokens: the training part."""
    folder, notes = tokenizer_folder(config.run.init_from), []
    files = read_files(folder) if folder else {}
    if can_be_read(files) and files_digest(files) != files_digest(tokenizer.files):
        notes.append(
            f"the tokenizer files of --data differ from those of {folder}: where they do, an id"
            " had another meaning when the weights were trained"
        )
    prepared = any(map(is_dataset, config.run.data))
    if tokens.dtype != np.uint8 and not prepared and tokenizer.is_bytes:
        notes.append("a vocabulary of 256 is one of bytes: ids of --data are shown as bytes")
    return notes


def prompt_tokens(config, tokenizer: Tokenizer, held_out) -> list[int]:
    """Return the tokens with which the text at the end begins, or [] if none is asked for.

    They are four letters of text. A model of token ids, of shorter rows, or without these letters
    starts from the held-out part instead.
    """
    if not config.run.sample_tokens:
        return []
    try:
        return encode_prompts(tokenizer, [("--prompt", PROMPT)], config.model)[0].ids
    except UsageError:
        return np.asarray(held_out[:1]).tolist()


def encode_prompts(tokenizer: Tokenizer, texts, model) -> list[Prompt]:
    """Return the prompts of [(where, text)]; raise one UsageError for all misfits.

    model: a ModelConfig.
    """
    found, problems = [], []
    for where, text in texts:
        ids = tokenizer.encode_prompt(text)
        found.append(Prompt(text, ids))
        if not ids or max(ids) >= model.vocab_size:
            problems.append(
                f"{where}: needs at least one token, all below the model's vocabulary of"
                f" {model.vocab_size:,}; {tokenizer.takes}"
            )
        elif len(ids) > model.seq_len:
            problems.append(
                f"{where}: has {len(ids):,} tokens, but the model reads at most"
                f" {model.seq_len:,} (its --seq-len): shorten it"
            )
    if problems:
        raise UsageError(problems[:MOST_PROBLEMS])
    return found


# --- what all ranks must have alike


def compare_inputs(session, inputs, checkpoint: str = "") -> tuple[dict, str]:
    """Return the data's fingerprint, and the digest of the checkpoint or else of the first weights.

    That is "" if there are none of either. Unless all ranks have the same, they leave together.
    Comm: that of `digests_on_host` and of `Session.compare`.
    """
    arrays = [inputs.train_part, inputs.held_out]
    files = {piece.file.name: piece.file for piece in pieces_of(arrays)}
    digests = digests_on_host(
        session, lambda: {name: digest_of(file, name) for name, file in files.items()}
    )
    found = session.agree(lambda: fingerprint(arrays, digests))
    facts = config_facts(session, inputs.config, inputs.tokenizer)
    if checkpoint:
        facts["checkpoint"] = session.agree(lambda: digest_of_weights(checkpoint))
    session.compare(
        facts
        | {
            "data": " ".join(map(str, found.values())),
            "prompt": digest_of_value(inputs.prompt),
        }
    )
    return found, facts.get("checkpoint") or facts.get("weights", "")


def config_facts(session, config: Config, tokenizer) -> dict[str, str]:
    """Return facts of a complete Config: its values, and the files that it names except the data.

    Raises DataError if the weights are damaged. Comm: agreements, that of `digests_on_host`.
    """
    facts = {flag(name): str(value) for name, value in in_force(config).items()}
    if tokenizer is not None:
        facts["tokenizer"] = files_digest(tokenizer.files)
    csv, weights = config.grid.schedule_csv, config.run.init_from
    if csv is not None:
        found = digests_on_host(session, lambda: _digests([Path(csv)]))
        facts["schedule"] = digest_of_value(found)
    if weights is not None:
        found = digests_on_host(session, lambda: _digests(source_files(weights)))
        session.agree(lambda: check_digests(Path(weights), found))
        facts["weights"] = digest_of_value(found)
    return facts


def digest_of_weights(folder: str) -> str:
    """Return the SHA-256 of all bytes of a folder's weights, or of a checkpoint's manifest."""
    return digest_of_value(_digests(source_files(folder)))


def _digests(paths: Iterable[Path]) -> dict[str, str]:
    """Return {name: SHA-256} of regular files. Raises DataError."""
    found = {}
    for path in paths:
        with problems_as(DataError, str(path)), open_regular(path) as file:
            found[path.name] = digest_of(file, str(path))
    return found


def digest_of_value(value) -> str:
    """Return the SHA-256 of a JSON-able value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def digests_on_host(session, digests: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Return what the function returns: {name: SHA-256} of files, over every byte of them.

    The first rank of each host calls it first and reads them, so that the others find the digests
    in the user's cache. Comm: two agreements.
    """
    own = session.agree(lambda: digests() if session.host_rank == 0 else {})
    return session.agree(lambda: own or digests())
