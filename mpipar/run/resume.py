"""The start of a run: step 1, or the step after the checkpoint selected by `--resume`.

World rank 0 alone looks at the disk and tells the others what it found, so that every rank resumes
from the same step with the same settings. A run folder without a checkpoint starts again as it did
the first time: with the settings of its config.toml, and from what its sources.json names.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from mpipar.comm.grid import AXES, LAYOUT
from mpipar.comm.objects import all_gather_objects, broadcast_text
from mpipar.config.grid import sizes_text
from mpipar.config.model import CUT_SETTINGS, ModelConfig
from mpipar.config.resolve import typed
from mpipar.config.run import AUTO, NEVER, named_folder
from mpipar.config.sections import named
from mpipar.config.text import brief, counted
from mpipar.errors import DataError, UsageError, broken
from mpipar.run.checkpoint.formats import is_step
from mpipar.run.checkpoint.manifest import NAME, committed_steps, read_manifest
from mpipar.run.checkpoint.state import load_state
from mpipar.run.checkpoint.weights import read_tokenizer_files
from mpipar.run.files.bounded import problems_as, read_text
from mpipar.run.files.settings import over, skipped, values_of
from mpipar.run.folder import (
    CHECKPOINTS,
    CONFIG,
    Sources,
    find_source,
    finished_step,
    newest_step,
    open_run_folder,
    read_sources,
    tokenizer_folder,
)
from mpipar.run.resolve import digest_of_weights

# What determines the numbers of a run: with another value it would be another run.
FIXED = (
    "preset",
    "dtype",
    "seed",
    "loss_scale",
    "batch_size",
    "optimizer",
    "lr",
    "lr_schedule",
    "min_lr_ratio",
    "warmup_steps",
    "weight_decay",
    "beta1",
    "beta2",
    "eps",
    "clip",
    "islands",
    "outer_interval",
    "outer_lr",
    "outer_momentum",
)
# What belongs to one start of the program, not to the run.
OF_A_START = ("resume", "out", "trace")
# Of an unusable checkpoint whose predecessor is loaded instead.
FALLBACK = "DAMAGED CHECKPOINT, falling back to the one before"
# What is chosen together: naming one of them resets the others.
ORDER = ("schedule", "schedule_csv", "chunks", "stage_layers")


@dataclass(frozen=True)
class Start:
    """Where a run starts; the same on every rank.

    folder: the run folder to resume in, or None for a new one. newest: its newest step. candidates:
    folders of steps, the one to load first; the others are what `auto` may fall back to. step,
    config (TOML), data: of the first candidate whose manifest can be read.
    Without a candidate, config and data are those of the run's first start. weights: what a run
    without a candidate starts from; digest: its expected SHA-256, or "" if unknown.
    finished: the step with which the run has ended, or 0. notes: lines for the user.
    """

    folder: str | None = None
    newest: int = 0
    candidates: tuple[str, ...] = ()
    step: int = 0
    config: str = ""
    data: Mapping[str, object] = field(default_factory=dict)
    weights: str = ""
    digest: str = ""
    finished: int = 0
    notes: tuple[str, ...] = ()


def agreed_start(session, run) -> Start:
    """Return the Start of `--resume`, found by world rank 0. run: the RunConfig as typed.

    Comm: an agreement, and an all-gather over the world.
    """
    world = session.world
    found = session.agree(lambda: asdict(find_start(run)) if world.rank == 0 else {})
    return Start(**all_gather_objects(world, found)[0])


def find_start(run) -> Start:
    """Find the checkpoint that --resume selects; raise UserError if there is none to load.

    `auto` takes the newest one with a readable manifest, and none in a folder without any.
    """
    folder, notes = named_folder(run), []
    if run.resume == NEVER or (run.resume != AUTO and run.init_from is not None):
        return Start()  # of two sources the table of combinations says what is wrong
    if run.resume == AUTO:
        steps = [path for _, path in committed_steps(folder / CHECKPOINTS)][::-1] if folder else []
        if not steps:
            return again(run, folder) if folder and os.path.isfile(folder / CONFIG) else Start()
        check_first_weights(run, folder, read_sources(folder))
    else:
        source, steps = _named_steps(run.resume)
        folder = source if (folder or source).resolve() == source.resolve() else None
    for number, path in enumerate(steps):
        try:
            with problems_as(DataError, str(path / NAME)):
                found = read_manifest(path)
                values_of(found.config)
        except DataError as error:
            notes.append(str(error))
            continue
        return Start(
            str(folder) if folder else None,
            newest_step(folder) if folder else 0,
            tuple(map(str, steps[number:])),
            found.step,
            found.config,
            found.data,
            finished=finished_step(folder) if folder else 0,
            notes=tuple(f"{FALLBACK}: {note}" for note in notes),
        )
    raise DataError([*notes, f"--resume {run.resume}: no checkpoint can be read"])


def again(run, folder: Path) -> Start:
    """Return the Start of a run that ended before its first checkpoint: as it started first.

    Raises UserError if what it started from is not what the user names, or another run's state.
    """
    sources = read_sources(folder)
    if sources.resumed:
        raise UsageError(
            f"{folder} has no checkpoint: give a new --out, and --resume {sources.resumed} again"
        )
    with problems_as(DataError, str(folder / CONFIG), "give a new --out"):
        config = read_text(CONFIG, root=folder)
        values_of(config)
    check_first_weights(run, folder, sources)
    return Start(
        str(folder),
        config=config,
        data=sources.data,
        weights=sources.init_from,
        digest=sources.digest,
        finished=finished_step(folder),
        notes=(f"{folder} has no checkpoint: the run starts at step 1",),
    )


def check_first_weights(run, folder: Path, sources: Sources) -> None:
    """Raise UserError if the user names other weights than those that a folder's run started from.

    That is another folder, or the same one with other content.
    """
    if run.init_from is None:
        return
    where, first = f"--init-from {run.init_from}", sources.init_from
    if find_source(run.init_from, where) != first:
        why = f"the run in {folder} started from {first or 'new weights'}"
    elif digest_of_weights(first) != sources.digest:
        why = f"has changed since the run in {folder} started"
    else:
        return
    raise UsageError(f"{where}: {why}; leave --init-from out, or give a new --out")


def _named_steps(text: str) -> tuple[Path, list[Path]]:
    """Return (run folder, [one step]) for a path to a run or to one of its steps."""
    path = Path(text)
    if is_step(path) and path.parent.name == CHECKPOINTS:
        return path.parent.parent, [path]
    steps = committed_steps(path / CHECKPOINTS)
    if not steps:
        cure = "give a run folder, or one of its checkpoints/step-..."
        raise DataError(f"--resume {text}: there is no checkpoint here; {cure}")
    return path, [steps[-1][1]]


def with_saved_settings(parsed, start: Start, world_size: int):
    """Return the configuration with the resumed run's settings beneath those the user named."""
    if not start.config:
        return parsed
    saved = values_of(start.config) | {"init_from": start.weights or None}
    if parsed.config.run.resume == AUTO:  # the Start has resolved the user's --init-from
        given = {name: value for name, value in parsed.given.items() if name != "init_from"}
        parsed = replace(parsed, given=given)
    notes = (f"the run's config.toml: {note}" for note in skipped(start.config))
    return resumed(replace(parsed, notes=(*parsed.notes, *notes)), saved, world_size)


def resumed(parsed, saved: Mapping[str, object], world_size: int):
    """Return the configuration of a run resumed on this many ranks.

    saved: the values of the run's config.toml. If the user names a layout, the stages and groups
    that depend on it are chosen again. Another number of ranks needs a layout that the user names,
    or `auto`, which keeps the saved one where it fits.
    """
    given, ranks = parsed.given, math.prod(saved.get(axis, 1) for axis in AXES)
    named = any(axis in given for axis in LAYOUT)
    chooses = parsed.chooses_layout and (named or ranks != world_size)
    problems = broken(
        (
            ranks != world_size and not (named or chooses),
            (
                f"{counted(world_size, 'rank')}: the run has {ranks}; start mpiexec -n {ranks}, or"
                f" add a --layout of {world_size}, such as auto"
            ),
        )
    )
    unread = (*parsed.unread, *unchangeable(given, saved), *problems)
    parsed = replace(parsed, unread=unread, chooses_layout=chooses)
    dropped = set(OF_A_START)
    if any(name in given for name in ORDER):
        dropped |= set(ORDER)
    if named or ranks != world_size:
        dropped |= {*LAYOUT, *ORDER, "cp_attention"} - {"schedule"}
    return over({name: value for name, value in saved.items() if name not in dropped}, parsed)


def unchangeable(given: Mapping[str, object], saved: Mapping[str, object]) -> list[str]:
    """Return a problem for each value that the user names differently from the saved run."""
    shape = [one.name for one in fields(ModelConfig) if one.name not in CUT_SETTINGS]
    return [
        f"{named(name)} {typed(given[name])}: can't change in a resumed run, which has"
        f" {typed(saved[name]) if name in saved else 'the default'}; leave {named(name)} out, or"
        " start a new run"
        for name in dict.fromkeys([*shape, *FIXED])
        if name in given and given[name] != saved.get(name)
    ]


def start_problems(start: Start, config) -> list[str]:
    """Return what is wrong if the run has no steps left after its checkpoint."""
    steps, done = config.train.steps, start.step
    return broken(
        (
            0 <= steps < done,  # a negative number is refused elsewhere
            (
                f"--steps {steps}: the checkpoint is already of step {done}; use {done} or more, or"
                " evaluate its weights with --steps 0 --init-from"
            ),
        )
    )


def agreed_folder(session, start: Start, inputs, sources: Sources) -> Path:
    """Return the run folder, new or ready to resume in.

    World rank 0 alone writes. Comm: an agreement; the folder's name from world rank 0.
    """

    def opened() -> str:
        if session.world.rank > 0:
            return ""
        source = tokenizer_folder(sources.resumed or sources.init_from)
        beside = read_tokenizer_files(source, inputs.tokenizer)
        return str(open_run_folder(start, inputs.config, session, sources, beside))

    return Path(broadcast_text(session.world, session.agree(opened)))


def check_begin(start: Start, found: Mapping[str, object], weights: str) -> None:
    """Raise DataError if data or first weights are not those that the run had.

    found: the fingerprint of the data. weights: the digest of the weights that ranks start from.
    """
    since = "the checkpoint" if start.candidates else "the run started"
    shared = start.data.keys() & found.keys()  # older versions had another digest of token files
    if any(start.data[name] != found[name] for name in shared):
        raise DataError(
            f"--data: has changed since {since}: {_shown(found)} now, {_shown(start.data)} then;"
            " give the same --data and --val-data"
        )
    if start.digest and start.digest != weights:
        raise DataError(
            f"--init-from {start.weights}: has changed since the run started; give a new --out"
        )


def _shown(found: Mapping[str, object]) -> str:
    return ", ".join(brief(f"{name} {value}") for name, value in found.items())


def load_newest(session, worker, start: Start, log) -> int:
    """Load the newest candidate that is intact and the same on every rank; return its step.

    A damaged one is reported prominently, and the one before it is loaded.

    Raises DataError on every rank if none is left. Comm: an all-gather for each try.
    """
    wrong: list[str] = []
    for text in start.candidates:
        problems, digest = [], ""
        try:
            manifest = read_manifest(Path(text))
            load_state(worker, Path(text), manifest)
            digest = digest_of_weights(text)
        except DataError as error:
            problems = error.problems
        everybody = all_gather_objects(session.world, [problems, digest])
        found = next((problems for problems, _ in everybody if problems), [])
        if not found and any(other != digest for _, other in everybody):
            found = [f"{text}: differs between ranks; give all hosts the same files"]
        if not found:
            now = layout_words(worker.grid.layout, worker.schedule.name)
            was = layout_words(manifest.layout, manifest.schedule)
            how = f"layout {now}, as before" if now == was else f"resharded from {was} to {now}"
            log(f"resumed after step {manifest.step}: {text}; {how}")
            return manifest.step
        wrong += found
        if text != start.candidates[-1]:
            log(f"{FALLBACK}: {'; '.join(found)}")

    def refuse():
        raise DataError(wrong)

    return session.agree(refuse)


def layout_words(layout: Mapping[str, int], schedule: str) -> str:
    """Return the layout and schedule of a checkpoint as text."""
    return f"{sizes_text(layout)}, {schedule}"
