"""The truth of a life: one rank with plain choices, in float64, without a cache of keys.

It shares with the life the layers, the rows of each step and the optimizer, but not layout,
schedule, messages, commands, files and generation. Islands take turns on the rank.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from mpipar.comm.grid import Grid
from mpipar.comm.recorder import Recorder
from mpipar.config.run import TEMPERATURE
from mpipar.config.text import quoted
from mpipar.layers.stash import Batch
from mpipar.models.on_shapes import all_params
from mpipar.run.checkpoint import formats
from mpipar.run.checkpoint import weights as checkpoint
from mpipar.run.checks import evaluate
from mpipar.run.data import parts, rows
from mpipar.run.files.settings import ParsedConfig, over
from mpipar.run.generation import Sampling, best, draw
from mpipar.run.resolve import Inputs
from mpipar.run.verify import full_tensors, serial_config
from mpipar.train.worker import Worker
from tests.helpers.lives.choices import LATER, STEPS, Case, settings_of

NUMBERS = (  # the choices that determine the numbers; all others leave them as they are
    *(field.name for field in formats.OF_WEIGHTS),
    "optimizer",
    "lr_schedule",
    "min_lr_ratio",
    "warmup_steps",
    "weight_decay",
    "beta1",
    "beta2",
    "clip",
    "seed",
    "eval_tokens",
    "sample_tokens",
)
SPREAD = 0.05  # of the weights that --init-from loads: no bias is zero


@dataclass(frozen=True)
class Truth:
    """The results of one rank.

    losses, held_out: of each step. texts: {step: the prompt's tokens and those after it}. logits:
    {step: those (V,) that each token of the text was chosen by}. weights: {step: tensors by name};
    step 0 is the beginning. shown: {step: what a run prints of the text}.
    """

    losses: list
    held_out: list
    texts: dict
    logits: dict
    weights: dict
    shown: dict


def plain_reading(case: Case, folder: Path) -> ParsedConfig:
    """Return the plain choices of a case: those that determine its numbers, in float64."""
    numbers = {name: case[name] for name in NUMBERS if case.get(name) is not None}
    given = settings_of(numbers) | {"dtype": "float64", "num_microbatches": 1} | data_of(folder)
    return over({}, ParsedConfig(None, given=given))


def data_of(folder: Path) -> dict:
    """Return the setting that names the data."""
    return {"data": (str(folder / "text.txt"),)}


def write_data(folder: Path) -> None:
    """Write the data of all lives: words that recur, so that they can be learnt.

    They are few, because each evaluation reads what is held out.
    """
    words = "the a to of ranks wait for each other while one sums what all have sent".split()
    rng = np.random.default_rng(5)
    (folder / "text.txt").write_text(" ".join(rng.choice(words, 300)))


def truth_of(case: Case, folder: Path) -> Truth:
    """Train one rank, and write the initial weights that the case starts from, if it has any."""
    inputs = Inputs(plain_reading(case, folder), 1, 0)
    config = serial_config(inputs.config)
    count, train = case["islands"] or 1, config.train
    own = replace(config, train=replace(train, batch_size=train.batch_size // count))
    worker = Worker(own, Grid(0), inputs.ops, Recorder())
    worker.initialize(SPREAD if case["init_from"] else 0.0)
    wide = replace(config, grid=replace(config.grid, dp=count))
    train_parts = [
        rows.Rows(worker.ops, inputs.train_part, wide, Grid(number, {"island": count}))
        for number in range(count)
    ]
    held_out = rows.Rows(worker.ops, parts.evaluated(inputs.held_out, config), config, worker.grid)
    islands = Islands(worker, case)
    found = Truth([], [], {}, {}, {0: tensors_of(worker)}, {})
    if case["init_from"]:
        checkpoint.save(worker, start_of(folder, case))
    for step in range(1, LATER + 1):
        if step > STEPS:  # the resumed run has a learning-rate schedule of its own length
            train = replace(worker.config.train, steps=LATER)
            worker.config = replace(worker.config, train=train)
        found.losses.append(islands.step(step, train_parts))
        found.held_out.append(evaluate(worker, held_out)[0])
        text, logits = continued(worker, inputs)
        found.texts[step], found.logits[step] = text, logits
        decode = inputs.tokenizer.decode
        start = decode(text[: len(text) - len(logits)])
        found.shown[step] = f"text generated from {start!r}:\n{quoted(decode(text))}"
        if step in (STEPS, LATER):
            found.weights[step] = tensors_of(worker)
    return found


class Islands:
    """Islands that take turns on one rank, with its moments and weights; None: all ranks are one.

    Between two steps the rank has the outer weights, which are evaluated and saved.
    """

    def __init__(self, worker: Worker, case: Case):
        self.worker, self.found = worker, case["islands"] is not None
        self.interval = case["outer_interval"] or LATER
        self.lr = 0.7 if case["outer_lr"] is None else case["outer_lr"]
        self.momentum = 0.9 if case["outer_momentum"] is None else case["outer_momentum"]
        self.states = [self.state() for _ in range(case["islands"] or 1)]
        self.outer = [flat.master.copy() for flat in worker.flats]
        self.velocity = [np.zeros_like(x) for x in self.outer]

    def state(self) -> list[dict]:
        """Return a copy of the rank's masters and moments, by flat buffer."""
        return [{kind: x.copy() for kind, x in flat.state.items()} for flat in self.worker.flats]

    def put(self, number: int) -> None:
        """Give the rank the state of an island."""
        for flat, state in zip(self.worker.flats, self.states[number], strict=True):
            for kind, x in state.items():
                flat.state[kind][...] = x

    def step(self, step: int, parts: list) -> float:
        """Let every island take a step, and meet if it is time to; return the first one's loss."""
        losses = []
        for number, part in enumerate(parts):
            self.put(number)
            batch = functools.partial(part.train, step)
            losses.append(self.worker.train_step(step, batch).loss)
            self.states[number] = self.state()
        if self.found:
            if step % self.interval == 0 or step in (STEPS, LATER):
                self.meet()
            for flat, outer in zip(self.worker.flats, self.outer, strict=True):
                flat.master[...] = outer
        return losses[0]

    def meet(self) -> None:
        """Give all islands the new outer weights (arXiv 2311.08105)."""
        for outer, v, *own in zip(self.outer, self.velocity, *self.states, strict=True):
            d = outer - np.mean([state["master"] for state in own], axis=0)
            v[...] = d + self.momentum * v
            outer[...] -= self.lr * (d + self.momentum * v)
            for state in own:
                state["master"][...] = outer


def start_of(folder: Path, case: Case) -> Path:
    """Return the folder of the weights that a case starts from."""
    return folder / f"start-{case['number']}"


def tensors_of(worker) -> dict:
    """Return all weights, by their names and in their shapes in files."""
    model, full, found = worker.config.model, full_tensors(worker, "master"), {}
    for _, param in all_params(model, (model.layers,)):
        rest = full[param.name].reshape(-1)
        for name, shape in formats.format_of(model).tensors(param).items():
            part, rest = np.split(rest, [math.prod(shape)])
            found[name] = part.reshape(shape)
    return found


def continued(worker, inputs) -> tuple[list[int], list]:
    """Return (prompt and what follows, logits of each token); every token reruns its whole text."""
    run, size = worker.config.run, worker.config.model.seq_len
    end = inputs.tokenizer.end
    sampling = Sampling(
        run.sample_tokens, TEMPERATURE, run.seed, stop=() if end is None else (end,)
    )
    prompt = list(inputs.prompt)
    text, kept = list(prompt), []
    for _ in range(min(sampling.num_tokens, size + 1 - len(prompt))):
        batch = Batch(np.array([text]), None, np.arange(len(text)))
        logits = worker.forward([0], lambda mb, batch=batch: batch)[0][-1:]
        (candidates,) = best(worker, logits, sampling.candidates)
        kept.append(logits[0, : worker.config.model.vocab_size].copy())
        text.append(int(draw(candidates, sampling, 0, len(text))))
        if text[-1] in sampling.stop:
            break
    return text, kept


def weights_in(folder: Path) -> dict:
    """Return all tensors of the files of a folder of weights, by the names in the files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found
