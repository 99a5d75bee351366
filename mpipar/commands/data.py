"""`mpipar data prepare TEXT...`: converts text to token files, with their tokenizer; no MPI."""

import os
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mpipar.commands.command import Command, Context
from mpipar.config.setting import positional, setting
from mpipar.config.text import brief, printable, shown
from mpipar.errors import EXIT_OK, DataError, UsageError, UserError, broken
from mpipar.run.console.progress import progress
from mpipar.run.console.tables import table
from mpipar.run.data.dataset import PARTS
from mpipar.run.data.prepare import BYTES, LEAST_NEW, MOST_NEW, TRAIN, Texts, prepare
from mpipar.run.data.source import text_files
from mpipar.run.data.tokenizer import library_of
from mpipar.run.files.replace import new_folder
from mpipar.run.folder import said

NEW = re.compile(rf"{TRAIN}[0-9]{{1,9}}")


@dataclass(frozen=True)
class Arguments:
    """The action, the text files and the flags."""

    action: str | None = positional(
        "prepare", "convert text files to token files, for train --data FOLDER", default=None
    )
    texts: tuple[str, ...] = positional(
        "TEXT",
        "text files in UTF-8, each a document; JSON lines with a key text; or folders of them",
        default=(),
    )
    tokenizer: str | None = setting(
        None,
        "bytes; a tokenizer.json, or a folder with one or with GPT-2's vocab.json and"
        " merges.txt; or train:VOCAB for a new tokenizer with that many ids",
        metavar="WHAT",
    )
    out: str | None = setting(None, "a new folder for the token files", metavar="FOLDER")
    separator: str | None = setting(
        None, "text that separates the documents in a file", metavar="TEXT"
    )


def problems(args: Arguments) -> list[UserError]:
    """Return what is wrong with the arguments, and text files that are missing."""
    missing = text_files(args.texts, "")[1]
    name, out, action = args.tokenizer or "", args.out or "", args.action or ""
    trains = name.startswith(TRAIN)
    found = broken(
        (
            action != "prepare",
            f"data {brief(action)}: the only action is prepare; type mpipar data prepare TEXT...",
        ),
        (not args.texts, "no text files: name files in UTF-8, or folders of them"),
        (
            trains and not (NEW.fullmatch(name) and LEAST_NEW <= int(name[6:]) <= MOST_NEW),
            f"--tokenizer {brief(name)}: a new tokenizer has {LEAST_NEW} to {MOST_NEW:,} ids",
        ),
        (
            name and not trains and name != BYTES and not os.path.exists(name),
            (
                f"--tokenizer {brief(name)}: no such file or folder; use {BYTES}, a tokenizer.json,"
                f" a folder with it, or {TRAIN}4096"
            ),
        ),
        (not name, f"--tokenizer: is missing; use {BYTES}, a file or folder, or {TRAIN}4096"),
        (not out or "\0" in out, "--out: is missing; name a new folder"),
        (
            os.path.lexists(out.replace("\0", "")),
            f"--out {brief(out)}: exists; prepare never overwrites: name a new one",
        ),
    )
    return [error(texts) for error, texts in ((UsageError, found), (DataError, missing)) if texts]


def run(context: Context) -> int:
    """Write a prepared folder, as a whole or not at all; return the exit code.

    Raises DataError for files that are not text, and OutputError if the disk is full.
    """
    session, args = context.session, context.args
    files, _ = text_files(args.texts, "")
    if args.tokenizer.startswith(TRAIN):
        library_of(f"--tokenizer {args.tokenizer}")  # before anything is read
    out = Path(args.out)
    with said(out, "can't be written"):
        out.parent.mkdir(parents=True, exist_ok=True)
        # Whatever ends the process at once also removes the unfinished folder.
        with new_folder(out) as session.unfinished, progress("text", None, "B") as line:
            texts = Texts(files, args.separator, partial(tell, line))
            dataset, tokenizer = prepare(texts, args.tokenizer, session.unfinished)
    session.unfinished = None
    for note in texts.notes():
        print(printable(f"mpipar: {note}"), file=sys.stderr, flush=True)
    show(dataset, tokenizer, texts.nbytes, out)
    return EXIT_OK


def tell(line, work: str, done: int, total: int) -> None:
    """Say in a progress line that `done` of `total` bytes of this work are done."""
    line.set_description_str(work, refresh=False)
    line.total = total
    line.update(done - line.n)


def show(dataset, tokenizer, size: int, out: Path) -> None:
    """Print what was written. size: bytes of the text."""
    parts = [(part, file) for part in PARTS for file in dataset.part(part)]
    rows = [(part, f"{file.documents:,}", f"{file.tokens:,}") for part, file in parts]
    print(table([("part", "documents", "tokens"), *rows]))
    tokens = sum(file.tokens for _, file in parts)
    kind = "bytes" if tokenizer.is_bytes else "tokenizer"
    words = (
        f"{kind}: {dataset.vocab_size:,} ids in {dataset.dtype}, {shown(tokenizer.end)}"
        f" ends a text; {size / tokens:.2f} bytes of text per token"
    )
    print(printable(f"{words}\ntrain on it: mpipar train --data {out}"))


COMMAND = Command(
    run,
    "prepare TEXT... --tokenizer WHAT --out FOLDER [--separator TEXT]",
    Arguments,
    problems=problems,
)
