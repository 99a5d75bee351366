"""The closed forms of memory: what a rank keeps of its parameters, and what a block keeps.

Letters as in `decoder_formulas`; h is the number of a rank's heads of queries. N counts the numbers
of a rank's parameters, with the zeros between them. x ranks share them out (`--zero`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from mpipar.comm.grid import share
from mpipar.data.rows import rows_per_microbatch
from mpipar.models.convnet import stream_size
from mpipar.ops import shapes_for
from mpipar.partition.context import keeps_scores
from mpipar.plan import decoder_formulas
from mpipar.plan.formulas import bytes_of_numbers
from mpipar.train.optim import OPTIMIZERS

STATISTICS = {"layer": 2, "rms": 1}  # numbers that a norm keeps of a token or a place


class Form(NamedTuple):
    """Bytes and their formula; None where there is no formula."""

    text: str = ""
    size: int | None = None


def states(config, prediction) -> dict[str, Form]:
    """{label: Form} of weights, gradients and optimizer. prediction: of the rank.

    u0 and u1 are the largest units of an even and of an odd number: two buffers hold them in turn.
    u is the larger of both. Source: arXiv 1910.02054, for a split backward.
    """
    e, s = bytes_of_numbers(config)
    level, x = config.memory.zero, config.grid.dp * config.grid.cp if config.memory.zero else 1
    over = "/x" if x > 1 else ""
    numbers = sum(one.run.stop - one.run.start
                  for stage in prediction.segments.values() for one in stage)
    units = [[sum(unit) for unit in units] for units in prediction.reads.values()]
    turns = [max((size for stage in units for size in stage[odd::2]), default=0)
             for odd in (0, 1)]
    found = {"weights": Form("N*e", numbers * e), "gradients": Form("N*s", numbers * s)}
    if level == 3:
        own = numbers // x * e
        found["weights"] = Form("N*e/x + (u0 + u1)*e", own + sum(turns) * e)
        if config.memory.gathers == "stage":
            found["weights"] = Form("N*e/x + the stage's units",
                                    own + sum(units[0]) * e) if len(units) == 1 else Form()
        if config.memory.keeps_pieces_of_gradients:
            found["gradients"] = Form("N*s/x + u*s", numbers // x * s + max(turns) * s)
    masters = int(np.dtype(config.run.dtype).itemsize < s)
    copies = len(OPTIMIZERS[config.train.optimizer].kinds) + masters
    if copies:
        found["optimizer"] = Form(f"{copies}N*s{over}", copies * (numbers // x) * s)
    return found


def block(config) -> dict[str, Form]:
    """{from F to I, from I to W: Form} of what a block keeps of one microbatch.

    From F to I these are inputs of norms, of products and of the activation function, and what
    attention saves. From I to W they are inputs and gradients of the results of norms and products.
    Source: arXiv 2205.05198, without dropout.
    """
    model, tp = config.model, config.grid.tp
    # Only the pair keeps its channels between the products cut.
    wide, F = (share(model.ffn, tp), "F/tp") if model.ffn_cut == "pair" else (model.ffn, "F")
    forms = _decoder_block if model.whole_heads else _convnet_block
    return dict(zip(("one block, from F to I", "one block, from I to W"), forms(config, wide, F),
                    strict=True))


def _convnet_block(config, wide: int, F: str) -> tuple[Form, Form]:
    """`block` of a convnet. wide: the channels inside that a rank keeps; F: their formula."""
    model, (e, s) = config.model, bytes_of_numbers(config)
    n, D = rows_per_microbatch(config) * math.prod(stream_size(model)), model.channels
    statistics = STATISTICS[model.norm]
    first, last = (Form(f"B*S*({many}D + 2{F})*e + {statistics}*B*S*s",
                        n * ((many * D + 2 * wide) * e + statistics * s)) for many in (2, 4))
    again = config.memory.recompute == "block"
    return Form("B*S*D*e", n * D * e) if again else first, last


def _decoder_block(config, wide: int, F: str) -> tuple[Form, Form]:
    """`block` of a decoder. wide: the channels inside that a rank keeps; F: their formula."""
    model, (e, s) = config.model, bytes_of_numbers(config)
    letters, cut = decoder_formulas.sizes(config, e), model.sequence_parallel
    n = letters.B * letters.T
    held, over = (letters.B * share(letters.T, config.grid.tp), "/tp") if cut else (n, "")
    heads, norms = letters.Q // model.head_dim, 2 * STATISTICS[model.norm]
    stream, more = f"4D{over} + 2Q + 2K + 2{F}", f" + {norms}*B*T{over}*s"
    scores = _attention(config, letters, heads, s)
    if config.memory.recompute == "block":
        first = Form(f"B*T*D{over}*e", held * letters.D * e)
    else:
        first = Form(f"B*T*({stream})*e{more} + {scores.text}",
                     (held * 4 * letters.D + n * 2 * (letters.Q + letters.K + wide)) * e
                     + norms * held * s + scores.size)
    sides = {"gelu": 2, "swiglu": 3}[model.activation]
    widths = "6D/tp + 2D" if cut else "8D"
    last = Form(f"B*T*({widths} + 2Q + 2K + {sides}{F})*e{more}",
                (held * 6 * letters.D + n * (2 * letters.D + 2 * letters.Q + 2 * letters.K
                                             + sides * wide)) * e + norms * held * s)
    return first, last


def _attention(config, letters, heads: int, sum_itemsize: int) -> Form:
    """What attention saves besides q, k, v and its result: all scores, or a number per query.

    After an exchange of heads, all tokens of some heads are there. The result then lies twice.
    """
    n, cp, method = letters.B * letters.T, config.grid.cp, config.grid.cp_attention
    exchanged = method == "ulysses"
    kept = keeps_scores(config, shapes_for(config.run, None).tiled_head_width)
    if not kept or config.memory.recompute == "attention":
        twice = n * letters.Q * letters.e if exchanged else 0
        return Form("B*T*h*s" + (" + B*T*Q*e" if exchanged else ""),
                    n * heads * sum_itemsize + twice)
    return Form("B*T*T*h*cp*e" if exchanged else "B*T*T*h*e",
                n * letters.T * heads * (cp if exchanged else 1) * letters.e)
