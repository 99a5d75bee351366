"""A step of every rank of a layout in other programs' formats: `explain --goal` and `--chakra`.

A file or folder gets its final name only when it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from mpipar.comm.grid import Grid
from mpipar.config.sections import Config
from mpipar.console.tables import nbytes
from mpipar.errors import OutputError
from mpipar.files.bounded import problems_as
from mpipar.files.replace import new_folder, replace_file
from mpipar.files.text import counted
from mpipar.plan.chakra import Groups, trace_of
from mpipar.plan.goal import goal_text
from mpipar.plan.script import all_scripts

PREFIX, GROUPS = "step", "comm_groups.json"  # names in the folder of --chakra


def checked_size(pieces: Iterable[bytes], place: Path, files: int) -> Iterator[bytes]:
    """Yield the pieces of files unchanged; raise OutputError if those of `files` ranks do not fit.

    The first rank's size is taken for that of all. place: a folder on the disk.
    """
    for number, piece in enumerate(pieces):
        if number == 1:
            needed, free = files * len(piece), shutil.disk_usage(place).free
            if needed > free:
                raise OutputError(
                    f"{counted(files, 'rank')} need about {nbytes(needed)}, and"
                    f" {place} has {nbytes(free)} left: take a smaller layout, fewer"
                    " microbatches, or a larger --bucket-bytes"
                )
        yield piece


def write_goal(config: Config, name: str, gflops: float) -> str:
    """Write the GOAL text of all ranks; return lines to print. Raises OutputError."""
    path, num_ranks = Path(name), Grid.of(config.grid, 0).world_size
    with problems_as(OutputError, f"--goal {name}", "name another file"):
        if path.is_dir():
            raise ValueError("is a folder")
        text = goal_text(all_scripts(config), num_ranks, gflops)
        replace_file(path, checked_size(text, path.parent, num_ranks), sync=False)
    size = nbytes(path.stat().st_size)
    return (
        f"{name}: GOAL of {counted(num_ranks, 'rank')}, {size}; computing, in ns, at"
        f" {gflops:g} GFLOP/s\nsimulate it: txt2bin -i {name} -o {name}.bin && LogGOPSim -f"
        f" {name}.bin"
    )


def write_chakra(config: Config, name: str, gflops: float | None) -> str:
    """Write a Chakra trace per rank; return lines to print. Raises OutputError."""
    path, num_ranks, groups = Path(name), Grid.of(config.grid, 0).world_size, Groups()
    with (
        problems_as(OutputError, f"--chakra {name}", "name a new folder"),
        new_folder(path) as unfinished,
    ):
        for script in all_scripts(config):
            file = unfinished / f"{PREFIX}.{script.world_rank}.et"
            file.write_bytes(b"".join(trace_of(script, groups, gflops)))
            if script.world_rank == 0:
                list(checked_size([b"", file.read_bytes()], unfinished, num_ranks))
        (unfinished / GROUPS).write_text(json.dumps(groups.listed()) + "\n")
        size = sum(file.stat().st_size for file in unfinished.iterdir())
    return (
        f"{name}: Chakra traces of {counted(num_ranks, 'rank')}, {nbytes(size)}, and their"
        f" groups\nsimulate them: astra-sim with --workload-configuration={name}/{PREFIX}"
        f" --comm-group-configuration={name}/{GROUPS}"
    )
