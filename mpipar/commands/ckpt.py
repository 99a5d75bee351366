"""`mpipar ckpt ls | verify | export RUN`: list, check and export a run's checkpoints; no MPI."""

import time
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from mpipar.commands.command import Command, Context
from mpipar.config.model import model_config
from mpipar.config.setting import positional, setting
from mpipar.config.text import printable
from mpipar.errors import EXIT_DATA, EXIT_OK, DataError, UsageError
from mpipar.models.on_shapes import all_params
from mpipar.run.checkpoint import formats, tokenizer_files, weights
from mpipar.run.checkpoint.load import blocks
from mpipar.run.checkpoint.manifest import (
    NAME,
    committed_steps,
    damage,
    digest_problem,
    read_manifest,
)
from mpipar.run.checkpoint.weight_files import DIGESTS, written_digests
from mpipar.run.console.tables import nbytes, table
from mpipar.run.folder import CHECKPOINTS, WEIGHTS, is_run, said
from mpipar.run.resume import layout_words

OF_EXPORT = ("action", "export")
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Arguments:
    """The action, the run folder, and the flags of verify and export."""

    action: str = positional(
        "ls|verify|export",
        "list checkpoints, compare every byte with its digest, or write weights"
        " in Hugging Face's format",
        choices=("ls", "verify", "export"),
    )
    run_folder: str = positional("RUN", "run folder of mpipar train")
    step: int | None = setting(
        None,
        "the checkpoint of this step (default: all for verify, the newest for export)",
        only=("action", "verify", "export"),
    )
    out: str | None = setting(
        None,
        "export: a new folder for the weights (default: RUN/weights)",
        metavar="FOLDER",
        only=OF_EXPORT,
    )
    dtype: str | None = setting(
        None,
        "export: number format, to which weights are rounded (default: as they were saved)",
        choices=tuple(DTYPES),
        only=OF_EXPORT,
    )


def run(context: Context) -> int:
    """Run one action; return its exit code. Raises DataError if there is nothing to work on."""
    args = context.args
    folder = Path(args.run_folder)
    if not is_run(folder):
        raise DataError(f"{folder}: is not a run folder; give one of mpipar train")
    found = committed_steps(folder / CHECKPOINTS)
    steps = [(step, path) for step, path in found if args.step in (None, step)]
    if not steps and (args.action == "export" or args.step is not None):
        known = ", ".join(str(step) for step, _ in found)
        which = f" of step {args.step}; it has those of: {known}" if known else ""
        raise DataError(f"{folder}: has no checkpoint{which}")
    return ACTIONS[args.action](folder, steps, args)


def say(text: str) -> None:
    """Print text that may come from outside: file names and the contents of a manifest."""
    print(printable(text))


def list_steps(folder: Path, steps, args) -> int:
    """Print a row per checkpoint."""
    rows = [("step", "size", "layout, schedule", "written", "")]
    for step, path in steps:
        size = layout = ""
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
        try:
            manifest = read_manifest(path)
            size = nbytes(sum(file.bytes for file in manifest.files.values()))
            layout, state = layout_words(manifest.layout, manifest.schedule), "complete"
        except DataError as error:
            state = f"DAMAGED: {error.problems[0]}"
        rows.append((step, size, layout, written, state))
    say(table(rows, left=0) if steps else f"{folder} has no checkpoint")
    return EXIT_OK


def verify(folder: Path, steps, args) -> int:
    """Compare every byte with its digest; return 65 if anything is damaged.

    That of the final weights too, unless a step is asked for.
    """
    found = {path: damage(path) for _, path in steps}
    final = folder / WEIGHTS
    if args.step is None and final.exists():
        if digests := written_digests(final):
            problems = (digest_problem(final / name, digest) for name, digest in digests.items())
            found[final] = [*filter(None, problems)]
        else:
            say(f"{final}: has no {DIGESTS}, so nothing is compared")
    if not found:
        raise DataError(f"{folder}: has no checkpoint, and no weights with digests")
    for path, wrong in found.items():
        state = "DAMAGED" if wrong else "every byte is as it was written"
        say("\n  ".join([f"{path}: {state}", *wrong]))
    return EXIT_DATA if any(found.values()) else EXIT_OK


def export(folder: Path, steps, args) -> int:
    """Write the weights of the newest of these checkpoints into a new folder."""
    _, path = steps[-1]
    out = Path(args.out) if args.out is not None else folder / WEIGHTS
    inside = out.iterdir() if out.is_dir() else [out] * out.exists()
    if any(one.name not in tokenizer_files.FILES for one in inside):
        raise UsageError(f"{out}: exists and is not empty; give a new folder with --out")
    if wrong := damage(path):
        raise DataError(wrong)
    manifest = read_manifest(path)
    model = model_config(formats.model_settings(str(path), where=str(path)))
    shapes = {param.name: param.shape for _, param in all_params(model, (model.layers,))}
    if shapes != {name: tensor.shape for name, tensor in manifest.tensors.items()}:
        raise DataError(f"{path / NAME}: config: describes another model than the tensors")
    names = sorted(manifest.tensors)  # the order of `all_params`
    dtype = DTYPES.get(args.dtype, np.dtype(manifest.tensors[names[0]].dtype))
    found = tokenizer_files.read_tokenizer_files(folder / WEIGHTS)
    with said(out, "can't be written"):
        tokenizer_files.write_tokenizer_files(found, out)
    weights.write(out, model, dtype, blocks(path, manifest, names))
    say(f"the weights after step {manifest.step} are in {out}")
    return EXIT_OK


ACTIONS = {"ls": list_steps, "verify": verify, "export": export}
COMMAND = Command(run, "ls|verify|export RUN [--step N] [--out FOLDER] [flags]", Arguments)
