"""What the words behind a picture's kind mean: numbers, and result files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mpipar.config.flags import Parser, count
from mpipar.errors import DataError


def arguments(kind: str, words: list[str], **forms) -> argparse.Namespace:
    """These words by name: a tuple is a choice by place, a number the default of a flag."""
    parser = Parser(prog=kind)
    for name, form in forms.items():
        if isinstance(form, tuple):
            parser.add_argument(name, choices=form)
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", type=count, default=form)
    return parser.parse_args(words)


def load(root: Path, words: list[str], bench: str) -> tuple[dict, str]:
    """The result file that the words name, and where it was measured. Raises DataError if another
    benchmark made it.
    """
    if len(words) != 1:
        raise DataError(f"name one result file of {bench}")
    found = json.loads((root / words[0]).read_text())
    if not found["bench"].startswith(bench):
        raise DataError(f"{words[0]}: is of {found['bench']}, not of {bench}")
    machine = found["machine"]
    return found, f"Measured {machine['date']} on {machine['cores']} cores: {machine['cpu']}."


def load_trace(root: Path, words: list[str]) -> tuple[dict, str]:
    """The trace in a file of `bench.docs measure`, and where it was measured. Raises DataError."""
    found, measured = load(root, words, "bench.docs measure")
    if "trace" not in found:
        raise DataError(f"{words[0]}: none of its commands has traced a run; use train --trace")
    return found["trace"], measured
