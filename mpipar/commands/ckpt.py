"""`mpipar ckpt ls | verify | export RUN`: list, check and export a run's checkpoints; no MPI."""

from dataclasses import dataclass
from pathlib import Path

from mpipar.commands.command import Command, Context
from mpipar.config.model import model_config
from mpipar.config.setting import positional, setting
from mpipar.config.text import printable
from mpipar.errors import EXIT_DATA, EXIT_OK, DataError, UsageError
from mpipar.run.checkpoint import weights
from mpipar.run.checkpoint.formats import model_settings
from mpipar.run.checkpoint.manifest import (
    committed_steps,
    damage,
    digest_problem,
    read_manifest,
)
from mpipar.run.checkpoint.weight_files import DIGESTS, written_digests
from mpipar.run.console.tables import nbytes, table
from mpipar.run.folder import CHECKPOINTS, WEIGHTS, is_run, said
from mpipar.run.resume import layout_words


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
        only=("action", "export"),
    )


def run(context: Context) -> int:
    """Run one action; return its exit code. Raises DataError if there is nothing to work on."""
    args = context.args
    folder = Path(args.run_folder)
    if not is_run(folder):
        raise DataError(f"{folder}: is not a run folder; give one of mpipar train")
    found = committed_steps(folder / CHECKPOINTS)
    steps = {step: path for step, path in found if args.step in (None, step)}
    if not steps and (args.action == "export" or args.step is not None):
        known = ", ".join(str(step) for step, _ in found) or "none"
        raise DataError(f"{folder}: has no such checkpoint; steps of those that it has: {known}")
    return ACTIONS[args.action](folder, steps, args)


def list_steps(folder: Path, steps: dict[int, Path], args) -> int:
    """Print a row per checkpoint."""
    rows = [("step", "size", "layout, schedule", "")]
    for step, path in steps.items():
        try:
            manifest = read_manifest(path)
            size = nbytes(sum(file.bytes for file in manifest.files.values()))
            layout = layout_words(manifest.layout, manifest.schedule)
            rows.append((step, size, layout, "complete"))
        except DataError as error:
            rows.append((step, "", "", f"DAMAGED: {error.problems[0]}"))
    print(printable(table(rows, left=0) if steps else f"{folder} has no checkpoint"))
    return EXIT_OK


def verify(folder: Path, steps: dict[int, Path], args) -> int:
    """Compare every byte with its digest; return 65 if anything is damaged.

    That of the final weights too, unless a step is asked for.
    """
    found = {path: damage(path) for path in steps.values()}
    final = folder / WEIGHTS
    if args.step is None and final.exists():
        if digests := written_digests(final):
            found[final] = [
                text
                for name, digest in digests.items()
                if (text := digest_problem(final / name, digest))
            ]
        else:
            print(printable(f"{final}: has no {DIGESTS}, so nothing is compared"))
    if not found:
        raise DataError(f"{folder}: has no checkpoint, and no weights with digests")
    for path, wrong in found.items():
        state = "DAMAGED" if wrong else "every byte is as it was written"
        print(printable("\n  ".join([f"{path}: {state}", *wrong])))
    return EXIT_DATA if any(found.values()) else EXIT_OK


def export(folder: Path, steps: dict[int, Path], args) -> int:
    """Write the weights of the newest of these checkpoints into a new folder."""
    step, path = max(steps.items())
    out = Path(args.out) if args.out is not None else folder / WEIGHTS
    inside = out.iterdir() if out.is_dir() else [out] * out.exists()
    if any(one.name not in weights.BESIDE for one in inside):
        raise UsageError(f"{out}: exists and is not empty; give a new folder with --out")
    found = weights.read_tokenizer_files(folder / WEIGHTS)
    model = model_config(model_settings(str(path), where=str(path)))
    with said(out, "can't be written"):
        weights.write_tokenizer_files(found, out)
    weights.export(path, out, model)
    print(printable(f"the weights after step {step} are in {out}"))
    return EXIT_OK


ACTIONS = {"ls": list_steps, "verify": verify, "export": export}
COMMAND = Command(run, "ls|verify|export RUN [--step N] [--out FOLDER] [flags]", Arguments)
