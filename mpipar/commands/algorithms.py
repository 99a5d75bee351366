"""Choices of `--all-reduce auto`, kept in the run folder so that a resumed run sums as before."""

from __future__ import annotations

import json
import os
from pathlib import Path

from mpipar.comm.algorithms import KINDS
from mpipar.comm.algorithms.auto import CALLS, SIZES
from mpipar.comm.facts import broadcast_text, gather_facts
from mpipar.config.run import AUTO
from mpipar.errors import DataError
from mpipar.files.bounded import parse_json, problems_as, read_text
from mpipar.files.replace import replace_file

NAME = "algorithms.json"


def is_choice(value) -> bool:
    """Return whether a value is what `auto` chose for a group: an algorithm per call and size."""
    return isinstance(value, dict) and value.keys() == {*CALLS} and all(
        isinstance(names, list) and len(names) == len(SIZES)
        and all(name in [*KINDS] for name in names) for names in value.values())


def known_choices(session, run, folders: list[Path]) -> dict:
    """Return {group: chosen algorithms} of the first of these runs that has some; {} if none has.

    Raises DataError on every rank for a damaged file. Comm: an agreement; a text of world rank 0.
    """
    if run.all_reduce != AUTO:
        return {}

    def read() -> str:
        folder = next((one for one in folders if os.path.lexists(one / NAME)), None)
        if session.world.rank > 0 or folder is None:
            return "{}"
        path = folder / NAME
        with problems_as(DataError, str(path), "remove it, and mpipar measures again"):
            found = parse_json(text := read_text(NAME, root=folder))
            if not isinstance(found, dict) or not all(map(is_choice, found.values())):
                raise ValueError("must have algorithms for each group")
            return text

    return json.loads(broadcast_text(session.world, session.agree(read)))


def keep_choices(world, folder: Path, chosen: dict) -> dict[str, bytes]:
    """Write the choices that any rank knows; return what was written, on world rank 0.

    Comm: a gather of facts over the world.
    """
    facts = gather_facts(world, chosen)
    if not facts or not any(facts):
        return {}
    groups = {name: found for fact in facts for name, found in sorted(fact.items())}
    content = (json.dumps(groups, indent=1) + "\n").encode()
    replace_file(NAME, [content], root=folder)
    return {NAME: content}

