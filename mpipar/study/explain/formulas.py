"""The closed forms of a step's barriers, and of what a rank and a block keep.

layer_costs.py has the cost of each layer for one microbatch; here they are added up for a rank's
stages. The factors are those of ring algorithms, per rank. N is the number of a rank's parameters,
including padding, which x ranks shard (`--zero`).
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy
import numpy as np

from mpipar.comm.grid import ISLAND, chunk_size
from mpipar.comm.record import family
from mpipar.models.split import stage_parts
from mpipar.ops import shapes_for
from mpipar.run.data.rows import rows_per_microbatch
from mpipar.study.explain.layer_costs import (
    DISPATCH,
    KINDS,
    LETTERS,
    Barrier,
    Case,
    Letters,
    Sum,
    UnitCosts,
    total,
    unit_costs,
    value,
)
from mpipar.study.explain.layer_costs import letters as letters_of

FACTORS = {
    "all_reduce": "2(q-1)/q",
    "all_gather": "(q-1)/q",
    "reduce_scatter": "(q-1)/q",
    "all_to_all": "(q-1)/q",
    "all_to_allv": "1",
}  # its payload has only rows for others


def units_of(config) -> tuple[UnitCosts, Letters]:
    """Return the costs of a resolved config's units, and the sizes of a rank."""
    grid, (e, s) = config.grid, bytes_of_numbers(config)
    method, scores = grid.cp_attention if grid.cp > 1 else None, False
    ops = shapes_for(config.run, None)
    # Methods that merge partial results store no scores, and neither do tiled kernels.
    if config.memory.recompute != "attention" and method not in ("ring", "gather"):
        scores = config.model.head_dim > ops.tiled_head_width
    sizes = letters_of(
        config.model, rows_per_microbatch(config), grid.tp, grid.cp, ops.table_multiple
    )
    costs = unit_costs(Case(config.model, method, scores))
    return costs, sizes | {"e": e, "s": s}


def text(form: Sum) -> str:
    """Return the formula of a Sum; terms that differ in one width only are merged."""
    groups: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for (*letters, number), often in form.items():
        width = letters.pop() if letters else ""
        groups.setdefault(("*".join(letters), number), []).append((often, width))
    found = []
    for (rows, number), widths in groups.items():
        (often, width), *others = widths
        if others:
            inside = [f"{often:.0f}{width}" if often > 1 else width for often, width in widths]
            width, often = f"({' + '.join(inside)})", 1
        found.append(
            "*".join(
                [f"{often:.0f}"] * (often > 1)
                + [rows] * bool(rows)
                + [width] * bool(width)
                + [number]
            )
        )
    return " + ".join(found)


def sent_text(barriers: Iterable[Barrier]) -> str:
    """Return the formula of what a rank sends in some barriers."""
    factors: dict[str, list[Sum]] = {}
    for barrier in barriers:
        often, factor = KINDS[barrier.kind].sent
        factors.setdefault(factor, []).extend([barrier.carries] * often)
    return " + ".join(
        (f"{often:.0f}" if often > 1 else "") + f"{factor} * {'*'.join(letters)}"
        for factor, sums in factors.items()
        for letters, often in total(sums).items()
    )


def payload(record, costs: tuple[UnitCosts, Letters], group_size: int) -> tuple[str, float] | None:
    """Return (formula, bytes) of a record's payload; None if no layer declares it, as a step's
    sums.

    costs: `units_of` its config. If several barriers share a name and phase, the one whose numbers
    have the record's bytes counts.
    """
    units, sizes = costs
    if record.name in ("activations", "gradients"):
        return text(units.stream), value(units.stream, sizes)
    phase = "F" if record.phase == "recompute" else record.phase
    found = (
        (KINDS[barrier.kind].factor + text(barrier.carries), barrier.payload(sizes, group_size))
        for cost in (units.entry, *units.kinds, units.head)
        for barrier in cost.barriers
        if (barrier.name, barrier.phase) == (family(record.name), phase)
        and record.operation in KINDS[barrier.kind].operations
    )
    return next((one for one in found if sizes[one[0][-1]] == record.dtype.itemsize), None)


def sent(record) -> str:
    """Return the factor from payload to bytes sent, as text."""
    return FACTORS.get(record.operation, "1" if record.operation == "send" else "0")


def legend(config) -> str:
    """Return the meaning of the formulas' letters and words, for a reader of `mpipar explain`."""
    found = f"{LETTERS},\nN numbers of this rank's parameters"
    if config.train.optimizer == "muon" or config.model.router_balance == "bias":
        found += ",\nNk: those of which the optimizer keeps k numbers each"
    if config.memory.zero:
        found += ", x ranks that shard them, segment by segment"
    if config.memory.zero == 3:
        found += (
            ",\nreads: the segments that all units read, u0 and u1: the largest units of even"
            " and of odd number,\nu: the larger one"
        )
    return found


class Expected(NamedTuple):
    """One rank's calls and bytes sent per step over one axis; None where there is no formula."""

    calls_formula: str = ""
    calls: int | None = None
    sent_formula: str = ""
    sent: float | None = None


def expected(config, schedule, stage_layers, grid, prediction) -> dict[str, Expected]:
    """Return {axis: Expected} of one rank. prediction: of that rank, for the sizes of its buffers.

    L is the number of blocks on this rank, R of those that are recomputed (--recompute block), m
    the number of microbatches.
    """
    stages = schedule.stages_by_rank[grid.group_rank("pp")]
    parts = [stage_parts(stage, stage_layers) for stage in stages]
    m = config.grid.num_microbatches
    found = {
        axis: _layers(config, axis, parts, m, len(prediction.groups[axis]))
        for axis in ("tp", "cp", "kv", "expert")
        if len(prediction.groups.get(axis, ())) > 1
    }
    if grid.size("pp") > 1:
        # Neighbouring stages on one rank need no message.
        hops = sum(
            0 <= other < schedule.num_stages and other not in stages
            for stage in stages
            for other in (stage - 1, stage + 1)
        )
        units, sizes = units_of(config)
        stream = units.stream
        found["pp"] = Expected(
            f"m * {2 * hops} (sends and receives)",
            2 * m * hops,
            f"m * {hops} * {text(stream)}",
            m * hops * value(stream, sizes),
        )
    if sums := _sums(config, prediction):
        found["tp"] = _plus(found["tp"], sums)
    copies = grid.size("dp") * grid.size("cp")
    if copies > 1:
        for groups, _ in prediction.segments:  # the last group sums: expert_data, and all copies
            ranks = prediction.groups.get(groups[-1], ())
            if len(ranks) > 1:
                found[groups[-1]] = _data(config, prediction, groups[-1], len(ranks), m)
    if len(prediction.groups.get("muon", ())) > 1:
        found["muon"] = Expected("2 (to homes, and back)", 2)
    inner = "inner" if grid.size(ISLAND) > 1 else "world"
    if len(prediction.groups[inner]) > 1:
        found[inner] = Expected("1 (the norm)", 1)
    if grid.size(ISLAND) > 1:
        found[ISLAND] = _islands(config, prediction, grid.size(ISLAND))
    return found


def _layers(config, axis: str, parts, m: int, q: int) -> Expected:
    """Return the Expected of an axis inside layers: blocks, recomputed ones, and the ends."""
    units, sizes = units_of(config)
    ends = [
        one
        for place, cost in ((1, units.entry), (2, units.head))
        for part in parts
        for one in cost.barriers * part[place]
        if one.axis == axis
    ]
    runs = []
    for number, kind in enumerate(units.kinds, 1):
        count = sum(units.blocks[block] is kind for part in parts for block in part[0])
        again = count * (config.memory.recompute == "block")
        barriers, letter = [one for one in kind.barriers if one.axis == axis], ""
        if len(units.kinds) > 1:
            letter = str(number)
        runs += [
            (f"L{letter}", count, barriers),
            (f"R{letter}", again, [one for one in barriers if one.again]),
        ]
    runs = [(letter, count, barriers) for letter, count, barriers in runs if count and barriers]
    calls = [f"{_calls(barriers, q)}{letter}" for letter, _, barriers in runs]
    bytes_sent = [f"{letter} * ({sent_text(barriers)})" for letter, _, barriers in runs]
    if axis == "tp" and bytes_sent and len(units.kinds) == 1:
        bytes_sent[0] = "L * one block"  # which has a row of its own
    calls += [f"{_calls(ends, q)}"] * bool(ends)
    bytes_sent += [sent_text(ends)] * bool(ends)
    runs.append(("", 1, ends))
    return Expected(
        f"m * ({' + '.join(calls) or 0})",
        m * sum(count * _calls(barriers, q) for _, count, barriers in runs),
        f"m * ({' + '.join(bytes_sent) or 0})",
        m * sum(count * _sent(barriers, sizes, q) for _, count, barriers in runs),
    )


def _calls(barriers: list[Barrier], q: int) -> int:
    return sum(one.calls(q) for one in barriers)


def _sent(barriers: list[Barrier], sizes: Letters, q: int) -> int:
    return sum(one.sent(sizes, q) for one in barriers)


def _sums(config, prediction) -> Expected | None:
    """Return the Expected of norm gradients summed over tp: each rank has those of its tokens.

    They are summed once per stage; if sharded, once per segment, as a rank's piece of it.
    """
    lengths = [length for groups, length in prediction.segments if "tp" in groups]
    if not lengths:
        return None
    copies = config.grid.island_dp * config.grid.cp if config.memory.zero else 1
    q, over = config.grid.tp, "/(dp*cp)" if config.memory.zero else ""
    numbers = sum(length // copies for length in lengths)
    return Expected(
        f"{len(lengths)}",
        len(lengths),
        f"2(q-1)/q * norms{over}",
        2 * (q - 1) / q * numbers * bytes_of_numbers(config)[1],
    )


def _plus(one: Expected, two: Expected) -> Expected:
    """Return the sum of both."""
    return Expected(
        f"{one.calls_formula} + {two.calls_formula}",
        one.calls + two.calls,
        f"{one.sent_formula} + {two.sent_formula}",
        one.sent + two.sent,
    )


def _data(config, prediction, group: str, group_size: int, m: int) -> Expected:
    """Return the Expected of a group that sums gradients and shards its states (--zero)."""
    (itemsize, sum_itemsize), memory = bytes_of_numbers(config), config.memory
    factor = (group_size - 1) / group_size
    own = [length for groups, length in prediction.segments if groups[-1] == group]
    numbers = sum(own)
    if memory.zero == 0:  # the number of calls depends on buckets and further groups
        return Expected(
            sent_formula="2(q-1)/q * gradients", sent=2 * factor * numbers * sum_itemsize
        )
    if memory.zero == 1:
        gathers = 1 if config.grid.islands is None else 2  # after an update, and where islands meet
        return Expected(
            f"{1 + gathers} segments",
            (1 + gathers) * len(own),
            f"(q-1)/q * (gradients + {'2 ' * (gathers > 1)}weights)",
            factor * numbers * (sum_itemsize + gathers * itemsize),
        )
    lengths = [
        length
        for units in prediction.reads.values()
        for unit in units
        for groups, length in unit
        if groups[-1] == group
    ]
    gathers, gathers_text = (1, "") if memory.keeps_gathered else (2 * m, "2*m ")
    calls, sums, words = len(own), numbers, "gradients"
    calls_text = f"{gathers_text}reads + segments"
    if memory.zero == 3:
        calls, sums, words = m * len(lengths), m * sum(lengths), "m gradients"
        calls_text = f"{gathers_text}reads + m reads"
    return Expected(
        calls_text,
        gathers * len(lengths) + calls,
        f"(q-1)/q * ({gathers_text}weights + {words})",
        factor * (gathers * sum(lengths) * itemsize + sums * sum_itemsize),
    )


def _islands(config, prediction, q: int) -> Expected:
    """Return the Expected of the step in which islands meet."""
    numbers, over = sum(own_lengths(config, prediction)), "/x" if config.memory.zero else ""
    size = numbers * bytes_of_numbers(config)[1] + 3 * 8  # of three votes
    every = f"once in {config.train.outer_interval} steps"
    return Expected(
        f"segments + 1 (votes), {every}",
        len(prediction.segments) + 1,
        f"2(q-1)/q * (N*s{over} + 24), {every}",
        2 * (q - 1) / q * size,
    )


def own_lengths(config, prediction) -> list[int]:
    """Return what a rank updates of each segment: all it holds, or its piece of it (--zero)."""
    return [
        length // (len(prediction.groups.get(groups[-1], "1")) if config.memory.zero else 1)
        for groups, length in prediction.segments
    ]


def bytes_of_numbers(config) -> tuple[int, int]:
    """Return the bytes of a number: in activations, and in sums and gradients, which stay in 32
    bits.
    """
    itemsize = np.dtype(config.run.dtype).itemsize
    return itemsize, max(itemsize, 4)


def layer(config, q: int, block: int = 0) -> Expected:
    """Return the Expected of tp for both passes of one microbatch in the block of this index."""
    units, sizes = units_of(config)
    barriers = [one for one in units.blocks[block].barriers if one.axis == "tp"]
    return Expected("", _calls(barriers, q), sent_text(barriers), _sent(barriers, sizes, q))


def one_block(records) -> list:
    """Return the records that belong to tp, the first block and the first microbatch.

    Those of recomputation are counted separately.
    """
    inside = [
        one
        for one in records
        if one.axis == "tp" and one.name.startswith("block") and one.phase != "recompute"
    ]
    first = [(one.name.split(".")[0], one.mb) for one in inside[:1]]
    return [one for one in inside if [(one.name.split(".")[0], one.mb)] == first]


def expert_rows(config) -> str:
    """Return how many times its tokens a rank sends per exchange of rows, and their number."""
    model, grid = config.model, config.grid
    each = chunk_size(model.experts, grid.ep)
    times = model.experts_per_token * (grid.ep - 1) / grid.ep
    rows = [phase for phase, ending, *_ in DISPATCH if ending in ("dispatch", "combine")]
    calls = sum(len(KINDS[kind].operations) for _, _, kind, _ in DISPATCH)
    return (
        f"experts: {each} of {model.experts} on a rank. It sends k(ep-1)/ep ="
        f" {times:g} times its tokens in each of"
        f" {rows.count('F')} exchanges of rows forward and {rows.count('I')} backward, of"
        f" {calls} calls for a block and a microbatch"
    )


# --- memory


class Form(NamedTuple):
    """Bytes and their formula; None where there is no formula."""

    text: str = ""
    size: float | None = None


def states(config, prediction) -> dict[str, Form]:
    """Return {label: Form} of weights, gradients and optimizer. prediction: of the rank.

    u0 and u1 are the largest units of even and of odd number, which take turns in two buffers; u is
    the larger of the two. Source: arXiv 1910.02054, for a split backward.
    """
    e, s = bytes_of_numbers(config)
    level = config.memory.zero
    over = "/x" if level and config.grid.island_dp * config.grid.cp > 1 else ""
    numbers = sum(length for _, length in prediction.segments)
    own = own_lengths(config, prediction)
    pieces = sum(own)
    units = [
        [sum(length for _, length in unit) for unit in units] for units in prediction.reads.values()
    ]
    turns = [max((size for stage in units for size in stage[odd::2]), default=0) for odd in (0, 1)]
    found = {"weights": Form("N*e", numbers * e), "gradients": Form("N*s", numbers * s)}
    if level == 3:
        kept = pieces * e
        found["weights"] = Form("N*e/x + (u0 + u1)*e", kept + sum(turns) * e)
        if config.memory.keeps_gathered:
            found["weights"] = (
                Form("N*e/x + the stage's units", kept + sum(units[0]) * e)
                if len(units) == 1
                else Form()
            )
        found["gradients"] = Form("N*s/x + u*s", pieces * s + max(turns) * s)
    masters = int(np.dtype(config.run.dtype).itemsize < s)
    by_copies: Counter[int] = Counter()
    for length, moments in zip(own, prediction.moments, strict=True):
        by_copies[moments + masters] += length
    several = len(by_copies) > 1  # Nk: numbers of which it keeps k copies
    forms = [f"{k}N{k if several else ''}*s{over}" for k in sorted(by_copies) if k]
    if forms:
        size = s * sum(copies * length for copies, length in by_copies.items())
        found["optimizer"] = Form(" + ".join(forms), size)
    return found


def kept_by_block(config) -> dict[str, Form]:
    """Return {"from F to I", "from I to W": Form} of what the first block keeps of one microbatch.

    From F to I these are inputs of norms, of products and of the activation function, and what
    attention saves. From I to W they are inputs and output gradients of norms and products. Source:
    arXiv 2205.05198, without dropout.
    """
    units, sizes = units_of(config)
    block = units.blocks[0]
    if config.memory.recompute == "block":
        block = block._replace(stash=units.stream)  # it keeps only its input
    return {
        f"one block, from {when}": Form(text(kept), value(kept, sizes))
        for when, kept in (("F to I", block.stash), ("I to W", block.kept))
    }
