"""The least time of a training step on one GPU, function by function, from shapes alone.

No function can be faster than the bytes that it has to move at the memory's rate, or than its FLOPs
at the peak of products.
"""

from __future__ import annotations

from bench.kernels.floors import counted
from bench.results import markdown_table
from mpipar.study.plan.job import utilization
from mpipar.study.plan.machine import load_machine


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
