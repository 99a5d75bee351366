"""What each barrier of a decoder's step must carry, as formulas: text for the reader, numbers for
the test.

B rows of a microbatch, T tokens, D model width, F ffn width, q size of the group, e bytes of a
number. Source of the counts: two all-reduces per layer and pass of a column/row pair (arXiv
1909.08053, 2104.04473).
"""

from __future__ import annotations

from typing import NamedTuple

from mpipar.data.rows import rows_per_microbatch
from mpipar.report.console import family
from mpipar.trace import NAME, OPERATION

WIDTHS = {  # (last parts of the name, operation): width of what travels, besides B*T*e
    ("attn.proj", "all_reduce"): "D", ("attn.qkv", "all_reduce"): "D",
    ("embedding", "all_reduce"): "D", ("head", "all_reduce"): "D",
    ("activations", "send"): "D", ("activations", "recv"): "D",
    ("gradients", "send"): "D", ("gradients", "recv"): "D",
}


class Sizes(NamedTuple):
    """The letters of the formulas for a resolved config."""

    B: int
    T: int
    D: int
    F: int
    e: int


def sizes(config, itemsize: int) -> Sizes:
    """B, T, D, F, e of a resolved config."""
    model, rows = config.model, rows_per_microbatch(config)
    return Sizes(rows, model.seq_len, model.d_model, model.ffn, itemsize)


def width(record, ffn_cut: str) -> str | None:
    """Width of what the record carries per token: D, F, or None where it is no activation."""
    name = family(record[NAME]).removeprefix("block*.")
    operation = record[OPERATION]
    if name in ("ffn.up", "ffn.down") and (ffn_cut != "pair" or operation == "all_reduce"):
        # Of products that stand alone, the first makes F forward, the second takes F backward.
        forward = operation == {"gather": "all_gather", "reduce": "all_reduce"}.get(ffn_cut)
        return "F" if ffn_cut != "pair" and (name == "ffn.up") == forward else "D"
    return WIDTHS.get((name, operation))


def payload(record, config, itemsize: int, group_size: int) -> tuple[str, int] | None:
    """(formula, bytes) of a record's payload, None where there is no formula."""
    letters = sizes(config, itemsize)
    if record[NAME] == "loss" and record[OPERATION] == "all_gather":
        return "q * 3*B*T*e", group_size * 3 * letters.B * letters.T * itemsize
    found = width(record, config.model.ffn_cut)
    if found is None:
        return None
    return f"B*T*{found}*e", letters.B * letters.T * getattr(letters, found) * itemsize


def tensor_parallel_calls(config, blocks, first, last, num_stages) -> tuple[str, int] | None:
    """(formula, calls per step) over tp: L blocks here, m microbatches; None where a ring has
    messages instead.
    """
    m = config.grid.num_microbatches
    if config.model.tp_matmul == "ring":
        return None
    if config.model.sequence_parallel:  # replicated gradients: one sum a step and stage
        ends = 2 * first + 3 * last
        return f"m * (10L + {ends}) + {num_stages}", m * (10 * blocks + ends) + num_stages
    per_layer = 4 if config.model.ffn_cut == "pair" else 6
    ends = first + 2 * last
    return f"m * ({per_layer}L + {ends})", m * (per_layer * blocks + ends)
