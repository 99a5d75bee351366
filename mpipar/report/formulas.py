"""The closed forms of a step's barriers: what they carry, how often they come.

What depends on the model is in a module with `payload` and `tensor_parallel_calls`. Source of the
factors: ring algorithms, per rank.
"""

from __future__ import annotations

from mpipar.models.stage import stage_parts
from mpipar.report import convnet_formulas, decoder_formulas
from mpipar.trace import AXIS, DTYPE, MB, NAME, OPERATION

FACTORS = {"all_reduce": "2(q-1)/q", "all_gather": "(q-1)/q", "reduce_scatter": "(q-1)/q"}
FORMULAS = {"decoder": decoder_formulas, "convnet": convnet_formulas}


def payload(record, config, itemsize: int, group_size: int) -> tuple[str, int] | None:
    """(formula, bytes) of a record's payload, None where there is no formula."""
    return FORMULAS[config.model.model].payload(record, config, itemsize, group_size)


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
    if grid.tp_size > 1:
        calls = FORMULAS[config.model.model].tensor_parallel_calls
        found["tp"] = calls(config, blocks, first, last, len(worker_stages))
    found = {axis: calls for axis, calls in found.items() if calls}
    if grid.pp_size > 1:
        hops = 2 * len(worker_stages) - first - last  # edges of its stages to others
        if all(abs(a - b) > 1 for a in worker_stages for b in worker_stages if a != b):
            found["pp"] = f"m * {2 * hops} (sends and receives)", 2 * m * hops
    if grid.world_size > 1:
        found["world"] = "1 (the norm)", 1
    return found


def layer(config, itemsize: int, group_size: int) -> tuple[int, str, float] | None:
    """(calls, formula, bytes that a rank sends) over tp for one block and microbatch, or None."""
    return FORMULAS[config.model.model].layer(config, itemsize, group_size)


def one_block(records) -> list:
    """The records over tp of the first block and microbatch among them."""
    inside = [one for one in records if one[AXIS] == "tp" and one[NAME].startswith("block")]
    first = [(one[NAME].split(".")[0], one[MB]) for one in inside[:1]]
    return [one for one in inside if [(one[NAME].split(".")[0], one[MB])] == first]


def expected_sent(records, config, calls: dict, gradient_bytes: int) -> dict:
    """{axis: (formula, bytes that the rank sends per step)} over pp and dp.

    calls: `expected_calls`. gradient_bytes: of all gradients of this rank.
    """
    found, dp = {}, config.grid.dp
    message = next((one for one in records if (one[AXIS], one[OPERATION]) == ("pp", "send")), None)
    if message is not None and "pp" in calls:
        text, size = payload(message, config, message[DTYPE].itemsize, config.grid.pp)
        sends, m = calls["pp"][1] // 2, config.grid.num_microbatches
        found["pp"] = f"m * {sends // m} * {text}", sends * size
    if dp > 1:
        found["dp"] = "2(q-1)/q * gradients", 2 * (dp - 1) / dp * gradient_bytes
    return found


def counted(records) -> dict[str, int]:
    """{axis: calls} of a step's records."""
    counts: dict[str, int] = {}
    for record in records:
        counts[record[AXIS]] = counts.get(record[AXIS], 0) + 1
    return counts
