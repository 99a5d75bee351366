"""Confirms a planned layout with mpipar itself: its command line, and its own step on shapes.

The closed forms describe a software stack, and leave out small terms. Here the code itself runs,
for the first and the last rank of the pipeline.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from mpipar.comm.grid import LAYOUT
from mpipar.config.layout import typed
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config, settings
from mpipar.config.setting import flag
from mpipar.errors import UserError
from mpipar.plan.predict import predict
from mpipar.plan.search import Candidate, Question

STATES = ("weights", "gradients", "optimizer")
WIDTH = 90  # of a line of a command


class Job(NamedTuple):
    """The job of a plan: a Config that names the model, and the flags that select it in train."""

    config: Config
    flags: str


class Confirmed(NamedTuple):
    """What a rank of mpipar would have. states, rest: bytes at the peak. sent: bytes in a step.

    gib: memory that it may use.
    """

    rank: int
    states: int
    rest: int
    sent: int
    gib: float

    @property
    def bytes_at_peak(self) -> int:
        """Everything that it holds at the peak."""
        return self.states + self.rest


def train_config(
    question: Question, config: Config, one: Candidate, num_microbatches: int | None = None
) -> Config:
    """Return the Config of a candidate, before it is resolved.

    config: names the model. num_microbatches: by default those of the layout.
    """
    layout = one.layout
    num_microbatches = num_microbatches or layout.num_microbatches
    grid = replace(
        config.grid,
        dp=layout.dp,
        pp=layout.pp,
        cp=layout.cp,
        tp=layout.tp,
        ep=layout.ep,
        num_microbatches=num_microbatches,
        schedule=layout.schedule,
        chunks=layout.chunks if layout.family.looped else None,
        stage_layers=one.counts if layout.pp > 1 else None,
        rank_order=",".join(layout.rank_order),
    )
    model = replace(
        config.model,
        seq_len=question.shape.tokens,
        max_positions=None,
        sequence_parallel=layout.sequence_parallel,
    )
    if model.completed().activation != question.shape.activation:
        model = replace(model, activation=question.shape.activation)
    train = replace(config.train, batch_size=layout.dp * layout.rows * num_microbatches)
    memory = replace(config.memory, recompute=layout.recompute, zero=layout.zero)
    run = replace(config.run, dtype=question.dtype, device="cuda")
    return replace(config, grid=grid, model=model, train=train, memory=memory, run=run)


def command_line(question: Question, job: Job, one: Candidate) -> str:
    """Return the command that trains with a candidate: all settings besides the model's flags."""
    wanted = train_config(question, job.config, one)
    before = {field.name: value for _, field, value in settings(job.config)}
    words = [
        as_typed(field.name, value)
        for _, field, value in settings(wanted)
        if field.name not in LAYOUT and value not in (None, before.get(field.name))
    ]
    lines = [f"mpiexec -n {question.ranks} mpipar train {job.flags} {typed(one.layout._asdict())}"]
    for word in words:
        if len(lines) == 1 or len(lines[-1]) + len(word) > WIDTH:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return " \\\n    ".join(lines)


def as_typed(name: str, value) -> str:
    """Return a setting as a flag."""
    if isinstance(value, bool):
        return flag(name) if value else f"--no-{flag(name)[2:]}"
    return f"{flag(name)} {','.join(map(str, value)) if isinstance(value, tuple) else value}"


def confirm(question: Question, config: Config, one: Candidate) -> tuple[list[Confirmed], str]:
    """Run the first and the last pipeline rank on shapes; return ([...], "") or ([], why not).

    config: names the model. Memory is the same for any number of microbatches that fills the
    pipeline, so only that many are run. The bytes sent are scaled up to the full number.
    """
    layout = one.layout
    short = min(layout.num_microbatches, 2 * layout.stages)
    short -= short % layout.pp if layout.schedule == "interleaved" else 0
    try:
        complete = resolve(train_config(question, config, one, short), layout.ranks)[0]
    except UserError as error:
        return [], "; ".join(error.problems)
    each, found = layout.ranks // layout.pp, []
    for rank in dict.fromkeys((0, layout.ranks - each)):
        seen = predict(complete, rank)
        states = sum(seen.peak_bytes.get(label, 0) for label in STATES)
        sent = sum(record.wire_bytes for record in seen.recorder.records)
        found.append(
            Confirmed(
                rank,
                states,
                seen.peak_total - states,
                sent * layout.num_microbatches // short,
                one.by_rank[rank // each].gib,
            )
        )
    return found, ""
