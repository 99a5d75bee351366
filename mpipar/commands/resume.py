"""Where a run begins: at step 1, or behind the checkpoint that `--resume` stands for.

World rank 0 alone looks at the disk, and tells the others what it found. So every rank goes on from
the same step with the same settings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mpipar.checkpoint.load import load_state
from mpipar.checkpoint.manifest import NAME, committed_steps, read_manifest
from mpipar.comm.facts import broadcast_text, gather_facts
from mpipar.comm.grid import AXES
from mpipar.commands.run_folder import (
    CHECKPOINTS,
    finished_step,
    is_run,
    newest_step,
)
from mpipar.config.layout import sizes_text
from mpipar.config.reading import values_of
from mpipar.config.resumed import resumed
from mpipar.config.run import AUTO, NEVER, named_folder
from mpipar.errors import DataError, UsageError
from mpipar.files.text import brief
from mpipar.trace.tracer import trace_steps
from mpipar.train.learning_rate import of_new_length


@dataclass(frozen=True)
class Start:
    """Where a run begins; the same on every rank.

    folder: the run folder to go on in, or None for a new one. newest: its newest step. candidates:
    folders of steps, the one to load first; the others are what `auto` may fall back to. step,
    config (TOML), layout, schedule, data: of the first candidate whose manifest can be read.
    finished: the step with which the run has ended, or 0. notes: lines for the user.
    """

    folder: str | None = None
    newest: int = 0
    candidates: tuple[str, ...] = ()
    step: int = 0
    config: str = ""
    layout: Mapping[str, int] = field(default_factory=dict)
    schedule: str = ""
    data: Mapping[str, object] = field(default_factory=dict)
    finished: int = 0
    notes: tuple[str, ...] = ()


def agreed_start(session, run) -> Start:
    """The Start of `--resume`, found by world rank 0. run: the RunConfig that the user typed.

    Comm: one broadcast over the world, if a run is to go on.
    """
    if run.resume == NEVER:
        return Start()
    world = session.world
    found = session.agree(lambda: find_start(run) if world.rank == 0 else None)
    text = broadcast_text(world, json.dumps(asdict(found)) if found else "")
    return Start(**json.loads(text))


def find_start(run) -> Start:
    """Look for the checkpoint that --resume stands for; raise UserError if there is none to take.

    `auto` takes the newest one that can be read, and none in a folder without any.
    """
    if run.resume == AUTO:
        source = folder = named_folder(run)
        if folder is None or not is_run(folder):
            return Start()
        steps = [path for _, path in committed_steps(source / CHECKPOINTS)][::-1]
        if not steps:
            return Start(str(folder), finished=finished_step(folder), notes=(
                f"{folder} has no checkpoint: the run starts at step 1",))
    else:
        source, steps = _named_steps(run.resume)
        folder = named_folder(run) or source
        folder = source if folder.resolve() == source.resolve() else None
    notes = []
    for number, path in enumerate(steps):
        try:
            found = read_manifest(path)
            values_of(found.config)
        except (DataError, ValueError) as error:
            damage = str(error) if isinstance(error, DataError) else f"{path / NAME}: {error}"
            notes.append(damage)
            continue
        return Start(
            str(folder) if folder else None, newest_step(folder) if folder else 0,
            tuple(map(str, steps[number:])), found.step, found.config, found.layout,
            found.schedule, found.data, finished_step(folder) if folder else 0,
            tuple(fallback(note) for note in notes))
    raise DataError([*notes, f"--resume {run.resume}: no checkpoint of {source} can be read"])


def _named_steps(text: str) -> tuple[Path, list[Path]]:
    """(run folder, the one step) of a path to a run or to one of its steps."""
    path = Path(text)
    if path.parent.name == CHECKPOINTS and (
            os.path.exists(path / NAME) or not os.path.isdir(path)):
        return path.parent.parent, [path]
    steps = committed_steps(path / CHECKPOINTS)
    if not steps:
        cure = (f"; start it again with --resume auto --out {text}" if is_run(path)
                else "; give the folder of a run, or one of its checkpoints/step-...")
        raise DataError(f"--resume {text}: there is no checkpoint here{cure}")
    return path, [steps[-1][1]]


def fallback(damage: str) -> str:
    """What is said when a checkpoint cannot be used and the one before it is taken."""
    return f"DAMAGED CHECKPOINT, falling back to the one before: {damage}"


def with_saved_settings(reading, start: Start, world_size: int):
    """The Reading with the settings of the checkpoint below those that the user names."""
    return resumed(reading, values_of(start.config), world_size) if start.candidates else reading


def start_problems(start: Start):
    """The check that the run has steps left behind its checkpoint, or none at all."""
    def problems(config) -> list[str]:
        if config.train.steps >= start.step:
            return []
        return [(f"--steps {config.train.steps}: the checkpoint is of step {start.step} already;"
                 f" use {start.step} or more")]
    return problems, UsageError


def behind(start: Start, inputs):
    """The Inputs of a run that begins behind `start`, with notes of what is not as it was.

    A trace whose first step is done already is not written again.
    """
    config, notes = inputs.config, [*start.notes]
    chosen, was = trace_steps(config.run.trace), values_of(start.config).get("steps")
    if chosen and chosen[0] <= start.step:
        notes.append(f"--trace {config.run.trace}: the run goes on behind step {start.step}, so"
                     " nothing is traced")
        config = replace(config, run=replace(config.run, trace=None, trace_ops=False))
    if start.candidates and config.train.steps != was:
        notes.append(f"--steps {config.train.steps}, {was} before: {of_new_length(config.train)}")
    return replace(inputs, config=config, notes=[*notes, *inputs.notes])


def check_data(start: Start, found: Mapping[str, object]) -> None:
    """Raise DataError if the data is not what the checkpoint was trained on."""
    if start.candidates and start.data != found:
        raise DataError(f"--data: has changed since the checkpoint: {describe_data(found)} now,"
                        f" {describe_data(start.data)} then; give the same --data and --val-data")


def describe_data(found: Mapping[str, object]) -> str:
    """A fingerprint of data, in words."""
    return ", ".join(brief(f"{name} {value}") for name, value in found.items())


def load_newest(session, worker, start: Start, log) -> int:
    """Load the newest candidate that is whole on every rank; return its step.

    A damaged one is said loudly, and the one before it is loaded.

    Raises DataError on every rank if none is left. Comm: a gather and a broadcast for each try.
    """
    wrong: list[str] = []
    for text in start.candidates:
        step, problems = _try(worker, Path(text))
        everybody = gather_facts(session.world, problems)
        first = next(filter(None, everybody), []) if everybody else []
        problems = json.loads(broadcast_text(session.world, json.dumps(first)))
        if not problems:
            log(f"resumed behind step {step}: {text}; {moved(start, worker)}")
            return step
        wrong += problems
        if text != start.candidates[-1]:
            for problem in problems:
                log(fallback(problem))

    def refuse():
        raise DataError(wrong)
    return session.agree(refuse)


def _try(worker, folder: Path) -> tuple[int, list[str]]:
    """(step, what is wrong) of loading this rank's state from a checkpoint."""
    try:
        manifest = read_manifest(folder)
        load_state(worker, folder, manifest)
    except DataError as error:
        return 0, error.problems
    return manifest.step, []


def layout_words(layout: Mapping[str, int], schedule: str) -> str:
    """The layout and schedule of a checkpoint, in words."""
    return f"{sizes_text(layout)}, {schedule}"


def moved(start: Start, worker) -> str:
    """From which layout to which the state goes."""
    here = {axis: worker.grid.axis_size(axis) for axis in AXES}
    now = layout_words(here, worker.schedule.name)
    was = layout_words(start.layout, start.schedule)
    return f"layout {now}, as before" if now == was else f"resharded from {was} to {now}"
