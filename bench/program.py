"""The frame of a benchmark program: flags, the measurement, a table on the screen and in a file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bench import results
from mpipar.config.text import shown
from mpipar.interconnect.files import check_writable
from mpipar.run.files.settings import Parser
from mpipar.run.process.session import guard

Counts = Mapping[str, tuple[int, str]]  # flag: its default, its help


class Outcome(NamedTuple):
    """The result of a program, on world rank 0.

    facts: what the figures depend on. variant: of the program's name in the file. head, end:
    printed above and below the table.
    """

    rows: list[dict]
    facts: dict[str, Any] | None = None
    code: int = 0
    variant: str = ""
    head: str = ""
    end: str = ""


class Program:
    """The `main` of a program: flags, a check of the file of --json, measuring, the table, the
    file.

    measure(args, session) -> Outcome, or the exit code if there is nothing to show. together, or
    together(args): whether all ranks of a job measure. counts: see `add_counts`. add(parser): adds
    flags of other kinds. check(args, parser): checks what was typed. takes_words: whether unknown
    words are collected in args.words.
    """

    def __init__(
        self,
        name: str,
        doc: str,
        measure: Callable[..., Outcome | int],
        *,
        together: Callable[..., bool] | bool = False,
        add: Callable[[Parser], Any] | None = None,
        check: Callable[..., None] | None = None,
        counts: Counts | None = None,
        takes_words: bool = False,
    ):
        self.name = name if name.startswith(("docs.", "tests.")) else f"bench.{name}"
        self.measure, self.together = measure, together
        self.check, self.takes_words = check, takes_words
        self.parser = Parser(prog=f"python -m {self.name}", description=doc)
        if add:
            add(self.parser)
        add_counts(self.parser, counts or {})
        self.parser.add_argument("--json", metavar="FILE", help="write the result to this file")

    def parse(self, argv: list[str]) -> Any:
        """Return the flags. Raises UsageError."""
        args, words = self.parser.parse_known_args(argv)
        if self.takes_words:
            args.words = words
        elif words:
            self.parser.error(f"unrecognized arguments: {' '.join(words)}")
        if self.check:
            self.check(args, self.parser)
        return args

    def started(self, name: str) -> Program:
        """Return this program; run it and exit if `name` is that of the script Python was started
        with.
        """
        if name == "__main__":
            guard(self)
        return self

    def __call__(self, argv: list[str], session: Any) -> int:
        """Measure and report; return the exit code. Comm: that of `measure`, if ranks take part."""
        args = self.parse(argv)
        together = self.together(args) if callable(self.together) else self.together
        if together:
            first = session.start().rank == 0
            session.agree(lambda: check_writable(args.json if first else None))
        else:
            check_writable(args.json)
        found = self.measure(args, session)
        if isinstance(found, int):
            return found
        print("\n".join(filter(None, (found.head, results.markdown_table(found.rows), found.end))))
        results.write(
            args.json,
            f"{self.name} {found.variant}".rstrip(),
            found.rows,
            **(found.facts or {}),
        )
        return found.code


def count(text: str) -> int:
    """Return a positive whole number; used as the type of an argument."""
    if not text.isdecimal() or len(text) > 9 or int(text) == 0:
        raise argparse.ArgumentTypeError(
            f"{shown(text)}: must be a whole number above 0, of at most 9 digits"
        )
    return int(text)


def add_counts(parser: Parser, counts: Counts) -> None:
    """Add flags whose values are whole numbers above 0."""
    for name, (default, text) in counts.items():
        parser.add_argument(name, type=count, default=default, help=f"{text} ({default})")
