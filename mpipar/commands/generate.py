"""`mpipar generate RUN --prompt TEXT`: continue a text with a trained model, on any layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from mpipar import ops as ops_module
from mpipar.checkpoint import formats
from mpipar.checkpoint import weights as checkpoint
from mpipar.comm.grid import Grid
from mpipar.comm.record import Recorder
from mpipar.commands.resolve import resolve
from mpipar.commands.source import find_source, source_facts
from mpipar.errors import EXIT_OK, DataError, UsageError
from mpipar.files.text import printable
from mpipar.inference.generate import decode, encode, generate
from mpipar.train.worker import Worker


def run(session, reading, run_folder: str) -> int:
    """Print the prompt and its continuation, piece by piece; return the exit code.

    run_folder: see `find_source`.
    Comm: see `mpipar.inference.generate.generate`.
    """
    world = session.start()
    config, ops, prompt = session.agree(
        lambda: prepare(reading, run_folder, world.size, session.host_rank))
    session.compare(source_facts(config.run.init_from))
    worker = Worker(config, Grid.of(config.grid, world.rank), ops, Recorder(), world)
    session.agree(lambda: checkpoint.load(worker, config.run.init_from))
    worker.recorder.enter("eval")
    run = config.run
    tokens = generate(worker, prompt, run.sample_tokens, run.temperature, run.seed)
    with session.watch.follow_records(worker.recorder, worker.comms):
        for piece in show(prompt, tokens, config.model.vocab_size):
            if world.rank == 0:
                print(printable(piece), end="", flush=True)
    if world.rank == 0:
        print(flush=True)
    return EXIT_OK


def show(prompt: list[int], tokens: Iterable[int], vocab_size: int) -> Iterator[str]:
    """Yield the prompt's text and what each token adds to it; all pieces make up the whole text.

    The last bytes may be part of a character that the next byte completes. They wait for that byte.
    """
    seen, shown = prompt[:-1], 0
    for token in itertools.chain(prompt[-1:], tokens):
        seen.append(token)
        text = decode(seen, vocab_size)
        ready = max(shown, len(text) - text.endswith("\ufffd"))
        yield text[shown:ready]
        shown = ready
    yield decode(seen, vocab_size)[shown:]


def prepare(reading, run_folder: str, world_size: int, host_rank: int):
    """(config, ops, prompt tokens), all checked; raises one UserError with all problems.

    host_rank: place of this process on its host.
    """
    weights = find_source(run_folder, run_folder)
    model = formats.model_settings(weights)["model"]
    if model != "decoder":
        raise UsageError(f"{run_folder}: holds a {model}, which makes no text; give a decoder's"
                         " run folder")
    one_row = replace(
        reading.config,
        run=replace(reading.config.run, init_from=weights),
        train=replace(reading.config.train, batch_size=None, optimizer="sgd"))
    found = {}

    def prompt_problems(config):
        try:
            found["prompt"] = encode(config.run.prompt, config.model.vocab_size)
        except UsageError as error:
            return error.problems
        return []

    checks = [(prompt_problems, UsageError), (checkpoint.weight_problems, DataError)]
    config, _ = resolve(replace(reading, config=one_row), world_size, checks)
    return config, ops_module.make_for(config.run, host_rank), found["prompt"]
