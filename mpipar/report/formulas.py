"""What each barrier of a decoder's step must carry, as formulas: text for the reader, numbers for
the test.

B rows of a microbatch, T tokens, D model width, F ffn width, q size of the group, e bytes of a
number. Source of the factors: ring algorithms, per rank; of the counts: two all-reduces per layer
and pass of a column/row pair (arXiv 1909.08053, 2104.04473).
"""

from __future__ import annotations

from typing import NamedTuple

from mpipar.models.decoder import stage_parts
from mpipar.report.console import family
from mpipar.trace import AXIS, NAME, OPERATION

WIDTHS = {  # (last parts of the name, operation): width of what travels, besides B*T*e
    ("attn.proj", "all_reduce"): "D", ("attn.qkv", "all_reduce"): "D",
    ("ffn.down", "all_gather"): "D", ("ffn.up", "all_gather"): "F",
    ("embedding", "all_reduce"): "D", ("head", "all_reduce"): "D",
    ("activations", "send"): "D", ("activations", "recv"): "D",
    ("gradients", "send"): "D", ("gradients", "recv"): "D",
}
FACTORS = {"all_reduce": "2(q-1)/q", "all_gather": "(q-1)/q", "reduce_scatter": "(q-1)/q"}


class Sizes(NamedTuple):
    """The letters of the formulas for a resolved config."""

    B: int
    T: int
    D: int
    F: int
    e: int


def sizes(config, itemsize: int) -> Sizes:
    """B, T, D, F, e of a resolved config."""
    model, grid = config.model, config.grid
    rows = config.train.batch_size // (grid.dp * grid.num_microbatches)
    return Sizes(rows, model.seq_len, model.d_model, model.ffn, itemsize)


def width(record, ffn_cut: str) -> str | None:
    """Width of what the record carries per token: D, F, or None where it is no activation."""
    name = family(record[NAME]).removeprefix("block*.")
    operation = record[OPERATION]
    if operation == "all_reduce" and name in ("ffn.up", "ffn.down"):
        return "F" if (ffn_cut, name) == ("gather", "ffn.down") else "D"
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


def sent(record) -> str:
    """The factor from payload to bytes sent, as text."""
    return FACTORS.get(record[OPERATION], "1" if record[OPERATION] == "send" else "0")


def expected_calls(config, worker_stages, num_stages: int, stage_layers, grid) -> dict:
    """{axis: (formula, calls per step)} of one rank, by the closed forms.

    L here is the number of blocks on this rank, m the number of microbatches. Schedules that hold a
    stage twice (dualpipe) send each microbatch through one of the copies; those are left out.
    """
    m = config.grid.num_microbatches
    parts = [stage_parts(stage, stage_layers) for stage in worker_stages]
    blocks = sum(len(part[0]) for part in parts)
    first, last = (any(part[i] for part in parts) for i in (1, 2))
    found = {}
    if grid.tp_size > 1 and config.model.sequence_parallel:
        # Replicated gradients: one sum a step and stage. The ring has messages instead.
        if config.model.tp_matmul == "plain":
            ends, once = 2 * first + 3 * last, len(worker_stages)
            found["tp"] = f"m * (10L + {ends}) + {once}", m * (10 * blocks + ends) + once
    elif grid.tp_size > 1:
        per_layer = 6 if config.model.ffn_cut == "gather" else 4
        ends = first + 2 * last
        found["tp"] = f"m * ({per_layer}L + {ends})", m * (per_layer * blocks + ends)
    if grid.pp_size > 1:
        hops = 2 * len(worker_stages) - first - last  # edges of its stages to others
        if all(abs(a - b) > 1 for a in worker_stages for b in worker_stages if a != b):
            found["pp"] = f"m * {2 * hops} (sends and receives)", 2 * m * hops
    if grid.world_size > 1:
        found["world"] = "1 (the norm)", 1
    return found


def counted(records) -> dict[str, int]:
    """{axis: calls} of a step's records."""
    counts: dict[str, int] = {}
    for record in records:
        counts[record[AXIS]] = counts.get(record[AXIS], 0) + 1
    return counts
