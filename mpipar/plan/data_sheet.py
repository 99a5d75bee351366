"""A cost model from a machine's data sheet: the alternative to measuring a `Machine`.

The planner's closed forms give the time of our own program's passes, messages and sums, so
`explain` and `--layout auto` predict a step on devices that are not at hand, from the same barriers
as on measured ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from mpipar.comm.grid import Grid
from mpipar.config.sections import Config
from mpipar.data.rows import rows_per_microbatch
from mpipar.errors import UsageError
from mpipar.plan import machine_file
from mpipar.plan.block_time import block_times
from mpipar.plan.cluster import STACKS, Cluster, Stack, load_cluster, machine_names
from mpipar.plan.collectives import all_reduce, exchange
from mpipar.plan.formats import FORMATS
from mpipar.plan.layout import Layout
from mpipar.plan.machine import HOP, STREAM, Curve, Machine, Passes, Units, settings_of
from mpipar.plan.shape import Shape
from mpipar.plan.step_time import seconds_of_a_number

LINK = "by data sheet"
SIZES = tuple(1 << power for power in range(3, 41))  # bytes of messages and sums


def machine_of(text: str, configs: Sequence[Config]) -> Machine:
    """Return the Machine that --machine names: a file of bench.calibrate, or a data sheet.

    configs: resolved, those whose steps will be predicted. Raises UserErrors.
    """
    known = text in machine_names() or text.endswith(".toml")
    if not known and (text.endswith(".json") or os.path.exists(text)):
        return machine_file.load(text)
    return from_data_sheet(load_cluster(text), configs)  # its error lists the names


def from_data_sheet(cluster: Cluster, configs: Sequence[Config]) -> Machine:
    """Return the Machine of resolved configs, with one device per rank. Raises UsageError."""
    dtype = configs[0].run.dtype
    if dtype not in cluster.peak_tflops:
        raise UsageError(
            f"--dtype {dtype}: {cluster.name} has no rate for it; use one of"
            f" {', '.join(one for one in FORMATS if one in cluster.peak_tflops)}"
        )
    cluster, stack = cluster.with_dtype(dtype), STACKS["mpipar"].with_dtype(dtype)
    ranks = max(config.grid.num_ranks for config in configs)
    strides: dict[int, int] = {ranks: 1}  # of groups by their size: the widest
    hop = 1
    for config in configs:
        grid = Grid.of(config.grid, 0)
        line = grid.group("pp")
        hop = max(hop, *(after - one for one, after in pairwise(line)), 1)
        # The ends of the pipeline form a group if the table is tied.
        for group in [*map(grid.group, grid.parts), line[:: len(line) - 1 or 1]]:
            if len(group) > 1:
                strides[len(group)] = max(strides.get(len(group), 1), group[1] - group[0])

    def curve(operation: str, size: int, seconds: Callable[[int], float]) -> Curve:
        return Curve.through(operation, LINK, size, {one: seconds(one) for one in SIZES}, 0)

    message = partial(exchange, cluster, stride=hop)
    start = message(SIZES[0])
    curves = [
        curve(HOP, 2, message),
        curve(STREAM, 2, lambda nbytes: max(1e-12, message(nbytes) - start)),
    ]
    curves += [
        curve(operation, size, partial(all_reduce, cluster, ranks=size, stride=stride))
        for size, stride in strides.items()
        if size > 1
        for operation in ("all-reduce", "iall-reduce")
    ]
    units = tuple(units_of(cluster, stack, config) for config in configs)
    return Machine(
        tuple(curves),
        (),
        (),
        (),
        None,
        (),
        units,
        ranks,
        ranks,
        {"data sheet": cluster.name, "basis": cluster.basis},
    )


def layout_of(config: Config) -> Layout:
    """Return the planner's Layout of a resolved config, for the time of its passes."""
    grid, memory = config.grid, config.memory
    return Layout(
        grid.dp,
        grid.pp,
        grid.cp,
        grid.tp,
        rows_per_microbatch(config),
        grid.num_microbatches,
        sequence_parallel=config.model.sequence_parallel,
        ep=grid.ep,
        recompute=memory.recompute if memory.recompute == "attention" else "none",
    )


def units_of(cluster: Cluster, stack: Stack, config: Config) -> Units:
    """Return the closed-form passes of a config's blocks and head as `Units`, as if measured."""
    shape = Shape.of(config.model.completed())
    block = block_times(shape, layout_of(config), cluster, stack)
    passes = Passes(block.f.total, block.i.total + block.again.total, block.w.total)
    return Units(
        settings_of(config.model),
        config.run.dtype,
        config.train.optimizer,
        config.grid.tp,
        rows_per_microbatch(config),
        Passes(0.0, 0.0, 0.0),
        passes,
        Passes(*[block.head.total / 3] * 3),
        seconds_of_a_number(cluster, stack),
        ep=config.grid.ep,
    )
