"""The least time of a training step on one GPU, function by function, from shapes alone.

The real worker takes a step on shapes. Each array that a function reads or writes counts once, and
of a table of embeddings as many rows as there are tokens. No function can be faster than these
bytes at the memory's rate, or than its FLOPs at the peak of products.
"""

from __future__ import annotations

from typing import Any

from bench.results import markdown_table
from bench.training import config_of, take_step
from mpipar import ops as ops_module
from mpipar.comm.record import Recorder
from mpipar.ops.functions import MEMORY, Ops
from mpipar.ops.signature import Function
from mpipar.plan.job import utilization
from mpipar.plan.machine import load_machine

ONLY_WRITTEN = {("fill", "x"), ("copy", "dst"), ("adamw_runs", "copy")}  # arrays that are not read


class CountedOps(Ops):
    """Behaves like the wrapped ops on shapes; `found` has what calls of each function move and
    compute.

    bytes: of all arrays. largest: of each call's largest array, so that `bytes` are a number of
    passes over it.
    """

    def __init__(self, ops: Any) -> None:
        self._ops, self.found = ops, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def _call(self, function: Function, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        before = sum(self._ops.flops.values())
        result = getattr(self._ops, function.name)(*arguments, **named)
        if function.name in MEMORY:
            return result
        if sizes := moved_bytes(function, function.bind(arguments, named), result):
            own = self.found.setdefault(
                function.name, dict.fromkeys(("calls", "bytes", "largest", "flops"), 0)
            )
            for name, more in (
                ("calls", 1),
                ("bytes", sum(sizes)),
                ("largest", max(sizes)),
                ("flops", sum(self._ops.flops.values()) - before),
            ):
                own[name] += more
        return result


def moved_bytes(function: Function, given: dict[str, Any], result: Any) -> list[int]:
    """Return the bytes of each array that a call reads or writes; what it changes counts twice."""
    arrays, found = function.arrays(given), []
    tokens = max((x.size for part, x in arrays if part.name in ("ids", "positions")), default=0)
    for part, x in arrays:
        size = x.nbytes if "table" not in part.name else min(len(x), tokens) * x.nbytes // len(x)
        changed = part.written and (function.name, part.name) not in ONLY_WRITTEN
        found += [size] * (2 if changed else 1)
    made = result if isinstance(result, tuple) else (result,)
    return found + [
        x.nbytes
        for part, x in zip(function.gives, made, strict=False)
        if part in function.makes and hasattr(x, "nbytes")
    ]


def counted(words: list[str]) -> tuple[Any, dict[str, dict[str, int]]]:
    """Return the config of flags of `mpipar explain`, and the counts of its first rank's step."""
    config, recorder = config_of(words), Recorder()
    ops = CountedOps(ops_module.shapes_for(config.run, recorder))
    take_step(config, 0, recorder, ops)
    return config, ops.found


def floors(machine: str, words: list[str]) -> str:
    """Return the table of a step on a machine of `mpipar plan`, and the resulting MFU."""
    sheet, (config, found) = load_machine(machine), counted(words)
    peak, memory = sheet.peak_tflops[config.run.dtype] * 1e12, sheet.hbm_gbytes_s * 1e9
    rows, likely = [], 0.0
    for name, one in found.items():
        moving, computing = one["bytes"] / memory, one["flops"] / peak
        rows.append(
            {
                "function": name,
                "calls": one["calls"],
                "MB": one["bytes"] * 1e-6,
                "passes": one["bytes"] / one["largest"],
                "GFLOP": one["flops"] * 1e-9 or "-",
                "floor_us": max(moving, computing) * 1e6,
                "bound_by": "memory" if moving > computing else "products",
            }
        )
        rate = sheet.attention_tflops if "attention" in name else sheet.product_tflops
        likely += max(moving, one["flops"] / (rate * 1e12))
    rows.sort(key=lambda row: -row["floor_us"])
    floor = sum(row["floor_us"] for row in rows) * 1e-6
    of_memory = sum(row["floor_us"] for row in rows if row["bound_by"] == "memory")
    flops = sum(one["flops"] for one in found.values())
    most, share = (
        100 * utilization(flops, seconds, 1, peak * 1e-12) for seconds in (floor, likely)
    )
    return (
        f"{markdown_table(rows)}\n\nAll floors together are {floor * 1e3:.1f} ms, those of"
        f" memory {of_memory * 1e-3:.1f} ms. The MFU of this step of {flops * 1e-12:.1f} TFLOP"
        f" is therefore at most {most:.0f} %.\n**An estimate, not measured:**"
        f" {likely * 1e3:.0f} ms and {share:.0f} % with memory at its full rate, products at"
        f" {sheet.product_tflops:.0f} and attention at {sheet.attention_tflops:.0f}"
        " TFLOP/s."
    )
