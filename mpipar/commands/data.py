"""`mpipar data prepare TEXT...`: converts text to token files, with their tokenizer; no MPI."""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from mpipar.commands.command import Command, Context
from mpipar.config.setting import positional, setting
from mpipar.config.text import brief, printable
from mpipar.errors import EXIT_OK, DataError, UsageError, UserError, broken
from mpipar.run.console.output import progress
from mpipar.run.console.tables import table
from mpipar.run.data.prepared import BYTES, TRAIN, Texts, prepare
from mpipar.run.data.source import text_files
from mpipar.run.files.no_links import new_folder
from mpipar.run.folder import said

NEW = re.compile(rf"{TRAIN}([0-9]{{3,7}})")
LEAST_NEW, MOST_NEW = 258, 1 << 20  # ids of a new tokenizer: bytes, end of text, at least one merge


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
    missing = text_files(args.texts)[1]
    name, out = args.tokenizer or "", args.out or ""
    new = NEW.fullmatch(name)
    known = LEAST_NEW <= int(new[1]) <= MOST_NEW if new else name == BYTES or os.path.exists(name)
    found = broken(
        (
            args.action != "prepare" or not args.texts,
            f"data {brief(args.action or '')}: type mpipar data prepare TEXT..., with text files",
        ),
        (
            not known,
            (
                f"--tokenizer {brief(name)}: is not there; use {BYTES}, a tokenizer.json, a folder"
                f" with it, or {TRAIN}VOCAB for {LEAST_NEW} to {MOST_NEW:,} ids"
            ),
        ),
        (
            not out or "\0" in out or os.path.lexists(out),
            f"--out {brief(out)}: must be a new folder; prepare never overwrites",
        ),
    )
    return [error(texts) for error, texts in ((UsageError, found), (DataError, missing)) if texts]


def run(context: Context) -> int:
    """Write a prepared folder, as a whole or not at all; return the exit code.

    Raises DataError for files that are not text, and OutputError if the disk is full.
    """
    session, args = context.session, context.args
    texts, out = Texts(text_files(args.texts)[0], args.separator, progress), Path(args.out)
    with said(out, "can't be written"):
        out.parent.mkdir(parents=True, exist_ok=True)
        # Whatever ends the process at once also removes the unfinished folder.
        with new_folder(out) as session.unfinished:
            dataset = prepare(texts, args.tokenizer, session.unfinished)
    session.unfinished = None
    for note in texts.notes():
        print(printable(f"mpipar: {note}"), file=sys.stderr, flush=True)
    rows = [(file.name, f"{file.documents:,}", f"{file.tokens:,}") for file in dataset.files]
    print(table([("file", "documents", "tokens"), *rows]))
    print(
        f"{dataset.vocab_size:,} ids in {dataset.dtype}, {dataset.end_of_text} ends a text\n"
        + printable(f"train on it: mpipar train --data {out}")
    )
    return EXIT_OK


COMMAND = Command(
    run,
    "prepare TEXT... --tokenizer WHAT --out FOLDER [--separator TEXT]",
    Arguments,
    problems=problems,
)
