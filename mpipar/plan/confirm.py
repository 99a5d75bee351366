"""A planned layout as `mpipar train` takes it: its command line, and its own step on shapes.

The closed forms describe a software stack, and leave out what is small. This is the code itself, of
the first and the last rank of the pipeline.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from mpipar.comm.grid import AXES
from mpipar.config.layout import typed
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config, settings
from mpipar.config.setting import flag
from mpipar.errors import UserError
from mpipar.plan.layout import Layout, blocks_of_stages
from mpipar.plan.predict import predict
from mpipar.plan.search import Question

STATES = ("weights", "gradients", "optimizer")
WIDTH = 90  # of a line of a command


class Job(NamedTuple):
    """What is planned for: a Config that names the model, and the flags that give it to train."""

    config: Config
    flags: str


class Confirmed(NamedTuple):
    """What a rank of mpipar would have. states, rest: bytes at the peak. sent: bytes in a step."""

    rank: int
    states: int
    rest: int
    sent: int


def train_config(question: Question, config: Config, layout: Layout, num_microbatches: int,
                 counts: tuple[int, ...] | None = None) -> Config:
    """The Config of a layout, before it is resolved.

    config: names the model. counts: blocks of each stage, by default as many on each.
    """
    counts = counts or blocks_of_stages(question.shape.layers, layout.stages)
    grid = replace(
        config.grid, dp=layout.dp, pp=layout.pp, cp=layout.cp, tp=layout.tp,
        num_microbatches=num_microbatches, schedule=layout.schedule,
        chunks=layout.chunks if layout.family.looped else None, group_size=None,
        stage_layers=counts if layout.pp > 1 else None, rank_order=",".join(layout.rank_order))
    model = replace(config.model, seq_len=question.shape.tokens, max_positions=None,
                    sequence_parallel=layout.sequence_parallel)
    if model.completed().activation != question.shape.activation:
        model = replace(model, activation=question.shape.activation)
    train = replace(config.train, batch_size=layout.dp * layout.rows * num_microbatches)
    memory = replace(config.memory, recompute=layout.recompute, zero=layout.zero,
                     zero_grads="sharded" if layout.zero == 3 else "full")
    run = replace(config.run, dtype=question.dtype, device="cuda")
    return replace(config, grid=grid, model=model, train=train, memory=memory, run=run)


def command_line(question: Question, job: Job, layout: Layout,
                 counts: tuple[int, ...] | None = None) -> str:
    """What to type to train with a layout: every setting that the model's flags do not give."""
    wanted = train_config(question, job.config, layout, layout.num_microbatches, counts)
    before = {field.name: value for _, field, value in settings(job.config)}
    words = [as_typed(field.name, value) for _, field, value in settings(wanted)
             if field.name not in AXES and value not in (None, before.get(field.name))]
    lines = [f"mpiexec -n {question.ranks} mpipar train {job.flags} {typed(layout._asdict())}"]
    for word in words:
        if len(lines) == 1 or len(lines[-1]) + len(word) > WIDTH:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return " \\\n    ".join(lines)


def as_typed(name: str, value) -> str:
    """A setting as a flag."""
    if isinstance(value, bool):
        return flag(name) if value else f"--no-{flag(name)[2:]}"
    return f"{flag(name)} {','.join(map(str, value)) if isinstance(value, tuple) else value}"


def confirm(question: Question, config: Config, layout: Layout) -> tuple[list[Confirmed], str]:
    """Run the first and the last pipeline rank on shapes; ([...], "") or ([], why not).

    config: names the model. Memory is the same for any number of microbatches that fills the
    pipeline. So no more than that are run. What is sent grows with them.
    """
    short = min(layout.num_microbatches, 2 * layout.stages)
    short -= short % layout.pp if layout.schedule == "interleaved" else 0
    try:
        complete = resolve(train_config(question, config, layout, short), layout.ranks)[0]
    except UserError as error:
        return [], "; ".join(error.problems)
    last = layout.ranks - layout.ranks // layout.pp
    found = []
    for rank in dict.fromkeys((0, last)):
        seen = predict(complete, rank)
        states = sum(seen.peak_bytes.get(label, 0) for label in STATES)
        sent = sum(record.wire_bytes for record in seen.recorder.records)
        found.append(Confirmed(rank, states, seen.peak_total - states,
                               sent * layout.num_microbatches // short))
    return found, ""
