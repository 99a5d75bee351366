"""The work of `mpipar generate`: continues texts with a trained model, on any layout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.config.run import PROMPT
from mpipar.config.sections import Config
from mpipar.config.text import printable
from mpipar.errors import EXIT_OK, DataError, UsageError
from mpipar.run.checkpoint import formats
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.tokenizer_files import GENERATION, token_ids
from mpipar.run.compared import config_facts, digest_of_value
from mpipar.run.data.tokenizer import Tokenizer, tokenizer_of
from mpipar.run.files.settings import ParsedConfig
from mpipar.run.inference import prompts as prompts_module
from mpipar.run.inference.generate import FULL, STOP, Sampling, Text, generate
from mpipar.run.inference.prompts import Prompt
from mpipar.run.process.session import Session
from mpipar.run.resolve import resolve
from mpipar.run.source import find_source, tokenizer_folder
from mpipar.train.worker import Worker

FIRST = Prompt("0", [0])  # an id that every model has
ROWS_OF_A_GROUP = 8  # prompts that pass the pipeline together, unless --batch-size is given


@dataclass(frozen=True)
class Request:
    """A complete request. together: how many prompts are continued at the same time.

    notes: for the user.
    """

    config: Config
    ops: object
    tokenizer: Tokenizer
    sampling: Sampling
    prompts: list[Prompt]
    together: int
    notes: list[str]


def run(session: Session, parsed: ParsedConfig, args) -> int:
    """Print a text piece by piece, or write a line of JSON for each prompt in a file.

    args: `commands.generate.Arguments`.
    Comm: that of `config_facts`; see `mpipar.run.inference.generate.generate`.
    """
    world = session.start()
    request = session.agree(lambda: prepare(parsed, args, world.size, session.host_rank))
    config = request.config
    session.compare(
        config_facts(session, config, request.tokenizer)
        | {
            "prompts": digest_of_value([(one.typed, one.ids) for one in request.prompts]),
            "sampling": str(request.sampling),
        }
    )
    worker = Worker(config, Grid.of(config.grid, world.rank), request.ops, Recorder(), world)
    session.agree(lambda: checkpoint.load(worker, config.run.init_from))
    for note in request.notes if world.rank == 0 else ():
        print(f"mpipar: {note}", file=sys.stderr, flush=True)
    pieces = stream(worker, request) if args.prompts is None else answers(worker, request)
    with session.watch.follow_records(worker.recorder, worker.comms), worker.recorder.at("eval"):
        for piece in pieces:
            if world.rank == 0:
                print(piece, end="", flush=True)
    return EXIT_OK


def stream(worker, request: Request) -> Iterator[str]:
    """Yield the text of one prompt for a terminal, with a note if the model can read no more."""
    (prompt,), tokenizer = request.prompts, request.tokenizer
    text = Text(0, list(prompt.ids))
    added = (
        text.tokens[-1] for _ in generate(worker, [text], request.sampling) if text.end != STOP
    )
    shown = prompts_module.visible(tokenizer, prompt)
    for piece in prompts_module.show(shown, added, tokenizer):
        yield printable(piece)
    yield "\n"
    if text.end == FULL and worker.comms.world.index == 0:
        print(
            f"mpipar: the text ends here because the model reads at most"
            f" {worker.config.model.seq_len:,} tokens",
            file=sys.stderr,
            flush=True,
        )


def answers(worker, request: Request) -> Iterator[str]:
    """Yield a line of JSON for each prompt, in order."""
    prompts = request.prompts
    for first in range(0, len(prompts), request.together):
        texts = [
            Text(number, list(prompt.ids))
            for number, prompt in enumerate(prompts[first : first + request.together], first)
        ]
        for _ in generate(worker, texts, request.sampling):
            pass
        for text in texts:
            found = prompts_module.answer(request.tokenizer, prompts[text.number], text)
            yield json.dumps(found) + "\n"


def prepare(parsed, args, world_size: int, host_rank: int) -> Request:
    """Check everything; raise one UserError with all problems.

    args: `generate.Arguments`; for run_folder see `find_source`. host_rank: place of this process
    on its host.
    """
    weights, given = weights_of(args.run_folder), parsed.config
    start = replace(
        given,
        run=replace(given.run, init_from=weights),
        grid=replace(given.grid, num_microbatches=given.grid.num_microbatches or 1),
        train=replace(given.train, optimizer="sgd"),
    )
    both = args.prompts is not None and args.prompt is not None
    unread = (*parsed.unread, *[f"--prompt and --prompts {args.prompts}: give one of them"] * both)
    beside, texts, found = tokenizer_folder(weights), [], {"notes": []}
    is_default = args.prompts is None and args.prompt is None
    prompt = PROMPT if args.prompt is None else args.prompt

    def read_files(config):
        texts[:] = (
            [(f"--prompt {prompt!r}", prompt)]
            if args.prompts is None
            else prompts_module.read_prompts(args.prompts)
        )
        found["tokenizer"] = tokenizer_of(beside, config.model.vocab_size)

    def read_texts(config):
        try:
            if "tokenizer" in found:
                found["prompts"] = prompts_module.encode_prompts(
                    found["tokenizer"], texts, config.model
                )
        except UsageError:
            if not is_default:
                raise
            # The user did not type this text; a model of plain ids, for example, cannot read it.
            found["prompts"] = [FIRST]
            found["notes"].append(
                f"this model cannot read the default prompt {PROMPT!r}, so the text"
                f" begins with id {FIRST.typed}; for another beginning, give --prompt:"
                f" {found['tokenizer'].takes}"
            )

    checks = [
        (read_files, DataError),
        (read_texts, UsageError),
        (layout_problems, UsageError),
        (lambda config: stop_problems(args.stop_token, config.model.vocab_size), UsageError),
        (checkpoint.weight_problems, DataError),
    ]
    config, _ = resolve(replace(parsed, config=start, unread=unread), world_size, checks)
    groups = given.grid.num_microbatches or config.grid.pp  # as many as work at the same time
    config = replace(config, grid=replace(config.grid, num_microbatches=groups))
    together = given.train.batch_size or ROWS_OF_A_GROUP * config.grid.dp * groups
    found["notes"] += [
        *formats.start_notes(weights, trains=False),
        *checkpoint.unread_notes(config),
    ]
    ends = ends_of(beside, found["tokenizer"], config.model.vocab_size)
    return Request(
        config,
        ops_module.make_for(config.run, host_rank),
        **found,
        sampling=Sampling(
            args.sample_tokens,
            args.temperature,
            config.run.seed,
            args.top_k,
            args.top_p,
            args.stop_token or ends,
        ),
        together=together,
    )


def stop_problems(ids: tuple[int, ...], vocab_size: int) -> list[str]:
    """Return what is wrong if an id that ends a text is not in the vocabulary."""
    return [
        f"--stop-token {one}: is not in the vocabulary; use ids below {vocab_size}"
        for one in ids
        if one >= vocab_size
    ]


def layout_problems(config) -> list[str]:
    """Return what is wrong if the layout cuts an axis that a single token does not have."""
    if config.grid.cp == 1:
        return []
    return [
        (
            f"--cp {config.grid.cp}: cuts the tokens of a row, but a text grows by one token at a"
            " time; use --dp for more texts, or --tp or --pp to cut the model"
        )
    ]


def weights_of(run_folder: str) -> str:
    """Return the folder with a decoder's weights: see `find_source`. Raises UserError."""
    weights = find_source(run_folder, run_folder)
    formats.model_settings(weights, where=run_folder)
    return weights


def ends_of(folder, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end a text.

    They are those of generation_config.json, else of config.json, else the tokenizer's.
    """
    for name in (GENERATION, "config.json"):
        found = token_ids(folder / name, vocab_size)["eos_token_id"]
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return () if tokenizer.end is None else (tokenizer.end,)
