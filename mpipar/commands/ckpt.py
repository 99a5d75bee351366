"""`mpipar ckpt ls | verify | export RUN`: the checkpoints of a run; without MPI."""

from __future__ import annotations

import time
from pathlib import Path

import ml_dtypes
import numpy as np

from mpipar.checkpoint import companions, weights
from mpipar.checkpoint.load import blocks
from mpipar.checkpoint.manifest import NAME, Manifest, committed_steps, damage, read_manifest
from mpipar.checkpoint.params import all_params
from mpipar.commands.resume import layout_words
from mpipar.commands.run_folder import CHECKPOINTS, finished_step, is_run, said
from mpipar.commands.source import WEIGHTS
from mpipar.config.reading import values_of
from mpipar.config.resolve import config_problems
from mpipar.config.sections import Config, build
from mpipar.config.setting import flag
from mpipar.config.sizes import read_bytes
from mpipar.console.tables import nbytes, table
from mpipar.errors import EXIT_DATA, EXIT_OK, DataError, UsageError
from mpipar.files.text import brief, printable
from mpipar.job.status import killed

# Flags that not every action takes.
ONLY = {"step": ("verify", "export"), "out": ("export",), "dtype": ("export",),
        "max_shard_size": ("export",)}
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def add_arguments(parser) -> None:
    """Add the action, the run folder, and the flags of verify and export."""
    parser.add_argument("action", choices=tuple(ACTIONS), metavar="ls|verify|export",
                        help="list checkpoints, compare every byte with its digest, or write"
                        " weights in Hugging Face's form")
    parser.add_argument("run_folder", metavar="RUN", help="run folder of mpipar train")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step"
                        " (default: verify takes all, export the newest)")
    parser.add_argument("--out", metavar="FOLDER",
                        help="export: a new folder for the weights (default: RUN/weights)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="export: type of the numbers, to"
                        " which they are rounded (default: as they were saved)")
    parser.add_argument("--max-shard-size", metavar="BYTES", help="export: bytes of a file, as in"
                        " 200M; more goes to several files and an index (default: the run's)")


def run(args) -> int:
    """Run one action; return its exit code. Raises DataError where there is no checkpoint."""
    wrong = [f"{flag(name)}: ckpt {args.action} does not use it; leave it out"
             for name, actions in ONLY.items()
             if getattr(args, name) is not None and args.action not in actions]
    if wrong:
        raise UsageError(wrong)
    folder = Path(args.run_folder)
    steps = committed_steps(folder / CHECKPOINTS)
    if not steps and not is_run(folder):
        raise DataError(f"{folder}: is not the folder of a run; give one of mpipar train")
    if not steps and args.action != "ls":
        raise DataError(f"{folder}: has no checkpoint; a run writes one every --save-interval steps"
                        " and at its end")
    if args.step is not None:
        known = ", ".join(str(step) for step, _ in steps)
        steps = [(step, path) for step, path in steps if step == args.step]
        if not steps:
            raise DataError(f"--step {args.step}: {folder} has checkpoints of the steps {known}")
    return ACTIONS[args.action](folder, steps, args)


def say(text: str) -> None:
    """Print what may come from outside: names of files, and words of a manifest."""
    print(printable(text))


def list_steps(folder: Path, steps, args) -> int:
    """Print one row for each checkpoint, then what else is there, and how the run stands."""
    rows = [("step", "size", "layout, schedule", "age", "")]
    for step, path in steps:
        try:
            manifest = read_manifest(path)
        except DataError as error:
            rows.append((str(step), "", "", age(path), f"DAMAGED: {error.problems[0]}"))
            continue
        size = sum(file.bytes for file in manifest.files.values())
        rows.append((str(step), nbytes(size), layout_words(manifest.layout, manifest.schedule),
                     age(path / NAME), "complete"))
    say(table(rows, left=0) if steps else f"{folder} has no checkpoint")
    known = {path for _, path in steps}
    inside = folder / CHECKPOINTS
    for path in sorted(inside.iterdir() if inside.is_dir() else ()):
        if path not in known:
            say(f"{path}: {stranger(path.name)}")
    for line in killed(folder):
        say(line)
    ended = finished_step(folder)
    say(f"the run ended with step {ended}" if ended else
        f"the run has not ended; go on: mpipar train --resume auto --out {folder}")
    return EXIT_OK


def stranger(name: str) -> str:
    """What a folder between the checkpoints is."""
    if ".partial-" in name:
        return "a save that did not end; the next commit removes it"
    if name.startswith(".trash-"):
        return "a checkpoint that is being deleted; the next commit removes it"
    if ".aside-" in name:
        return "set aside when the run went on from an earlier step; delete it when you like"
    return "does not belong to a checkpoint"


def age(path: Path) -> str:
    """How long ago a file was written."""
    seconds = max(0.0, time.time() - path.stat().st_mtime)
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def verify(folder: Path, steps, args) -> int:
    """Compare every byte with its digest; return 65 if anything is damaged."""
    code = EXIT_OK
    for _, path in steps:
        wrong = damage(path)
        say(f"{path}: {'DAMAGED' if wrong else 'every byte is as it was written'}")
        for text in wrong:
            say(f"  {text}")
        if wrong:
            code = EXIT_DATA
    return code


def export(folder: Path, steps, args) -> int:
    """Write the weights of the newest of these checkpoints into a new folder."""
    _, path = steps[-1]
    out = Path(args.out) if args.out is not None else folder / WEIGHTS
    most = None if args.max_shard_size is None else size_of(args.max_shard_size)
    if out.exists() and (not out.is_dir() or any(
            path.name not in companions.FILES for path in out.iterdir())):
        raise UsageError(f"{out}: exists and is not empty; give a new folder with --out")
    wrong = damage(path)
    if wrong:
        raise DataError(wrong)
    manifest = read_manifest(path)
    config = config_of(path, manifest)
    names = weights.names_in_file(config.model)
    dtype = DTYPES.get(args.dtype, np.dtype(manifest.tensors[names[0]].dtype))
    found = companions.read_companions(folder / WEIGHTS)
    with said(out, "can't be written"):
        companions.write_companions(found, out)
    weights.write(out, config, dtype, blocks(path, manifest, names), most)
    say(f"the weights after step {manifest.step} are in {out}")
    return EXIT_OK


def size_of(text: str) -> int:
    """The value of --max-shard-size in bytes."""
    try:
        found = read_bytes(text)
    except ValueError as error:
        raise UsageError(f"--max-shard-size {brief(text)}: {error}") from None
    if not found:
        raise UsageError(f"--max-shard-size {text}: must be at least 1")
    return found


def config_of(path: Path, manifest: Manifest) -> Config:
    """The Config of a checkpoint; DataError if it is none, or not that of the tensors."""
    where = f"{path / NAME}: config"
    try:
        config = build(values_of(manifest.config))
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None
    wrong = [f"{where}: {text}" for text in config_problems(config)]
    if wrong:
        raise DataError(wrong)
    shapes = {param.name: tuple(param.shape)
              for _, param in all_params(config.model, (config.model.layers,))}
    if shapes != {name: tensor.shape for name, tensor in manifest.tensors.items()}:
        raise DataError(f"{where}: is of another model than the tensors")
    return config


ACTIONS = {"ls": list_steps, "verify": verify, "export": export}
