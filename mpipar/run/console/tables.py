"""The tables and lines that a training run prints, as plain text built from plain values."""

import csv
import io
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from mpipar import models
from mpipar.comm.grid import Grid
from mpipar.comm.record import Key, Sums, family
from mpipar.config.grid import sizes_text
from mpipar.config.model import ModelConfig
from mpipar.config.text import counted
from mpipar.config.train import TrainConfig
from mpipar.models.decoder import CUT, ENTRY
from mpipar.run.process.consistency import ranges
from mpipar.train.optim import learning_rate

WIDTH = 100  # characters per line of text
BARRIER = ("axis", "barrier", "operation", "phase", "dtype", "calls/step", "bytes/step")


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with every column that one of them has; what a row lacks is empty."""
    file = io.StringIO()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def table(rows: list[tuple], left: int = 1) -> str:
    """Return rows of cells as aligned columns; the first `left` columns are left-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [
        [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in cells
    ]
    return "\n".join("  ".join(row).rstrip() for row in aligned)


def table_with_words(rows: list[tuple], left: int = 1) -> str:
    """Return a table whose last column is words: they go on in further lines where they are long.

    left: see `table`.
    """
    lines = table([(*cells, "|") for *cells, _ in rows], left).splitlines()
    filled = [
        textwrap.fill(
            str(words),
            WIDTH,
            initial_indent=line[:-1],
            subsequent_indent=" " * (len(line) - 1),
            break_long_words=False,
            break_on_hyphens=False,
        )
        or line[:-1].rstrip()
        for line, (*_, words) in zip(lines, rows, strict=True)
    ]
    return "\n".join(filled)


def nbytes(count: float) -> str:
    """Return bytes as text in KiB, MiB or GiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def short_count(count: float) -> str:
    """Return a count as 1.2k or 3.4M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return f"{count:.0f}"


def layout_text(grid) -> str:
    """Return the layout of a resolved GridConfig as text."""
    islands = f" in {counted(grid.islands, 'island')}" if grid.islands else ""
    attention = f", attention by {grid.cp_attention}" if grid.cp > 1 else ""
    return sizes_text(vars(grid)) + islands + attention


def headline(config, world_size: int, num_hosts: int, num_stages: int) -> str:
    """Return layout, schedule and model in two lines."""
    grid, model, run = config.grid, config.model, config.run
    kernels = f", {run.kernels} kernels" if run.kernels else ""
    accumulated = " (gradient accumulation)" * (grid.num_microbatches > 1)  # other programs' term
    return (
        f"{counted(world_size, 'rank')} on {counted(num_hosts, 'host')}:"
        f" {layout_text(grid)},"
        f" schedule {grid.schedule_csv or grid.schedule}, {counted(num_stages, 'stage')},"
        f" {counted(grid.num_microbatches, 'microbatch')}{accumulated}, {run.dtype} on {run.device}"
        f"{kernels}{f', products by {run.gemm} kernels' if run.gemm != 'blas' else ''}\n"
        f"model {run.preset}: {describe_model(model)};"
        f" {config.train.optimizer}, {counted(config.train.batch_size, 'row')} per step"
    )


def describe_model(config: ModelConfig) -> str:
    """Return the sizes of a resolved ModelConfig, for a headline, and how it differs from GPT-2."""
    one = config.completed()
    assert one.head_dim, "completed"
    keys = f" ({one.kv_heads} kv)" if one.kv_heads != one.heads else ""
    width = f" of {one.head_dim}" if one.head_dim * one.heads != one.d_model else ""
    more = (
        [", tied head"] * one.tied
        + [", RMSNorm"] * (one.norm == "rms")
        + [", SwiGLU"] * (one.activation == "swiglu")
        + [", RoPE"] * (one.positions == "rope")
    )
    return (
        f"{counted(one.layers, 'layer')}, D {one.d_model},"
        f" {counted(one.heads, 'head')}{keys}{width}, F {one.ffn},"
        f" T {one.seq_len}, V {one.vocab_size}{''.join(more)}"
    )


def describe_stage(stage: int, stage_layers, entry: str) -> str:
    """Return the layers of a stage, as '0: embedding, blocks 0-1'. entry: what precedes blocks."""
    first, count = sum(stage_layers[:stage]), stage_layers[stage]
    blocks = f"block{'s' * (count > 1)} {ranges(range(first, first + count))}"
    is_last = stage == len(stage_layers) - 1
    parts = [entry] * (stage == 0) + [blocks] * (count > 0) + ["head, loss"] * is_last
    return f"{stage}: {', '.join(parts) or 'no layers'}"


def holding(config, schedule, prediction, host: str | None = None) -> dict:
    """Return what the rank of a `Prediction` holds, as plain values. host: if it is known."""
    grid = Grid.of(config.grid, prediction.world_rank)
    split = models.layer_split(config, schedule)
    share = f"{grid.group_rank('tp') + 1}/{grid.size('tp')} of {CUT}"
    return {
        "rank": grid.world_rank,
        "host": host,
        "place": grid.describe(),
        "stages": [
            describe_stage(stage, split, ENTRY)
            for stage in schedule.stages_by_rank[grid.group_rank("pp")]
        ],
        "share": share if grid.size("tp") > 1 else "all",
        "params": prediction.num_params,
        "memory": prediction.peak_bytes,
    }


def holdings(facts: list[dict]) -> str:
    """Return what each rank holds, in one row per rank. facts: a `holding` of each."""
    rows = holding_rows(facts)
    return table(rows, left=len(rows[0]) - 2)


def holding_rows(facts: list[dict]) -> list[tuple]:
    """Return the cells of `holdings`, column names first; hosts only if they are known."""
    rows = [
        ("rank", "host", "place", "stage: layers", "share", "parameters", "predicted peak"),
        *(
            (
                fact["rank"],
                fact["host"],
                fact["place"],
                "; ".join(fact["stages"]),
                fact["share"],
                short_count(fact["params"]),
                nbytes(sum(fact["memory"].values())),
            )
            for fact in facts
        ),
    ]
    if all(fact["host"] is None for fact in facts):
        rows = [(row[0], *row[2:]) for row in rows]
    return rows


def measured_memory(facts: list[dict]) -> str:
    """Return predicted and measured bytes per rank: of arrays, and of the process."""
    rows = [
        ("rank", "predicted peak", "measured peak", "ratio", "whole process"),
        *(
            (
                fact["rank"],
                nbytes(predicted),
                nbytes(fact["measured"]),
                f"{fact['measured'] / predicted:.2f}",
                nbytes(fact["process"]),
            )
            for fact in facts
            for predicted in [sum(fact["memory"].values())]
        ),
    ]
    return table(rows)


def step_line(steps: int, line: dict, seconds_per_step: float) -> str:
    """Return the line of a step, in 80 columns, with fields in a fixed order.

    seconds_per_step sets the speed.
    """
    per_second = line["tokens_per_second"] * line["step_seconds"] / seconds_per_step
    norm = "inf" if line.get("skipped") else f"{line['grad_norm']:.3f}"
    took = (
        f"{seconds_per_step * 1e3:.0f} ms" if seconds_per_step < 10 else f"{seconds_per_step:.1f} s"
    )
    left = round((steps - line["step"]) * seconds_per_step)  # without evaluations and saves
    eta = f"{left // 60}:{left % 60:02d}" if left < 6000 else f"{left / 3600:.1f} h"
    return (
        f"step {line['step']:>{len(str(steps))}}/{steps} loss {line['loss']:.4f} norm {norm}"
        f" {took} {short_count(per_second)} tok/s"
        f" comm {line['comm_share_mean']:.0%}"
        f" eta {eta}"
    )


def short_warm_up(config: TrainConfig) -> str | None:
    """Return a note if the run ends within its warm-up."""
    if config.warmup_steps <= config.steps or not config.steps:
        return None
    return (
        f"the run ends within its warm-up of {config.warmup_steps} steps: the learning rate rises"
        f" to {learning_rate(config, config.steps):.2g} and never reaches {config.lr:g}"
    )


def crowded(hosts: list[str], cores: list[int]) -> str | None:
    """Return a remark on hosts with more ranks than cores, or None.

    hosts: of every rank. cores: that the ranks of its host may run on.
    """
    ranks = Counter(hosts)
    told = ", ".join(
        f"{host}: {ranks[host]} ranks share {have} core(s)"
        for host, have in dict(zip(hosts, cores, strict=True)).items()
        if ranks[host] > have
    )
    words = (
        "so ranks also wait for each other's core: the times show the order of the work, not the"
        " speed of a machine with a core for each rank"
    )
    return textwrap.fill(f"{told}, {words}", WIDTH) if told else None


def barriers(facts: list[list], steps: int, timed: bool = True) -> str:
    """Return the barriers of a step by name, summed over blocks and microbatches.

    facts: for each rank a list of [*Key, *Sums]. timed: whether the calls took time; those of a
    step on shapes did not.
    Calls and bytes are per step and summed over ranks; milliseconds are per step, mean and max over
    ranks.
    """
    found: dict[Key, list[Sums]] = defaultdict(lambda: [Sums()] * len(facts))
    for rank, counters in enumerate(facts):
        for row in counters:
            key, sums = Key(*row[: len(Key._fields)]), Sums(*row[len(Key._fields) :])
            own = found[key._replace(name=family(key.name))]
            own[rank] = own[rank].plus(sums)
    if not found:
        return "none: a single rank waits for no other"
    rows = [(*BARRIER, *["ms mean", "ms max"] * timed)]
    for key, ranks in sorted(found.items()):
        calls, size = sum(one.calls for one in ranks), sum(one.payload_bytes for one in ranks)
        ms = [one.nanoseconds * 1e-6 / steps for one in ranks]
        times = [f"{sum(ms) / len(ms):.2f}", f"{max(ms):.2f}"] * timed
        rows.append((*key, f"{calls / steps:.4g}", nbytes(size / steps), *times))
    return table(rows, left=len(Key._fields))
