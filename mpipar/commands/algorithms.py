"""Choices of `--all-reduce auto`: kept in the run folder, and with the user's facts of the machine.

The run's own choices come first, so that a resumed run sums as before. A new run takes those that
an earlier one measured on the same ranks, and measures only groups that no run has had.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from mpipar import __version__
from mpipar.comm.algorithms import KINDS
from mpipar.comm.algorithms.auto import CALLS, SIZES
from mpipar.comm.facts import broadcast_text, gather_facts
from mpipar.config.run import AUTO
from mpipar.errors import DataError
from mpipar.files.bounded import parse_json, problems_as, read_text
from mpipar.files.cache import cache_folder
from mpipar.files.replace import replace_file
from mpipar.job.blas import processor
from mpipar.job.mpi import library_name

NAME = "algorithms.json"


def is_choice(value) -> bool:
    """Return whether a value is what `auto` chose for a group: an algorithm per call and size."""
    return (
        isinstance(value, dict)
        and value.keys() == {*CALLS}
        and all(
            isinstance(names, list)
            and len(names) == len(SIZES)
            and all(name in [*KINDS] for name in names)
            for names in value.values()
        )
    )


def folder_of_machine(session, run) -> Path | None:
    """Return the folder of this user's choices on these ranks; None on all but world rank 0.

    Its name stands for what they depend on: which ranks share a host, its processor, the number of
    cores of each rank, the MPI library, how messages are sent, and this version. Comm: a gather of
    facts over the world.
    """
    facts = gather_facts(
        session.world, [session.host_ranks, processor(), len(os.sched_getaffinity(0))]
    )
    if facts is None:
        return None
    text = json.dumps([__version__, library_name(session.world), run.sync_sends, facts])
    return cache_folder(f"algorithms/{hashlib.sha256(text.encode()).hexdigest()[:16]}")


def known_choices(session, run, folders: list[Path], log) -> tuple[dict, Path | None]:
    """Return ({group: chosen algorithms}, where to keep what a new run measures).

    folders: of this run and of those that it continues. The first that has choices counts; without
    any, those of the machine do. The second value is the machine's folder, on world rank 0 if no
    run has had a say, else None. log: is told where the choices come from. Raises DataError on
    every rank for a damaged file. Comm: a gather of facts; an agreement; a text of world rank 0.
    """
    if run.all_reduce != AUTO:
        return {}, None
    machine = folder_of_machine(session, run)
    folder = next((one for one in (*folders, machine) if one and os.path.lexists(one / NAME)), None)

    def read() -> str:
        if session.world.rank > 0 or folder is None:
            return "{}"
        with problems_as(DataError, str(folder / NAME), "remove it, and mpipar measures again"):
            found = parse_json(text := read_text(NAME, root=folder))
            if not isinstance(found, dict) or not all(map(is_choice, found.values())):
                raise ValueError("must have algorithms for each group")
            return text

    chosen = json.loads(broadcast_text(session.world, session.agree(read)))
    if folder is not None and folder == machine:
        log(
            "--all-reduce auto: as an earlier run measured on these ranks; to measure again,"
            f" remove {machine / NAME}"
        )
    return chosen, machine if folder in (None, machine) else None


def keep_choices(world, folder: Path, machine: Path | None, chosen: dict) -> dict[str, bytes]:
    """Write the choices that any rank knows to the run folder, and to the machine's if given.

    Return what was written to the run folder, on world rank 0. Comm: a gather of facts over the
    world.
    """
    facts = gather_facts(world, chosen)
    if not facts or not any(facts):
        return {}
    groups = {name: found for fact in facts for name, found in sorted(fact.items())}
    content = (json.dumps(groups, indent=1) + "\n").encode()
    replace_file(NAME, [content], root=folder)
    if machine is not None:
        with suppress(OSError):  # they can be measured again
            replace_file(NAME, [content], root=machine)
    return {NAME: content}
