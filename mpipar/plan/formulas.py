"""The closed forms of a step's barriers: what they carry and how often they come.

Each model has a module of its own with `payload`, `layer`, `ends` and `replicated`. The factors are
those of ring algorithms, per rank.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes  # noqa: F401 - NumPy knows bfloat16 by it
import numpy as np

from mpipar.layers.context import recomputed_blocks
from mpipar.models.stage import stage_parts
from mpipar.plan import convnet_formulas, decoder_formulas

FACTORS = {"all_reduce": "2(q-1)/q", "all_gather": "(q-1)/q", "reduce_scatter": "(q-1)/q",
           "all_to_all": "(q-1)/q"}
FORMULAS = {"decoder": decoder_formulas, "convnet": convnet_formulas}


def payload(name: str, operation: str, config, itemsize: int, group_size: int,
            ) -> tuple[str, int] | None:
    """(formula, bytes) of an operation's payload; None where there is no formula."""
    return FORMULAS[config.model.model].payload(
        name, operation, config, itemsize, group_size)


def sent(record) -> str:
    """The factor from payload to bytes sent, as text."""
    return FACTORS.get(record.operation, "1" if record.operation == "send" else "0")


def letters(config) -> str:
    """What the letters and words of the formulas mean, for a reader of `mpipar explain`."""
    found = f"{FORMULAS[config.model.model].LETTERS},\nN numbers of this rank's parameters"
    if config.memory.zero:
        found += ", x ranks that share them out, one segment after the other"
    if config.memory.zero == 3:
        found += (",\nreads: the segments that all units read, u0 and u1: the largest units of even"
                  " and of odd number,\nu: the larger one")
    return found


class Expected(NamedTuple):
    """One rank's calls and bytes sent per step over one axis; None where there is no formula."""

    calls_formula: str = ""
    calls: int | None = None
    sent_formula: str = ""
    sent: float | None = None


def expected(config, schedule, stage_layers, grid, prediction) -> dict[str, Expected]:
    """{axis: Expected} of one rank. prediction: of that rank, for the sizes of its buffers.

    L is the number of blocks on this rank, R of those that run forward again (--recompute block), m
    the number of microbatches. A schedule whose ranks hold a second stage for the other direction
    sends half of the microbatches each way.
    """
    stages, mirror = schedule.stages_of(grid.pp_rank), schedule.placement == "mirror"
    parts = [stage_parts(stage, stage_layers) for stage in stages]
    m = config.grid.num_microbatches // (1 + mirror), "m/2" if mirror else "m"
    found = {}
    if grid.tp_size > 1:
        found["tp"] = _tensor_parallel(config, parts, *m, grid.tp_size, prediction)
    if grid.pp_size > 1:
        # Neighbouring stages on one rank need no message. A mirror's stages are of two directions.
        hops = sum(0 <= other < schedule.num_stages and (mirror or other not in stages)
                   for stage in stages for other in (stage - 1, stage + 1))
        text, size = payload("activations", "send", config, bytes_of_numbers(config)[0], 2)
        found["pp"] = Expected(f"{m[1]} * {2 * hops} (sends and receives)", 2 * m[0] * hops,
                               f"{m[1]} * {hops} * {text}", m[0] * hops * size)
    if grid.cp_size > 1:
        itemsizes = bytes_of_numbers(config)
        first = decoder_formulas.context(config, *itemsizes, grid.cp_size)
        again = decoder_formulas.context_again(config, itemsizes[0], grid.cp_size)
        first = first[0], f"({first[1]})", first[2]
        calls, calls_text, size, text = _blocks(parts, config, first, again)
        found["cp"] = Expected(f"{m[1]} * ({calls_text})", m[0] * calls,
                               f"{m[1]} * ({text})", m[0] * size)
    kv_heads = config.model.whole_kv_heads
    if 0 < kv_heads < grid.tp_size:
        numbers = [decoder_formulas.shared(config, len(part[0])) for part in parts]
        sharing = grid.tp_size // kv_heads
        found["kv"] = Expected(
            "1 for each stage with blocks", sum(count > 0 for count in numbers),
            "2(q-1)/q * gradients of keys and values",
            2 * (sharing - 1) / sharing * sum(numbers) * bytes_of_numbers(config)[1])
    copies = grid.dp_size * grid.cp_size
    if copies > 1:
        found["data" if grid.cp_size > 1 else "dp"] = _data(config, prediction, copies, *m)
    if grid.world_size > 1:
        found["world"] = Expected("1 (the norm)", 1)
    return found


def _data(config, prediction, group_size: int, m: int, m_text: str) -> Expected:
    """The Expected of the ranks that sum gradients, and share out what they keep (--zero).

    Segments are shared out one by one. Reads are the segments that all units read: those of a tied
    table count for each of its users. Source: arXiv 1910.02054, for a split backward.
    """
    (itemsize, sum_itemsize), memory = bytes_of_numbers(config), config.memory
    factor = (group_size - 1) / group_size
    if memory.zero == 0:  # the number of calls depends on buckets and further groups
        return Expected(sent_formula="2(q-1)/q * gradients",
                        sent=2 * factor * prediction.num_params * sum_itemsize)
    segments = [one for stage in prediction.segments.values() for one in stage]
    numbers = sum(run.stop - run.start for *_, run in segments)
    if memory.zero == 1:
        return Expected("2 segments", 2 * len(segments), "(q-1)/q * (gradients + weights)",
                        factor * numbers * (sum_itemsize + itemsize))
    lengths = [one for units in prediction.reads.values() for unit in units for one in unit]
    gathers, gathers_text = (1, "") if memory.gathers == "stage" else (2 * m, f"2*{m_text} ")
    calls, sums, text = len(segments), numbers, "gradients"
    calls_text = f"{gathers_text}reads + segments"
    if memory.keeps_pieces_of_gradients:
        calls, sums, text = m * len(lengths), m * sum(lengths), f"{m_text} gradients"
        calls_text = f"{gathers_text}reads + {m_text} reads"
    return Expected(calls_text, gathers * len(lengths) + calls,
                    f"(q-1)/q * ({gathers_text}weights + {text})",
                    factor * (gathers * sum(lengths) * itemsize + sums * sum_itemsize))


def _tensor_parallel(config, parts, m: int, m_text: str, group_size: int,
                     prediction) -> Expected:
    """The Expected of tp: blocks, ends, and the sums of replicated gradients.

    These come once per stage; what is shared out, once per segment, as a rank's piece of it.
    """
    module, sizes = FORMULAS[config.model.model], bytes_of_numbers(config)
    first, last = (sum(part[end] for part in parts) for end in (1, 2))
    count, _, sent_once = module.layer(config, sizes[0], group_size)
    calls, calls_text, size, text = _blocks(
        parts, config, (count, "one block", sent_once),
        module.again(config, sizes[0], group_size))
    ends = module.ends(config, first, last, *sizes, group_size)
    end_calls = sum(end[0] for end in ends)
    texts = ([text] if text else []) + [end[1] for end in ends]
    numbers = [module.replicated(config, len(part[0]), part[2]) for part in parts]
    sums, text_of_sums = sum(count > 0 for count in numbers), "2(q-1)/q * norms"
    if config.memory.zero and sums:
        copies, text_of_sums = config.grid.dp * config.grid.cp, "2(q-1)/q * norms/(dp*cp)"
        numbers = [(one.run.stop - one.run.start) // copies
                   for segments in prediction.segments.values() for one in segments
                   if "tp" in one.groups]
        sums = len(numbers)
    return Expected(
        f"{m_text} * ({calls_text} + {end_calls})" + (f" + {sums}" if sums else ""),
        m * (calls + end_calls) + sums,
        f"{m_text} * ({' + '.join(texts)})" + (f" + {text_of_sums}" if sums else ""),
        m * (size + sum(end[2] for end in ends))
        + 2 * (group_size - 1) / group_size * sum(numbers) * sizes[1])


def _blocks(parts, config, first, again) -> tuple[int, str, float, str]:
    """(calls, their formula, bytes sent, their formula) of a rank's blocks and a microbatch.

    first, again: (calls, formula, bytes) of both passes of a block, and of its recomputation.
    """
    counts = [len(part[0]) for part in parts]
    blocks, twice = sum(counts), sum(min(count, recomputed_blocks(config)) for count in counts)
    texts = [f"L * {first[1]}"] * (blocks > 0) + [f"R * ({again[1]})"] * (twice > 0)
    return (blocks * first[0] + twice * again[0],
            f"{first[0]}L" + (f" + {again[0]}R" if twice else ""),
            blocks * first[2] + twice * again[2], " + ".join(texts))


def bytes_of_numbers(config) -> tuple[int, int]:
    """Bytes of a number: in activations, and in sums and gradients, which keep 32 bits."""
    itemsize = np.dtype(config.run.dtype).itemsize
    return itemsize, max(itemsize, 4)


def layer(config, itemsize: int, group_size: int) -> tuple[int, str, float]:
    """(calls, formula, bytes that a rank sends) over tp for one block and microbatch."""
    return FORMULAS[config.model.model].layer(config, itemsize, group_size)


def one_block(records) -> list:
    """Those records that belong to tp, the first block and the first microbatch.

    Recomputation counts apart.
    """
    inside = [one for one in records if one.axis == "tp" and one.name.startswith("block")
              and one.phase != "recompute"]
    first = [(one.name.split(".")[0], one.mb) for one in inside[:1]]
    return [one for one in inside if [(one.name.split(".")[0], one.mb)] == first]


def counted(records) -> dict[str, int]:
    """{axis: calls} of a step's records."""
    counts: dict[str, int] = {}
    for record in records:
        counts[record.axis] = counts.get(record.axis, 0) + 1
    return counts
