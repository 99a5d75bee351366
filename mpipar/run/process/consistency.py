"""Checks that all ranks of a job run the same, and a table of the differences.

Ranks that run different versions, flags or data would train another model than intended, or wait
for each other forever. A fact is a name with a textual value.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from mpipar import __version__
from mpipar.config.text import cut, harmless

PACKAGE = Path(__file__).resolve().parents[2]
SOURCES = (".py", ".cu", ".cuh")
REFUSED = "refused"  # the fact of a rank that rejected its flags
PROGRAMS = ("mpipar", "Python", "NumPy", "mpi4py")  # the names in `versions`
MOST_SHOWN = 60  # characters of a value in the table


def versions() -> dict[str, str]:
    """Return facts about the software that this rank runs, without importing NumPy."""
    import mpi4py

    return {
        "mpipar": f"{__version__}, source {source_digest()[:12]}",
        "Python": platform.python_version(),
        "NumPy": numpy_version(),
        "mpi4py": mpi4py.__version__,
    }


def numpy_version() -> str:
    """Return NumPy's version, read from its files."""
    text = Path(find_spec("numpy").origin).with_name("version.py").read_text(encoding="utf-8")
    return re.search('^version = "(.*)"', text, re.MULTILINE)[1]


def source_digest() -> str:
    """Return the SHA-256 of the names and bytes of the package's sources."""
    digest = hashlib.sha256()
    paths = (f"{folder}/{name}" for folder, _, names in os.walk(PACKAGE) for name in names)
    for path in sorted(path for path in paths if path.endswith(SOURCES)):
        content = Path(path).read_bytes()  # every start waits for this: no Path is made before
        digest.update(f"{path.removeprefix(str(PACKAGE))} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def differences(facts: Sequence[dict[str, str]]) -> list[str]:
    """Return a table of the fields that differ, with the ranks of each value. facts: one per rank.

    A field that some ranks lack is left out, unless it says why a rank rejected its flags, or is a
    variable of the environment.
    """
    rows = [("field", "ranks", "value")]
    for field in dict.fromkeys(name for fact in facts for name in fact):
        values: dict[str | None, list[int]] = {}
        for rank, fact in enumerate(facts):
            values.setdefault(fact.get(field), []).append(rank)
        may_lack = field == REFUSED or field.partition("_")[0].isupper()
        if len(values) > 1 and (may_lack or None not in values):
            rows += [
                (field, ranges(ranks), cut(harmless("nothing" if one is None else one), MOST_SHOWN))
                for one, ranks in values.items()
            ]
    first, second = (max(len(row[column]) for row in rows) + 2 for column in (0, 1))
    return [f"{field:<{first}}{ranks:<{second}}{value}" for field, ranks, value in rows]


def ranges(numbers: Sequence[int]) -> str:
    """Return ranges as text: [0, 1, 2, 5] -> '0-2,5'."""
    groups = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ",".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs)
