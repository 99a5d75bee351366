"""The table of what is illegal between settings, with what each row says of its example."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from types import SimpleNamespace

from mpipar import cli
from mpipar.commands.resolve import schedule_of_file
from mpipar.config.reading import Reading
from mpipar.config.resolve import broken_rules
from mpipar.config.rule import Rule
from mpipar.config.sections import CHOICES
from mpipar.config.setting import flag
from mpipar.files.text import counted
from mpipar.pipeline.combinations import RULES
from mpipar.pipeline.csv_format import write_csv
from mpipar.pipeline.schedules.catalog import make_schedule


@contextlib.contextmanager
def folder_of_examples():
    """A folder to be in while an example is judged: its files are there."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_csv(make_schedule("1f1b", 2, 4), Path("1f1b.csv"))
        yield Path(folder)


def read_words(words: list[str]) -> tuple[Reading, str | None]:
    """What `mpipar train` reads of these words, and its --machine."""
    context = cli.context_of(None, "train", words)
    return context.reading, context.args.machine


def broken(words: list[str], ranks: int) -> list[tuple[Rule, SimpleNamespace]]:
    """The rows of the table that these flags of `mpipar train` break."""
    reading, machine = read_words(words)
    return broken_rules(reading.config, ranks, RULES, reading.bad, machine=machine,
                        chooses_layout=reading.chooses_layout,
                        csv=schedule_of_file(reading.config))


def rows() -> list[tuple[str, str, str]]:
    """(flags, why they are illegal, what to type instead) of each row."""
    found = []
    with folder_of_examples():
        for rule in RULES:
            values = next(values for one, values in broken(rule.example.split(), rule.ranks)
                          if one is rule)
            ranks = f" on {counted(rule.ranks, 'rank')}" if rule.ranks > 1 else ""
            found.append((f"`{rule.example}`{ranks}", rule.reason, rule.cure(values)))
    return found


def choices() -> list[tuple[str, str]]:
    """(setting that means something to few, flags of the settings that only it has)."""
    found: dict[str, list[str]] = {}
    for name, (choice, *values) in CHOICES.items():
        only = " or ".join(f"`{flag(choice)} {value}`" for value in values or ["N"])
        found.setdefault(only, []).append(f"`{flag(name)}`")
    return [(only, ", ".join(names)) for only, names in found.items()]
