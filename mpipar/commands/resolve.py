"""From what the user typed to a complete Config; one error names all mistakes at once."""

import contextlib
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from mpipar.checkpoint import formats
from mpipar.commands.source import find_source
from mpipar.config.grid import AUTO, GridConfig
from mpipar.config.reading import Reading
from mpipar.config.resolve import Check, complete
from mpipar.config.run import RunConfig
from mpipar.config.sections import Config, build, is_in_force, settings
from mpipar.config.setting import flag
from mpipar.data.dataset import is_dataset, read_dataset
from mpipar.errors import DataError, UsageError, UserError, combine
from mpipar.files.text import counted
from mpipar.ops import kernel_problems, shapes_for
from mpipar.partition.context import keeps_scores
from mpipar.pipeline.csv_format import read_csv
from mpipar.pipeline.schedules.catalog import num_stages, schedule_problems
from mpipar.trace.tracer import trace_problems
from mpipar.train.loss_scale import loss_scale_problems

MOST_WORK = 1 << 15  # forward passes of blocks in a step of a pipeline rank


def resolve(reading: Reading, world_size: int,
            checks: Iterable[Check] = ()) -> tuple[Config, list[str]]:
    """The complete Config of a command for this number of ranks, and notes for the user.

    checks: the command's own, besides those of values, layout, weights' shape and schedule. Raises
    one UserError with all problems. Every rank that calls it gets the same Config.
    """
    config = reading.config
    found = [*reading.problems, *silent_hang(reading)]
    errors: list[UserError] = [UsageError(found)] if found else []
    source_notes = []
    if config.run.init_from is not None:
        try:
            source = find_source(config.run.init_from, f"--init-from {config.run.init_from}")
            given = reading.given if "seq_len" not in reading.bad else {}
            shape = formats.model_settings(source, given.get("seq_len"))
            if shape.get("positions") == "rope" and "seq_len" in given:
                del shape["seq_len"]  # rotations fit rows of any length
            config = with_weights_shape(reading, shape, source)
            source_notes = formats.start_notes(source)
        except UserError as error:
            errors.append(error)
    elif size := data_vocabulary(reading):
        config = replace(config, model=replace(config.model, vocab_size=size))
        source_notes = [f"--vocab-size {size}, the vocabulary of the data"]
    own = (stage_problems, work_problems, trace_problems, loss_scale_problems, kernel_problems)
    checks = (*((check, UsageError) for check in own), *checks)
    config, notes, found = complete(config, world_size, checks, reading.bad)
    errors += found
    if errors:
        raise combine(errors)
    return config, [*notes, *source_notes, *memory_notes(config)]


def memory_notes(config: Config) -> list[str]:
    """A note if there are no scores that --recompute attention could make again."""
    if config.memory.recompute != "attention" or keeps_scores(
            config, shapes_for(config.run, None).tiled_head_width):
        return []
    method = config.grid.cp_attention
    who = f"--cp-attention {method}" if method in ("ring", "gather") else "--kernels fused"
    return [f"--recompute attention: changes nothing, because {who} keeps no scores"]


def with_weights_shape(reading: Reading, shape: dict, source: str) -> Config:
    """The Config with the shape of its first weights; UsageError if flags contradict it.

    source: the folder of these weights, which the Config names from now on.
    """
    typed = {field.name: value for _, field, value in settings(reading.config)}
    if shape["model"] != typed["model"]:
        raise UsageError(f"--init-from {typed['init_from']}: holds a {shape['model']}, but --model"
                         f" is {typed['model']}; type --model {shape['model']}")
    found = [f"{flag(name)} {typed[name]}: contradicts --init-from {typed['init_from']}, where it "
             f"is {value}; leave {flag(name)} out"
             for name, value in shape.items()
             if name in typed.keys() & reading.given.keys() - reading.bad
             and typed[name] not in (None, value)]
    if found:
        raise UsageError(found)
    named = {name: value for name, value in typed.items() if value is not None}
    return build(named | shape | {"init_from": source})


def data_vocabulary(reading: Reading) -> int | None:
    """The vocabulary of prepared data, if it decides that of the model.

    It does so where the user names no --vocab-size, and the model's would be smaller.
    """
    config = reading.config
    prepared = next(filter(is_dataset, config.run.data), None)
    if prepared is None or "vocab_size" in reading.given or not is_in_force(config, "vocab_size"):
        return None
    with contextlib.suppress(DataError):  # what is wrong with it is said where it is read
        found = read_dataset(Path(prepared))[0].vocab_size
        return found if found > config.model.vocab_size else None
    return None


def silent_hang(reading: Reading) -> list[str]:
    """The problem of a hang warning that cannot come, because --hang-stop ends the job before.

    Only a warning that the user set is a problem. The default one may be later than --hang-stop.
    """
    run = reading.config.run
    if reading.bad & {"hang_warn", "hang_stop"} or run.hang_warn == RunConfig.hang_warn or not (
            0 < run.hang_stop < run.hang_warn < math.inf):
        return []
    return [(f"--hang-warn {run.hang_warn:g}: never comes, --hang-stop {run.hang_stop:g} ends the"
             " job before; give a smaller --hang-warn, 0 for none, or a larger --hang-stop")]


def stage_problems(config: Config) -> list[str]:
    """Counts that the schedule does not take, or --stage-layers that do not fit its stages."""
    grid = config.grid
    if grid.schedule_csv is not None:
        return csv_problems(grid)
    if grid.schedule == AUTO:  # auto chooses later among schedules that take the counts
        return [f"{flag(name)} fixes {what}, which --schedule auto chooses: give one of them"
                for name, what in (("stage_layers", "the stages"), ("group_size", "the groups"))
                if getattr(grid, name) is not None]
    found = schedule_problems(
        grid.schedule, grid.pp, grid.num_microbatches, grid.chunks, grid.group_size)
    if found:
        return found
    stages = num_stages(grid.schedule, grid.pp, grid.chunks)
    return split_problems(grid, stages)


def work_problems(config: Config) -> list[str]:
    """What is wrong if a step has so many passes of blocks that its prediction takes minutes."""
    blocks, num_mb = -(-config.model.layers // config.grid.pp), config.grid.num_microbatches
    if blocks * num_mb <= MOST_WORK:
        return []
    return [(f"--num-microbatches {num_mb}: with {counted(blocks, 'block')} on a pipeline rank"
             f" a step has {blocks * num_mb:,} passes of blocks, and at most {MOST_WORK:,} are"
             f" planned; use at most --num-microbatches {MOST_WORK // blocks}, or a larger --pp")]


def split_problems(grid, stages: int) -> list[str]:
    """What is wrong if --stage-layers names more or fewer stages than there are."""
    if grid.stage_layers is None or len(grid.stage_layers) == stages:
        return []
    split = ",".join(map(str, grid.stage_layers))
    named = (f"--schedule-csv {grid.schedule_csv}" if grid.schedule_csv
             else f"--schedule {grid.schedule} with pp {grid.pp}")
    return [(f"--stage-layers {split}: names {counted(len(grid.stage_layers), 'stage')}, but"
             f" {named} has {stages}")]


def csv_problems(grid) -> list[str]:
    """What is wrong if the file's schedule is for other numbers of ranks or microbatches."""
    try:
        schedule = read_csv(Path(grid.schedule_csv))
    except UserError as error:
        return [f"--schedule-csv {grid.schedule_csv}: {text}" for text in error.problems]
    found = [f"{flag(name)} {getattr(grid, name)}: --schedule-csv {grid.schedule_csv} brings its"
             " own order of work; give one of them"
             for name in ("schedule", "chunks", "group_size")
             if getattr(grid, name) != getattr(GridConfig, name)]
    for name, have, want in (("--pp", grid.pp, schedule.pp_size),
                             ("--num-microbatches", grid.num_microbatches,
                              schedule.num_microbatches)):
        if have != want:
            found.append(
                f"--schedule-csv {grid.schedule_csv}: is made for {name} {want}, not {have}")
    return found + split_problems(grid, schedule.num_stages)
