"""The fastest algorithm by size: the rows of `--ways mpipar.comm,algorithms` side by side.

    python -m bench.interconnect all-reduce --ways mpipar.comm,algorithms --launches 7 --json FILE
    python -m bench.interconnect.algorithms FILE... [--write]    # --write: into bench/results/

All algorithms run in the same processes, in turns. `mpi_us` is MPI's own. `in_it_us` is the window
with an array that is placed in it, as gradients are. Times are medians over launches. A gain is
MPI's time over the other one, a median over launches with the smallest and the largest. `_p5` is
the gain of the fastest twentieth of the iterations, which other programs disturb least.
"""

from __future__ import annotations

from statistics import median

from bench.interconnect import records
from bench.interconnect.cases import BY, COMM, IN_WINDOW
from bench.program import Outcome, Program
from mpipar.errors import DataError

COLUMNS = {COMM: "mpi_us", **{via: f"{name}_us" for via, name in BY.items()}, IN_WINDOW: "in_it_us"}
GAINS = {"window_gain": "by window", "in_it_gain": IN_WINDOW}


def compared(rows) -> list[dict]:
    """Return a line for each collective, number of ranks and size that was run in several ways."""
    found: dict = {}
    for row in rows:
        if row["via"] in COLUMNS:
            times = found.setdefault((row["case"], len(row["ranks"]), row["size_bytes"]), {})
            times.setdefault(row["via"], {})[row["launch"]] = row["median_us"], row["p5_us"]
    lines = []
    for (case, ranks, size), ways in sorted(found.items()):
        if len(ways) < 2 or COMM not in ways:
            continue
        middle = {via: median(time for time, _ in own.values()) for via, own in ways.items()}
        line = {"case": case, "ranks": ranks, "size_bytes": size, "launches": len(ways[COMM])}
        line |= {name: middle.get(via, "-") for via, name in COLUMNS.items()}
        line["fastest"] = (
            min(set(middle) - {IN_WINDOW}, key=middle.__getitem__)
            .removeprefix("by ")
            .replace(COMM, "mpi")
        )
        for name, via in GAINS.items():
            for place, of in enumerate(("", "_p5")):
                line[f"{name}{of}"] = gain(ways[COMM], ways.get(via), place)
        lines.append(line)
    return lines


def gain(own: dict, other: dict | None, place: int) -> str:
    """Return MPI's time over another one, launch by launch: the median, smallest and largest.

    place: of the time that is compared.
    """
    if other is None:
        return "-"
    factors = [own[launch][place] / other[launch][place] for launch in own if launch in other]
    return f"{median(factors):.1f} ({min(factors):.1f} to {max(factors):.1f})"


def measured(args, session) -> Outcome:
    """Return the lines of the files."""
    lines = compared(records.rows_of(args.files, tell=True))
    if not lines:
        raise DataError(
            f"{', '.join(args.files)}: no collective by several algorithms: measure"
            " with --ways mpipar.comm,algorithms"
        )
    return Outcome(lines, records.facts_of(args.files[0]))


main = Program(
    "interconnect.algorithms",
    __doc__,
    measured,
    kept="bench/results/algorithms.json",
    add=lambda parser: parser.add_argument(
        "files", metavar="FILE", nargs="+", help="of bench.interconnect --json"
    ),
).started(__name__)
