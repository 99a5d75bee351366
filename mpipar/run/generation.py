"""The work of `mpipar generate`: prompts, and the text that a model adds to them, on any layout."""

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.config.run import PROMPT
from mpipar.config.sections import Config
from mpipar.config.text import printable
from mpipar.errors import EXIT_OK, DataError, UsageError, broken
from mpipar.run.checkpoint import formats
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.tokenizer_files import GENERATION, token_ids
from mpipar.run.data.documents import check_kind
from mpipar.run.data.tokenizer import Tokenizer, tokenizer_of
from mpipar.run.files.bounded import problems_as, read_text
from mpipar.run.files.settings import ParsedConfig
from mpipar.run.folder import find_source, tokenizer_folder
from mpipar.run.inference.generate import FULL, STOP, Sampling, Text, generate
from mpipar.run.process.session import Session
from mpipar.run.resolve import Prompt, config_facts, digest_of_value, encode_prompts, resolve
from mpipar.train.worker import Worker

ROWS_OF_A_GROUP = 8  # prompts that pass the pipeline together, unless --batch-size is given
MOST_BYTES = 64 << 20  # of a file of prompts


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
    shown = visible(tokenizer, prompt)
    for piece in show(shown, added, tokenizer):
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
            found = answer(request.tokenizer, prompts[text.number], text)
            yield json.dumps(found) + "\n"


def prepare(parsed, args, world_size: int, host_rank: int) -> Request:
    """Check everything; raise one UserError with all problems.

    args: `generate.Arguments`; for run_folder see `find_source`. host_rank: place of this process
    on its host.
    """
    weights, given = find_source(args.run_folder, args.run_folder), parsed.config
    formats.model_settings(weights, where=args.run_folder)
    start = replace(
        given,
        run=replace(given.run, init_from=weights),
        grid=replace(given.grid, num_microbatches=given.grid.num_microbatches or 1),
        train=replace(given.train, optimizer="sgd"),
    )
    both = args.prompts is not None and args.prompt is not None
    unread = (*parsed.unread, *[f"--prompt and --prompts {args.prompts}: give one of them"] * both)
    beside, found = tokenizer_folder(weights), {}
    prompt = PROMPT if args.prompt is None else args.prompt
    typed = [(f"--prompt {prompt!r}", prompt)]

    def read_texts(config):
        texts = typed if args.prompts is None else read_prompts(args.prompts)
        found["tokenizer"] = tokenizer_of(beside, config.model.vocab_size)
        found["prompts"] = encode_prompts(found["tokenizer"], texts, config.model)

    def usage_problems(config):
        cp, size = config.grid.cp, config.model.vocab_size
        return broken(
            (
                cp > 1,
                (
                    f"--cp {cp}: cuts the tokens of a row, but a text grows by one token at a time;"
                    " use --dp for more texts, or --tp or --pp to cut the model"
                ),
            ),
            *(
                (one >= size, f"--stop-token {one}: is not in the vocabulary; use ids below {size}")
                for one in args.stop_token
            ),
        )

    def read_weights(config):
        unread = checkpoint.unread_notes(config)
        found["notes"] = [*formats.start_notes(weights, trains=False), *unread]

    checks = [
        (read_texts, UsageError),
        (usage_problems, UsageError),
        (read_weights, DataError),
    ]
    config, _ = resolve(replace(parsed, config=start, unread=unread), world_size, checks)
    groups = given.grid.num_microbatches or config.grid.pp  # as many as work at the same time
    config = replace(config, grid=replace(config.grid, num_microbatches=groups))
    together = given.train.batch_size or ROWS_OF_A_GROUP * config.grid.dp * groups
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


def ends_of(folder, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end a text.

    They are those of generation_config.json, else of config.json, else the tokenizer's.
    """
    for name in (GENERATION, "config.json"):
        found = token_ids(folder / name, vocab_size)["eos_token_id"]
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return () if tokenizer.end is None else (tokenizer.end,)


# Prompts and texts.


def read_prompts(path: str) -> list[tuple[str, str]]:
    """Return (place, text) of each prompt in a file, one per line; blank lines are skipped.

    Raises DataError.
    """
    with problems_as(DataError, path):
        check_kind(Path(path))
        text = read_text(path, most_bytes=MOST_BYTES).replace("\r\n", "\n")
    found = [(f"{path}: line {number}", line) for number, line in enumerate(text.split("\n"), 1)]
    found = [(where, line) for where, line in found if line.strip()]
    if not found:
        raise DataError(f"{path}: has no prompt; write one on each line")
    return found


def show(prompt: list[int], tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the prompt's text and what each token adds to it; together they are the whole text.

    The last bytes may be part of a character that later tokens complete, so they wait for them. A
    tokenizer shows such bytes as one replacement mark, or, with byte fallback, as one for each.
    """
    seen, shown = prompt[:-1], 0
    for token in itertools.chain(prompt[-1:], tokens):
        seen.append(token)
        text = tokenizer.decode(seen)
        ready = max(shown, len(text.rstrip("\ufffd")))
        yield text[shown:ready]
        shown = ready
    yield tokenizer.decode(seen)[shown:]


def visible(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Return the prompt's tokens without those that the tokenizer puts before every text."""
    own = tokenizer.encode(prompt.typed)
    before = len(prompt.ids) - len(own)
    return own if own and before > 0 and prompt.ids[before:] == own else prompt.ids


def answer(tokenizer: Tokenizer, prompt: Prompt, text: Text) -> dict:
    """Return one answer of --prompts: prompt, continuation, its tokens, and why it ended."""
    added = text.tokens[len(prompt.ids) :]
    spoken = added[:-1] if text.end == STOP else added
    before = visible(tokenizer, prompt)
    shown = len(tokenizer.decode(before).rstrip("\ufffd"))  # the rest may become a character
    return {
        "prompt": prompt.typed,
        "text": tokenizer.decode([*before, *spoken])[shown:],
        "tokens": added,
        "end": text.end,
    }
