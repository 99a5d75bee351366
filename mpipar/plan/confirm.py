"""mpipar's own step of a planned layout, on shapes: what its code would keep and send.

The closed forms describe a software stack, and leave out what is small. This is the code itself, of
the first and the last rank of the pipeline.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from mpipar.config.resolve import resolve
from mpipar.errors import UserError
from mpipar.plan.layout import Layout, blocks_of_stages
from mpipar.plan.predict import predict
from mpipar.plan.search import Question

STATES = ("weights", "gradients", "optimizer")


class Confirmed(NamedTuple):
    """What a rank of mpipar would have. states, rest: bytes at the peak. sent: bytes in a step."""

    rank: int
    states: int
    rest: int
    sent: int


def confirm(question: Question, config, layout: Layout) -> tuple[list[Confirmed], str]:
    """Run the first and the last pipeline rank on shapes; ([...], "") or ([], why not).

    config: names the model. Memory is the same for any number of microbatches that fills the
    pipeline. So no more than that are run. What is sent grows with them.
    """
    short = min(layout.num_microbatches, 2 * layout.stages)
    short -= short % layout.pp if layout.schedule == "interleaved" else 0
    try:
        complete = own_config(question, config, layout, short)
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


def own_config(question: Question, config, layout: Layout, num_microbatches: int):
    """The Config of `mpipar train` for a layout. Raises UserError where mpipar cannot run it."""
    counts = blocks_of_stages(question.shape.layers, layout.stages)
    grid = replace(
        config.grid, dp=layout.dp, pp=layout.pp, cp=layout.cp, tp=layout.tp,
        num_microbatches=num_microbatches, schedule=layout.schedule,
        chunks=layout.chunks if layout.schedule == "interleaved" else None,
        stage_layers=counts if layout.pp > 1 else None)
    model = replace(config.model, seq_len=question.shape.tokens, max_positions=None,
                    sequence_parallel=layout.sequence_parallel)
    train = replace(config.train, batch_size=layout.dp * layout.rows * num_microbatches)
    memory = replace(config.memory, recompute=layout.recompute, zero=layout.zero,
                     zero_grads="sharded" if layout.zero == 3 else "full")
    run = replace(config.run, dtype="bfloat16")
    return resolve(replace(config, grid=grid, model=model, train=train, memory=memory, run=run),
                   layout.ranks)[0]
