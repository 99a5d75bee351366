"""Text generation, token by token, through the pipeline and cut layers that train the model.

Prompts are distributed over groups, which are the microbatches of the pipeline. A first round of
forward passes reads the prompts (prefill); each further round reads one token of every text
(decode), with keys and values of earlier tokens in the cache (layers/parallel/kv_cache.py).
Letters: B rows of a group, T new tokens in a round.

No rank ever sees all logits. Each rank offers the largest in its part of the vocabulary, and the
largest of these are the same on every layout. A draw is a pure function of them and of (seed,
number of the prompt, position), so every layout draws the same text.

`run` is the work of `mpipar generate`: prompts, and the text that a model adds to them.
"""

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpipar import ops as ops_module
from mpipar.comm.grid import Grid
from mpipar.comm.recorder import Recorder
from mpipar.config.run import PROMPT
from mpipar.config.text import printable
from mpipar.errors import EXIT_OK, DataError, NonFiniteError, UsageError, broken
from mpipar.layers.parallel.kv_cache import KVCache
from mpipar.layers.stash import Batch
from mpipar.run.checkpoint import formats
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checkpoint.weights import GENERATION, token_ids
from mpipar.run.data.documents import is_json_lines
from mpipar.run.data.tokenizer import Tokenizer, tokenizer_of
from mpipar.run.files.bounded import problems_as, read_text
from mpipar.run.files.settings import ParsedConfig, forced
from mpipar.run.folder import find_source, tokenizer_folder
from mpipar.run.process.session import Session
from mpipar.run.resolve import Prompt, config_facts, digest_of_value, encode_prompts, resolve
from mpipar.train.gradsync import all_reduce_scalars
from mpipar.train.worker import Worker

ROWS_OF_A_GROUP = 8  # prompts that pass the pipeline together, unless --batch-size is given
MOST_BYTES = 64 << 20  # of a file of prompts
# Why a text has ended.
LENGTH, STOP, FULL = "length", "stop", "seq_len"


class Sampling(NamedTuple):
    """Sampling parameters.

    num_tokens: the most that are added. temperature: 0 takes the most likely token. top_k: draw
    only from this many of the most likely. top_p: of these, only the first that add up to this
    probability. stop: ids that end a text.
    """

    num_tokens: int
    temperature: float = 0.0
    seed: int = 0
    top_k: int = 50
    top_p: float = 1.0
    stop: tuple[int, ...] = ()

    @property
    def candidates(self) -> int:
        """How many of the most likely tokens a choice considers."""
        return self.top_k if self.temperature > 0 else 1


@dataclass(eq=False)
class Text:
    """A prompt and its continuation so far.

    number: of the prompt; draws depend on it. end: why the text has ended, "" until then. most: how
    many tokens it may have, and limit: why it ends with these; `generate` sets both.
    """

    number: int
    tokens: list[int]
    end: str = ""
    most: int = 0
    limit: str = ""


class Group:
    """The texts that pass through the pipeline as one microbatch.

    texts: of all replicas. rows: which of them this replica reads. Rows beyond the last text repeat
    it; only one replica reports its tokens. caches: {(stage, mb): KVCache} of the stages here.
    """

    def __init__(self, worker, mb: int, texts, rows: range):
        self.ops, self.seq_len = worker.ops, worker.config.model.seq_len
        self.texts, self.spoken = texts, {*texts[rows.start : rows.stop]}
        self.own = own = [texts[min(row, len(texts) - 1)] for row in rows]
        self.length = max(len(text.tokens) for text in own)  # slots filled after the next round
        self.firsts = np.array([self.length - len(text.tokens) for text in own])
        self.fresh = self.length
        room = max(text.most - len(text.tokens) for text in texts)
        slots = self.ops.asarray(np.arange(self.length + room - 1))  # the last token is never read
        self.caches = {(stage, mb): KVCache(self.firsts.tolist(), slots) for stage in worker.stages}

    def batch(self) -> Batch:
        """Return this replica's next input (B, T): padded whole prompts, or the newest tokens.

        The caches are told where it goes. Positions count from the start of each text: (B, T), or
        (T,) if all texts have the same.
        """
        tokens = np.zeros((len(self.own), self.fresh), np.int64)
        for row, text in zip(tokens, self.own, strict=True):
            newest = text.tokens[-self.fresh :]
            row[self.fresh - len(newest) :] = newest
        new = slice(self.length - self.fresh, self.length)
        for cache in self.caches.values():
            cache.new = new
        # Padding, and texts that have ended, may be at any valid position.
        positions = np.arange(new.start, new.stop) - self.firsts[:, None]
        positions = positions.clip(0, self.seq_len - 1)
        if not self.firsts.any():
            positions = positions[0]
        return Batch(self.ops.asarray(tokens), None, self.ops.asarray(positions))

    def grow(self, ids: dict, sampling: Sampling) -> list[Text]:
        """Append its next token to each text that has not ended, and return these texts."""
        grown = [text for text in self.texts if not text.end]
        for text in grown:
            text.tokens.append(ids[text])
            if ids[text] in sampling.stop:
                text.end = STOP
            elif len(text.tokens) == text.most:
                text.end = text.limit
        self.length, self.fresh = self.length + 1, 1
        return grown


def deal(worker, texts) -> dict[int, Group]:
    """Return {microbatch: Group}: equally many rows for all replicas, padded with the last text."""
    dp, replica = worker.grid.size("dp"), worker.grid.group_rank("dp")
    per_replica = -(-len(texts) // dp)
    num_rows = -(-per_replica // min(per_replica, worker.schedule.num_microbatches))
    own = range(replica * num_rows, (replica + 1) * num_rows)
    return {
        mb: Group(worker, mb, texts[first : first + dp * num_rows], own)
        for mb, first in enumerate(range(0, len(texts), dp * num_rows))
    }


def generate(worker, texts: list[Text], sampling: Sampling) -> Iterator[list[Text]]:
    """Extend texts until each has ended; yield after every round those that have grown.

    All ranks see the same texts. Raises NonFiniteError on every rank if a logit is not finite.
    Comm: per round one forward pass of each group, one all_gather over tp for each, and one
    all_reduce of a number per text over inner.
    """
    full = worker.config.model.seq_len + 1  # it reads seq_len tokens, and one follows the last
    for text in texts:
        asked = len(text.tokens) + sampling.num_tokens
        text.most, text.limit = (asked, LENGTH) if asked <= full else (full, FULL)
        if len(text.tokens) >= text.most:
            text.end = text.limit
    going = [text for text in texts if not text.end]
    groups = deal(worker, going) if going else {}
    speaks = worker.comms["tp"].group_rank == worker.comms["cp"].group_rank == 0
    places = {text: place for place, text in enumerate(going)}
    # Whether a group is at work is the same on all replicas.
    while groups := {
        mb: group for mb, group in groups.items() if not all(text.end for text in group.texts)
    }:
        caches = {key: cache for group in groups.values() for key, cache in group.caches.items()}
        batches = {mb: group.batch() for mb, group in groups.items()}
        outputs = worker.forward(groups, batches.__getitem__, caches)
        chosen = [0.0] * len(going)
        for mb, logits in sorted(outputs.items()):
            for text, candidates in zip(
                groups[mb].own, best(worker, logits, sampling.candidates), strict=True
            ):
                if speaks and text in groups[mb].spoken and not text.end:
                    chosen[places[text]] = draw(candidates, sampling, text.number, len(text.tokens))
        ids = all_reduce_scalars(worker.ops, worker.comms, chosen, "generate.next", "inner")
        if any(np.isnan(ids)):
            raise NonFiniteError(
                "a logit is infinite or not a number, so no token is the most likely; try another"
                " --dtype"
            )
        ids = {text: int(ids[place]) for text, place in places.items()}
        yield [text for group in groups.values() for text in group.grow(ids, sampling)]


def continue_one(worker, prompt: list[int], sampling: Sampling) -> Iterator[int]:
    """Yield the tokens that follow one prompt, the same on every rank. Comm: see `generate`."""
    text = Text(0, list(prompt))
    for _ in generate(worker, [text], sampling):
        yield text.tokens[-1]


def best(worker, logits, count: int) -> np.ndarray:
    """Return the `count` largest of each row of logits (N, V/tp) with ids: (N, count, 2), on host.

    The largest comes first; of equal ones the lowest id does, as the first rank has the lowest ids.
    Comm: one all_gather of 2 * count numbers per row over tp.
    """
    ops, loss = worker.ops, worker.stages[worker.schedule.num_stages - 1].loss
    offers = ops.top_forward(logits, loss.start, loss.vocab_size, min(count, loss.vocab_size))
    offers = ops.to_host(worker.comms["tp"].all_gather(offers, "best"))  # (tp, N, count, 2)
    merged = np.concatenate(list(offers), axis=1)
    merged[np.isnan(merged[..., 0]).any(axis=1)] = np.nan  # that row has no largest
    order = np.argsort(-merged[..., 0], axis=1, kind="stable")[:, : offers.shape[2], None]
    return np.take_along_axis(merged, order, axis=1)


def draw(candidates: np.ndarray, sampling: Sampling, number: int, position: int) -> float:
    """Return the id of a prompt's next token from candidates (count, 2).

    NaN if the largest logit is not a finite number.

    number: of the prompt. position: of the new token in its text.
    """
    values, ids = candidates.T
    if not np.isfinite(values[0]):
        return np.nan
    if len(ids) == 1:
        return ids[0]
    reached = np.cumsum(np.exp((values - values[0]) / sampling.temperature))
    reached /= reached[-1]
    kept = reached[: 1 + np.searchsorted(reached, sampling.top_p)]
    philox = np.random.Philox(key=sampling.seed, counter=[0, position, number, 1])
    chance = np.random.Generator(philox).random() * kept[-1]
    return ids[np.searchsorted(kept, chance, side="right")]


class Request:
    """A complete request: config, ops, tokenizer, sampling and prompts.

    together: how many prompts are continued at the same time. notes: for the user.
    """

    def __init__(self, parsed: ParsedConfig, args, world_size: int, host_rank: int):
        """Check everything; raise one UserError with all problems.

        args: `commands.generate.Arguments`; for run_folder see `find_source`. host_rank: place of
        this process on its host.
        """
        weights, given = find_source(args.run_folder, args.run_folder), parsed.config
        formats.model_settings(weights, where=args.run_folder)
        start = replace(
            given,
            run=replace(given.run, init_from=weights),
            grid=replace(given.grid, num_microbatches=given.grid.num_microbatches or 1),
            train=replace(given.train, optimizer="sgd"),
        )
        beside = tokenizer_folder(weights)

        def read_texts(config):
            one = PROMPT if args.prompt is None else args.prompt
            texts = read_prompts(args.prompts) if args.prompts else [(f"--prompt {one!r}", one)]
            self.tokenizer = tokenizer_of(beside, config.model.vocab_size)
            self.prompts = encode_prompts(self.tokenizer, texts, config.model)

        def usage_problems(config):
            cp, size = config.grid.cp, config.model.vocab_size
            return broken(
                (
                    args.prompts and args.prompt is not None,
                    f"--prompt and --prompts {args.prompts}: give one of them",
                ),
                (
                    cp > 1,
                    (
                        f"--cp {cp}: cuts the tokens of a row, but a text grows by one token at a"
                        " time; use --dp for more texts, or --tp or --pp to cut the model"
                    ),
                ),
                *(
                    (
                        one >= size,
                        f"--stop-token {one}: is not in the vocabulary; use ids below {size}",
                    )
                    for one in args.stop_token
                ),
            )

        def read_weights(config):
            self.notes = [
                *formats.start_notes(weights, trains=False),
                *checkpoint.unread_notes(config),
            ]

        checks = [
            (read_texts, UsageError),
            (usage_problems, UsageError),
            (read_weights, DataError),
        ]
        config, _ = resolve(forced(parsed, start), world_size, checks)
        groups = given.grid.num_microbatches or config.grid.pp  # as many as work at the same time
        self.config = replace(config, grid=replace(config.grid, num_microbatches=groups))
        self.ops = ops_module.make_for(config.run, host_rank)
        self.together = given.train.batch_size or ROWS_OF_A_GROUP * config.grid.dp * groups
        ends = ends_of(beside, self.tokenizer, config.model.vocab_size)
        self.sampling = Sampling(
            args.sample_tokens,
            args.temperature,
            config.run.seed,
            args.top_k,
            args.top_p,
            args.stop_token or ends,
        )


def run(session: Session, parsed: ParsedConfig, args) -> int:
    """Print a text piece by piece, or write a line of JSON for each prompt in a file.

    args: `commands.generate.Arguments`.
    Comm: that of `config_facts`, and that of `generate`.
    """
    world = session.start()
    request = session.agree(lambda: Request(parsed, args, world.size, session.host_rank))
    session.compare(
        config_facts(session, request.config, request.tokenizer)
        | {
            "prompts": digest_of_value([(one.typed, one.ids) for one in request.prompts]),
            "sampling": str(request.sampling),
        }
    )
    worker = Worker(
        request.config,
        Grid.of(request.config.grid, world.rank),
        request.ops,
        Recorder(),
        world,
    )
    session.agree(lambda: checkpoint.load(worker, request.config.run.init_from))
    for note in request.notes if world.rank == 0 else ():
        print(f"mpipar: {note}", file=sys.stderr, flush=True)
    pieces = answers(worker, request) if args.prompts else stream(worker, request)
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
    yield from map(printable, show(visible(tokenizer, prompt), added, tokenizer))
    yield "\n"
    if text.end == FULL and worker.comms.world.group_rank == 0:
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
            yield json.dumps(answer(request.tokenizer, prompts[text.number], text)) + "\n"


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
        is_json_lines(Path(path))  # refuses what is no text
        text = read_text(path, most_bytes=MOST_BYTES).replace("\r\n", "\n")
    found = [
        (f"{path}: line {number}", line)
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
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
