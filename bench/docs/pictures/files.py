"""Result files for the pictures."""

from __future__ import annotations

import json
from pathlib import Path

from mpipar.errors import DataError


def load(root: Path, words: list[str], bench: str) -> dict:
    """The result file that the words name. Raises DataError if another benchmark made it."""
    if len(words) != 1:
        raise DataError(f"name one result file of {bench}")
    found = json.loads((root / words[0]).read_text())
    if not found["bench"].startswith(bench):
        raise DataError(f"{words[0]}: is of {found['bench']}, not of {bench}")
    return found


def load_trace(root: Path, words: list[str]) -> tuple[dict, dict]:
    """(result file of `bench.docs measure`, the trace in it). Raises DataError without one."""
    found = load(root, words, "bench.docs measure")
    if "trace" not in found:
        raise DataError(f"{words[0]}: none of its commands has traced a run; use train --trace")
    return found, found["trace"]


def machine_words(found: dict) -> str:
    """Where and when it was measured."""
    machine = found["machine"]
    return f"Measured {machine['date']} on {machine['cores']} cores: {machine['cpu']}."
