"""Published measurements of training steps, as the planner's model sees them.

The rows are in bench/data, where SOURCES.md names source and licence of each. A row has a model, a
layout, a machine and a measured step.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mpipar.pipeline.schedules.catalog import FAMILIES
from mpipar.study.plan.job import STACKS, Layout, Shape, Stack
from mpipar.study.plan.machine import Machine, load_machine
from mpipar.study.plan.memory import GIB, fullest
from mpipar.study.plan.model import step_time

OLD_START = 3.5  # of collectives before 2023: two tables of A100, for different versions of NCCL
DATA = Path(__file__).parent / "data"
MACHINE_OF = {
    "A100-80-SXM": "a100-80",
    "A100-40-SXM": "a100-40",
    "H100-80-SXM": "h100",
    "H100-96-SXM-HBM2e-500W": "h100-96",
}
SIXTEEN_BITS = ("bf16", "fp16", "amp_bf16", "bf16 PURE")
ACTIVATION = {"gpt": "gelu", "llama": "swiglu", "sqrelu": "relu2"}
SCHEDULE = {"none": "1f1b", "zb-1p": "zb-h1", "zb-2p": "zb-h2"}  # which keeps as much
RECOMPUTE = {"full": "block", "selective": "attention", "selective?": "attention", "none": "none"}
FUSED_NORMS = ("Megatron", "MegaScale", "Meta", "FSDP", "torchtitan")  # parts of `system`


class Run(NamedTuple):
    """A measured step: a row of a file, and what the planner calls its parts."""

    row: dict[str, str]
    shape: Shape
    layout: Layout
    machine: Machine
    stack: Stack
    seconds: float

    @property
    def source(self) -> str:
        return self.row["source"]

    @property
    def predicted(self) -> float:
        """Seconds of the step in closed form."""
        return self.predicted_with(self.stack)

    def predicted_with(self, stack: Stack) -> float:
        """Return the step by other constants. zb-2p begins a step before the last one ends."""
        step = step_time(self.shape, self.layout, self.machine, stack)
        return step.total - step.bubble * (self.row["schedule"] == "zb-2p")

    @property
    def error(self) -> float:
        """The predicted step over the measured one, minus one."""
        return self.predicted / self.seconds - 1

    @property
    def gib(self) -> float:
        """Predicted memory of the fullest rank."""
        return fullest(self.shape, self.layout, self.stack).total / GIB


def stack_name(row: dict[str, str]) -> str:
    """Return the name of a row's software stack, by its column `system`."""
    return "fsdp" if any(part in row["system"] for part in ("FSDP", "torchtitan")) else "megatron"


def stack_for(row: dict[str, str], machine: Machine) -> Stack:
    """Return the Stack of a row, adjusted by its columns `system`, `attn` and `precision`.

    Without a word on attention, software has the usual kind of its device. DeepSpeed and software
    that is unknown here keep gradients in 16 bits; the latter has a kernel for norms only where
    `attn` names one, and otherwise keeps their inputs in 32 bits. Weights, gradients and moments
    are all in 16 bits where a row says so. A row's vocabulary is the one that was computed with.
    """
    stack, attention = replace(STACKS[stack_name(row)], pads=False), row["attn"]
    if not (attention != "unfused" if attention else machine.fused_attention):
        stack = replace(stack, fused=False, overlap=False)  # as software was before 2023
    if "DeepSpeed" in row["system"]:
        stack = replace(stack, gradient_bytes=2)
    elif not any(part in row["system"] for part in FUSED_NORMS):
        own = "rms" in attention.lower() or "norm" in attention.lower()
        stack = replace(stack, gradient_bytes=2, norm_bytes=0 if own else 4)
    if row["precision"].endswith("PURE"):
        return replace(stack, weight_bytes=2, gradient_bytes=2, optimizer_bytes=4)
    return stack


def layout_of(row: dict[str, str]) -> Layout:
    """Return the Layout of a row.

    Columns that are empty mean one chunk and no recompute. Weights that are gathered for each
    microbatch go with full recompute, the default of MaxText, whose rows do not state it.
    """
    dp, rows = int(row["dp"]), int(row["mbs"])
    microbatches = max(1, round(int(row["gbs"]) / (dp * rows)))
    zero = {"0": 0, "1": 1, "2": 3, "3": 3}.get(row["zero"], 1)
    chunks, name = int(row["chunks"] or 1), row["schedule"].partition("?")[0].partition(" ")[0]
    schedule = SCHEDULE.get(name, name)
    if chunks > 1 and not FAMILIES[schedule].looped:  # such as 1f1b with chunks
        schedule = "interleaved"
    if (
        row["zero"] == "2" and row["system"] == "MegaScale"
    ):  # shards like ZeRO-1, and gathers no weights
        zero = 1
    recompute = RECOMPUTE.get(row["recompute"], "block" if zero == 3 else "none")
    return Layout(
        dp,
        int(row["pp"]),
        int(row["cp"] or 1),
        int(row["tp"]),
        rows,
        microbatches,
        schedule,
        chunks,
        row["seq_par"] == "1",
        recompute,
        zero,
    )


def shape_of(row: dict[str, str]) -> Shape | None:
    """Return the Shape of a row's model; None if it is not dense, or not stated."""
    if row["arch"] not in ACTIVATION or not row["layers"]:
        return None
    width, heads = int(row["hidden"]), int(row["heads"])
    return Shape(
        layers=int(row["layers"]),
        d_model=width,
        ffn=int(row["ffn"]),
        heads=heads,
        kv_heads=int(row["kv_heads"]),
        head_dim=width // heads,
        vocab_size=int(row["vocab"]),
        seq_len=int(row["seq"]),
        activation=ACTIVATION[row["arch"]],
        positions="rope",
        tied=row["arch"] == "gpt",
    )


def run_of(row: dict[str, str], machines: dict[str, Machine]) -> Run | None:
    """Return the Run of a row; None if it lacks what a prediction needs, or is of another kind.

    machines: by the name of the device.
    """
    shape = shape_of(row)
    if (
        shape is None
        or row["device"] not in machines
        or row["precision"] not in SIXTEEN_BITS
        or not all(row[name] for name in ("mbs", "step_s", "dp"))
    ):
        return None
    machine = machines[row["device"]]
    if row["net_per_gpu_gbps"]:
        inner, outer = machine.links
        outer = replace(outer, gbytes_s=float(row["net_per_gpu_gbps"]) / 8)
        machine = replace(machine, links=(inner, outer))
    stack = stack_for(row, machine)
    if not stack.fused:
        links = [replace(one, latency_us=OLD_START * one.latency_us) for one in machine.links]
        machine = replace(machine, links=tuple(links))
    return Run(row, shape, layout_of(row), machine, stack, float(row["step_s"]))


def read_runs(name: str) -> list[Run]:
    """Return the runs of a file of bench/data that can be predicted."""
    machines = {device: load_machine(machine) for device, machine in MACHINE_OF.items()}
    found = (run_of(row, machines) for row in read_rows(name) if row["status"] == "ok")
    return [run for run in found if run]


def read_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a file of bench/data."""
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def published_runs() -> tuple[Run, ...]:
    """Return the published runs of dense models in 16 bits, on machines that the package knows."""
    return tuple(read_runs("published.csv"))
